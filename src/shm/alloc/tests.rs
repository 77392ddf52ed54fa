use super::*;

fn allocator() -> Allocator {
    Allocator::new(Arena::create_sized(1 << 30, 1, 8).unwrap(), 0)
}

#[test]
fn classes_cover_all_sizes() {
    for pages in (1..5000).chain([1 << 20, (1 << 20) + 1, 1 << 28]) {
        let class = class_of(pages);
        assert!(class < CLASSES);
        assert!(class_pages(class) >= pages);
        assert_eq!(class_of(class_pages(class)), class);
        assert!(class == 0 || class_pages(class - 1) < pages);
    }
}

#[test]
fn blocks_are_reused_warm_and_last_in_first_out() {
    let mut a = allocator();
    let one = a.allocate(100_000, WORKER).unwrap();
    let two = a.allocate(100_000, WORKER).unwrap();
    assert_ne!(one, two);
    a.release(one);
    a.release(two);
    assert_eq!(a.allocate(100_000, WORKER).unwrap(), two);
    assert_eq!(a.allocate(99_000, WORKER).unwrap(), one);
}

#[test]
fn a_large_block_is_awaited_while_the_loop_holds_one_that_fits() {
    const LEN: u64 = 8 << 20;
    let mut a = allocator();
    assert!(!a.awaits(LEN).unwrap(), "nothing is held");
    let id = a.allocate(LEN, CONSUMER).unwrap();
    assert!(a.is_ahead());
    assert!(!a.awaits(LEN).unwrap(), "the loop does not hold it yet");
    a.arena.clone().mark_delivered(0, id).unwrap();
    assert!(!a.is_ahead());
    assert!(a.awaits(LEN).unwrap() && a.awaits(LEN * 3 / 4).unwrap());
    for other in [LARGE - 1, LEN / 2, LEN + PAGE] {
        assert!(!a.awaits(other).unwrap(), "a request for {other} bytes would not use it");
    }
    let idle = a.allocate(LEN, WORKER).unwrap();
    a.release(idle);
    assert!(!a.awaits(LEN).unwrap(), "a warm block is idle");
    a.trim(0).unwrap();
    assert!(a.awaits(LEN).unwrap());
    a.arena.clone().release_delivered(0, id);
    assert!(!a.awaits(LEN).unwrap(), "it was returned");
    assert_eq!(a.allocate(LEN, WORKER).unwrap(), id);
}

#[test]
fn surplus_pages_are_released_and_the_working_set_stays() {
    let mut a = allocator();
    let burst: Vec<u32> = (0..32).map(|_| a.allocate(1 << 20, WORKER).unwrap()).collect();
    let peak = a.warm_bytes();
    burst.into_iter().for_each(|id| a.release(id));
    for _ in 0..TRIM_WINDOW * 40 {
        let id = a.allocate(1 << 20, WORKER).unwrap();
        a.release(id);
    }
    assert!(a.warm_bytes() <= peak / 8, "{} of {peak}", a.warm_bytes());
    assert!(a.warm_bytes() >= 1 << 20);
}

#[test]
fn slow_batches_release_the_pages_of_a_warm_up_before_the_window_ends() {
    let later = || sys::clock::monotonic() + TRIM_AFTER;
    let mut a = allocator();
    let warm_up: Vec<u32> = (0..4).map(|_| a.allocate(1 << 20, WORKER).unwrap()).collect();
    warm_up.into_iter().for_each(|id| a.release(id));
    let mut batches = |count: u32, now: &dyn Fn() -> Duration| {
        for _ in 0..count {
            let ids = [0, 1].map(|_| a.allocate(1 << 20, WORKER).unwrap());
            a.count_batch(now).unwrap();
            ids.into_iter().for_each(|id| a.release(id));
        }
        a.warm_bytes()
    };
    assert_eq!(batches(TRIM_BATCHES * 3, &|| Duration::ZERO), 4 << 20, "quick batches wait for the end of a window");
    // The low-water mark of the first window is 0, its initial value. Then [`TRIM_PATIENCE`] windows must pass.
    let warm = batches(TRIM_BATCHES * (1 + u32::from(TRIM_PATIENCE)), &later);
    assert_eq!(warm, 2 << 20, "the pages of two blocks stay");
}

#[test]
fn blocks_of_other_sizes_do_not_pile_up() {
    let mut a = allocator();
    for round in 0..20 {
        for size in [1 << 20, 9 << 20, 3 << 20, 27 << 20, 100 << 10] {
            let id = a.allocate(size + round * 4096, WORKER).unwrap();
            a.release(id);
            assert!(a.warm_bytes() <= (27 << 20) * 5 / 4 + (1 << 20), "{}", a.warm_bytes());
        }
    }
    let (warm, idle) = (a.warm_bytes(), a.idle);
    let table = a.arena.table(0);
    let all: u64 = table[..a.mapped.len()].iter().map(|b| b.warm.load(Ordering::Relaxed)).sum();
    assert_eq!((all, warm), (warm, idle), "nothing is held");
}

#[test]
fn a_warm_block_of_a_similar_size_is_taken() {
    let mut a = allocator();
    let id = a.allocate(16 << 20, WORKER).unwrap();
    a.release(id);
    let near = a.allocate(9 << 20, WORKER).unwrap();
    assert_eq!(near, id);
    a.release(near);
    assert_ne!(a.allocate(8 << 20, WORKER).unwrap(), id, "half of it would be idle");
    assert_ne!(a.allocate(17 << 20, WORKER).unwrap(), id);
}

#[test]
fn other_workers_reservations_count_until_they_end() {
    let arena = Arena::create_sized(1 << 30, 3, 8).unwrap();
    arena.promise(0, 5);
    arena.promise(2, 7);
    // Region 3 is the main process's, so this promise does nothing.
    arena.promise(3, 100);
    assert_eq!([0, 1, 2, 3].map(|region| arena.promised_by_others(region)), [7, 12, 5, 12]);
    let mut a = Allocator::new(arena.clone(), 2);
    a.allocate(100_000, WORKER).unwrap();
    assert_eq!(arena.promised_by_others(1), 5);
}

#[test]
fn callers_of_the_allocator_wait_for_other_workers_reservations() {
    let arena = Arena::create_sized(1 << 30, 2, 8).unwrap();
    let mut a = Allocator::new(arena.clone(), 1);
    arena.promise(0, u64::MAX / 2);
    let refused = a.allocate(1 << 20, WORKER);
    assert!(matches!(refused, Err(Error::NoMemory { passing: true, .. })), "{refused:?}");
    let mut pauses = 0;
    let allocated = retry_while_reserved(
        || a.allocate(1 << 20, WORKER),
        |_| {
            pauses += 1;
            arena.promise(0, 0);
        },
    );
    assert!(allocated.is_ok() && pauses == 1);
    // A request that would fail even without the other reservations is refused at once.
    let refused = || Err::<(), _>(Error::NoMemory { wanted: 1, limit: String::new(), headroom: 0, passing: false });
    assert!(retry_while_reserved(refused, |_| panic!("it must not wait")).is_err());
}

#[test]
fn a_block_is_read_up_to_its_capacity() {
    let mut a = allocator();
    let id = a.allocate(5000, CONSUMER).unwrap();
    let bytes: Vec<u8> = (0..5000).map(|i| i as u8).collect();
    // SAFETY: the block has 5000 bytes, and nothing else reads them.
    unsafe { a.arena.block_memory(0, id, 5000).unwrap().as_ptr().copy_from(bytes.as_ptr(), 5000) };
    let mut buffer = vec![1; 9000];
    a.arena.read_block(0, id, 5000, &mut buffer).unwrap();
    assert_eq!(buffer, bytes);
    for (region, id, len) in [(0, id, 8193), (0, id + 1, 1), (2, 0, 1)] {
        let refused = a.arena.read_block(region, id, len, &mut buffer);
        assert!(matches!(refused, Err(Error::Corrupt { .. })), "{refused:?}");
    }
    assert_eq!(buffer, bytes);
}

#[test]
fn addresses_are_found_in_their_block() {
    let mut a = allocator();
    let ids: Vec<u32> = [5000, 70_000, 4096].iter().map(|&len| a.allocate(len, WORKER).unwrap()).collect();
    for &id in &ids {
        let start = a.arena.block_memory(0, id, 1).unwrap().as_ptr() as usize;
        assert_eq!(a.find(start), Some((id, 0)));
        assert_eq!(a.find(start + 4095), Some((id, 4095)));
    }
    assert_eq!(a.find(1), None);
    assert_eq!(a.find(a.arena.region_base(0) as usize + (100 << 20)), None);
}
