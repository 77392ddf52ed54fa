use std::collections::VecDeque;
use std::sync::Arc;

use proptest::prelude::*;

use super::super::{Allocator, class_within};
use super::*;
use crate::shm::arena::Arena;
use crate::shm::block::{self, CONSUMER, DELIVERED, FORKED, RETURNING, WORKER};
use crate::shm::layout::{Needs, PAGE};

const KIB: u64 = 1 << 10;
/// The holder bits that these tests use.
const HOLDERS: u32 = CONSUMER | WORKER | FORKED;

/// Returns an allocator for a region of about 2 MiB.
fn allocator() -> Allocator {
    Allocator::new(Arena::create_sized(5 << 20, 1, 8).unwrap(), 0)
}

fn region_len(a: &Allocator) -> u64 {
    a.arena.geometry().region_len
}

/// Returns the ID, offset, capacity and state of each table entry that has a block, ordered by offset.
fn blocks(a: &Allocator) -> Vec<(u32, u64, u64, u32)> {
    let table = &a.arena.table(a.region)[..a.arena.block_count(a.region) as usize];
    let of = |(id, entry): (u32, &BlockEntry)| {
        let [offset, capacity] = [&entry.offset, &entry.capacity].map(|word| word.load(Ordering::Relaxed));
        (capacity > 0).then(|| (id, offset, capacity, entry.state.load(Ordering::Relaxed)))
    };
    let mut blocks: Vec<_> = (0..).zip(table).filter_map(of).collect();
    blocks.sort_unstable_by_key(|block| block.1);
    blocks
}

fn block_of(a: &Allocator, id: u32) -> (u64, u64) {
    let (_, offset, capacity, _) = blocks(a).into_iter().find(|block| block.0 == id).expect("the table has the block");
    (offset, capacity)
}

fn warm_bytes_of(table: &[BlockEntry], ids: impl IntoIterator<Item = u32>) -> u64 {
    ids.into_iter().map(|id| table[id as usize].warm.load(Ordering::Relaxed)).sum()
}

/// Checks that the blocks cover the region up to `fresh` without a gap, and that the owner's private records match the
/// table. Each idle block must be in the free list of its class, exactly once; no other block may be in a free list.
fn check(a: &Allocator) {
    let table = a.arena.table(a.region);
    let blocks = blocks(a);
    let mut end = 0;
    for &(id, offset, capacity, _) in &blocks {
        assert_eq!(offset, end, "block {id}");
        assert!(capacity.is_multiple_of(PAGE) && table[id as usize].warm.load(Ordering::Relaxed) <= capacity);
        assert!(a.mapped[id as usize] <= capacity);
        end += capacity;
    }
    assert!(end == a.fresh && end <= region_len(a));
    let mut listed: Vec<u32> = Vec::new();
    for (class, list) in a.free.iter().enumerate() {
        assert!(list.cold <= list.blocks.len() && list.low <= list.blocks.len());
        for &id in &list.blocks {
            assert_eq!(class_within(table[id as usize].capacity.load(Ordering::Relaxed)), class);
            listed.push(id);
        }
    }
    listed.sort_unstable();
    let mut free: Vec<u32> = blocks.iter().filter(|block| block.3 == 0).map(|block| block.0).collect();
    free.sort_unstable();
    assert_eq!(listed, free);
    assert_eq!(a.idle, warm_bytes_of(table, listed));
    assert_eq!(a.warm, warm_bytes_of(table, blocks.iter().map(|block| block.0)));
    assert_eq!(a.places, blocks.iter().map(|block| (block.1, block.0)).collect());
    let has_no_block = |id: &u32| table[*id as usize].capacity.load(Ordering::Relaxed) == 0;
    let mut spare = a.spare.clone();
    spare.sort_unstable();
    assert_eq!(spare, (0..a.mapped.len() as u32).filter(has_no_block).collect::<Vec<u32>>());
}

/// Fills the region with held blocks of `len` bytes.
fn fill(a: &mut Allocator, len: u64) -> Vec<u32> {
    let mut ids = Vec::new();
    loop {
        match a.allocate(len, WORKER) {
            Ok(id) => ids.push(id),
            Err(error) => {
                assert!(matches!(error, Error::RegionFull { longest, .. } if longest < len), "{error}");
                return ids;
            }
        }
    }
}

#[test]
fn idle_blocks_with_a_held_one_between_them_are_not_joined() {
    for holder in [WORKER, CONSUMER, FORKED, block::WORKER_FORKED, CONSUMER | DELIVERED, RETURNING] {
        let mut a = allocator();
        let ids = fill(&mut a, 64 * KIB);
        a.arena.table(0)[ids[4] as usize].state.store(holder, Ordering::Relaxed);
        a.release(ids[3]);
        a.release(ids[5]);
        let error = a.allocate(128 * KIB, WORKER).unwrap_err();
        let Error::RegionFull { wanted, size, idle, longest } = error else { panic!("{error}") };
        assert_eq!((wanted, size, longest), (128 * KIB, region_len(&a), 64 * KIB));
        assert_eq!(idle, 128 * KIB + a.tail());
        check(&a);
        a.allocate(60 * KIB, WORKER).unwrap();
        a.allocate(60 * KIB, WORKER).unwrap();
        assert!(a.allocate(60 * KIB, WORKER).is_err());
        check(&a);
    }
}

#[test]
fn a_full_region_says_what_is_in_use_and_what_is_idle() {
    let error = Error::RegionFull { wanted: 9, size: 20, idle: 12, longest: 8 };
    assert!(error.to_string().starts_with(
        "cannot get 9 bytes of shared memory for a batch: each worker's region of the shared memory has 20 bytes; in \
         this one, 8 bytes are in use and 12 bytes are idle, at most 8 of them in one piece; use a smaller batch_size"
    ));
}

#[test]
fn a_larger_block_is_cut_and_keeps_its_pages() {
    let mut a = allocator();
    let whole = region_len(&a);
    let id = a.allocate(whole, WORKER).unwrap();
    a.release(id);
    assert_eq!(a.allocate(200 * KIB, WORKER).unwrap(), id);
    assert_eq!(block_of(&a, id), (0, 224 * KIB));
    assert_eq!((a.warm, a.idle), (whole, whole - 224 * KIB));
    check(&a);
}

#[test]
fn pages_of_joined_blocks_are_released() {
    let mut a = allocator();
    let pages = |a: &Allocator| {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(format!("/proc/self/fd/{}", a.arena.raw_fd())).unwrap().blocks() * 512
    };
    let before = pages(&a);
    let ids = fill(&mut a, 100 * KIB);
    ids.iter().for_each(|id| a.release(*id));
    // The joined block keeps only the pages at its start, and gets new ones for the requested bytes.
    let id = a.allocate(region_len(&a) / 2, WORKER).unwrap();
    check(&a);
    a.release(id);
    a.trim(0).unwrap();
    assert!(a.warm < KIB * 64 && pages(&a) < before + 128 * KIB, "{} {}", a.warm, pages(&a) - before);
}

#[test]
fn a_killed_owner_leaves_no_gap_and_no_overlap() {
    // Makes a full region in which four neighbors are idle: those after `before` held blocks, or the last four.
    let make = |before: usize, at_the_end: bool| {
        let mut a = allocator();
        let mut ids = fill(&mut a, 64 * KIB);
        if at_the_end {
            ids.drain(..ids.len() - 4 - before);
        }
        let idle = ids[before..before + 4].to_vec();
        idle.iter().for_each(|id| a.release(*id));
        (idle, a)
    };
    // The owner is killed while it joins the four neighbors, in the middle or at the end of the region. The blocks
    // after the first disappear one by one, the last block first; `gone` of them have disappeared.
    for (at_the_end, gone) in [false, true].into_iter().flat_map(|end| (0..4).map(move |gone| (end, gone))) {
        let (ids, a) = make(3, at_the_end);
        let held = blocks(&a).iter().filter(|block| block.3 != 0).count();
        for &id in ids[1..].iter().rev().take(gone) {
            a.arena.table(0)[id as usize].capacity.store(0, Ordering::Relaxed);
        }
        let mut b = Allocator::new(a.arena.clone(), 0);
        check(&b);
        b.allocate(256 * KIB, CONSUMER).unwrap();
        check(&b);
        assert_eq!(blocks(&b).iter().filter(|block| block.3 != 0).count(), held + 1);
    }
    // The owner is killed while it cuts a block: the remainder has no entry yet.
    let (ids, a) = make(3, false);
    let table = a.arena.table(0);
    table[ids[1] as usize].capacity.store(16 * KIB, Ordering::Relaxed);
    let mut b = Allocator::new(a.arena.clone(), 0);
    check(&b);
    let id = b.allocate(256 * KIB, CONSUMER).unwrap();
    assert_eq!(block_of(&b, id).1, 256 * KIB);
    check(&b);
}

#[derive(Clone, Debug)]
enum Act {
    Allocate(u64, u32),
    /// The holders with the given bits release a block.
    Release(usize, u32),
    /// A message is delivered, so that its block holds the user's tensors.
    Deliver(usize),
    /// The main process forks.
    Fork(usize),
    Trim(u64),
    /// The worker is killed, and another one starts.
    Restart,
}

fn acts() -> impl Strategy<Value = Act> {
    let len = (0u32..20, 0u64..=1 << 19).prop_map(|(shift, len)| (len >> shift).max(1));
    prop_oneof![
        8 => (len, prop_oneof![Just(WORKER), Just(CONSUMER), Just(WORKER | CONSUMER)])
            .prop_map(|(len, holder)| Act::Allocate(len, holder)),
        8 => (0usize..1000, prop_oneof![4 => Just(HOLDERS), 1 => Just(WORKER), 1 => Just(CONSUMER), 1 => Just(FORKED)])
            .prop_map(|(which, bits)| Act::Release(which, bits)),
        1 => (0usize..1000).prop_map(Act::Deliver),
        1 => (0usize..1000).prop_map(Act::Fork),
        1 => (0u64..1 << 20).prop_map(Act::Trim),
        1 => Just(Act::Restart),
    ]
}

/// A held block as the model tracks it.
#[derive(Debug)]
struct HeldBlock {
    id: u32,
    len: u64,
    place: (u64, u64),
    bits: u32,
    delivered: bool,
    stamp: u64,
}

impl HeldBlock {
    /// Returns the addresses of the block's first and last 8 bytes.
    fn words(&self, arena: &Arena) -> [*mut u64; 2] {
        let start = arena.block_memory(0, self.id, self.len).unwrap().as_ptr();
        // SAFETY: the block has at least `len` bytes, and at least a page.
        [start, unsafe { start.add(self.len.saturating_sub(8) as usize) }].map(|at| at.cast::<u64>())
    }
}

/// Returns the length in bytes of the region's longest part without a held block.
fn longest_gap(held: &[HeldBlock], region: u64) -> u64 {
    let mut places: Vec<(u64, u64)> = held.iter().map(|block| block.place).collect();
    places.push((region, 0));
    places.sort_unstable();
    let mut end = 0;
    let gaps = places.into_iter().map(|(offset, capacity)| offset - std::mem::replace(&mut end, offset + capacity));
    gaps.max().unwrap_or(0)
}

fn run(acts: Vec<Act>) {
    let mut a = allocator();
    let arena: Arc<Arena> = a.arena.clone();
    let region = region_len(&a);
    let mut held: Vec<HeldBlock> = Vec::new();
    for (stamp, act) in (1..).zip(acts) {
        match act {
            Act::Allocate(len, holder) => match a.allocate(len, holder) {
                Ok(id) => {
                    let new = HeldBlock { id, len, place: block_of(&a, id), bits: holder, delivered: false, stamp };
                    assert!(held.iter().all(|other| other.id != id));
                    for word in new.words(&arena) {
                        // SAFETY: the block is new, and the word is in it.
                        unsafe { word.write_unaligned(stamp) };
                    }
                    held.push(new);
                }
                Err(Error::RegionFull { idle, longest, .. }) => {
                    let gap = longest_gap(&held, region);
                    assert!(gap < len, "{len} bytes fit into {gap}");
                    assert_eq!(longest, gap);
                    assert_eq!(idle, region - held.iter().map(|block| block.place.1).sum::<u64>());
                }
                Err(error) => panic!("{error}"),
            },
            Act::Release(which, bits) if !held.is_empty() => {
                let at = which % held.len();
                let block = &mut held[at];
                for bit in [WORKER, CONSUMER, FORKED].map(|bit| bit & bits & block.bits) {
                    match bit {
                        0 => continue,
                        WORKER => a.release(block.id),
                        CONSUMER if block.delivered => arena.release_delivered(0, block.id),
                        bit => arena.release(0, block.id, bit),
                    }
                    block.bits &= !bit;
                    block.delivered &= bit != CONSUMER;
                }
                if block.bits == 0 {
                    held.swap_remove(at);
                }
            }
            Act::Deliver(which) if !held.is_empty() => {
                let at = which % held.len();
                let may = held[at].bits & CONSUMER != 0 && !held[at].delivered;
                assert_eq!(arena.mark_delivered(0, held[at].id).is_ok(), may);
                held[at].delivered |= may;
            }
            Act::Fork(which) if !held.is_empty() => {
                let at = which % held.len();
                let state = &arena.table(0)[held[at].id as usize].state;
                if block::mark_if(state, CONSUMER | DELIVERED, FORKED) {
                    held[at].bits |= FORKED;
                }
            }
            Act::Trim(budget) => a.trim(budget).unwrap(),
            Act::Restart => {
                drop(a);
                arena.reset_worker(0, |_| ()).unwrap();
                held.iter_mut().for_each(|block| block.bits &= !WORKER);
                held.retain(|block| block.bits != 0);
                a = Allocator::new(arena.clone(), 0);
            }
            _ => continue,
        }
        a.collect().unwrap();
        check(&a);
        for block in &held {
            assert_eq!(block_of(&a, block.id), block.place);
            let state = arena.table(0)[block.id as usize].state.load(Ordering::Relaxed);
            assert_eq!(state & HOLDERS, block.bits, "{block:?}");
            let [first, last] = block.words(&arena);
            assert_eq!(a.find(first as usize), Some((block.id, 0)));
            // SAFETY: as above.
            let stamps = unsafe { [first.read_unaligned(), last.read_unaligned()] };
            assert!(stamps[1] == block.stamp && (stamps[0] == block.stamp || block.len < 16), "{block:?}");
        }
    }
    for block in held {
        for bit in [WORKER, CONSUMER, FORKED].map(|bit| bit & block.bits) {
            match bit {
                0 => {}
                WORKER => a.release(block.id),
                CONSUMER if block.delivered => arena.release_delivered(0, block.id),
                bit => arena.release(0, block.id, bit),
            }
        }
    }
    assert!(a.allocate(region, CONSUMER).is_ok(), "nothing is held");
    check(&a);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// A request fails only if no gap between held blocks is long enough, and held blocks never change.
    #[test]
    fn held_blocks_stay_and_idle_ones_are_found(acts in prop::collection::vec(acts(), 1..200)) {
        run(acts);
    }
}

/// A SplitMix64 generator of random numbers.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        (-2.0 * (1.0 - self.unit()).ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }
}

/// Simulates 64 workers that make 100,000 batches in all, with log-normal sizes from 4 KiB to 1 MiB. This is a 1:1024
/// model of batches of up to 1 GiB. Each worker has four batches in flight, and the training loop keeps some of them
/// longer. A region has room for four batches of the largest size.
#[test]
fn batches_of_log_normal_sizes_fit() {
    const WORKERS: u32 = 64;
    const LARGEST: u64 = 1 << 20;
    const REGION: u64 = 4 * LARGEST;
    let needs = Needs { workers: WORKERS, outstanding: 2 * WORKERS, shared_queue: false, snapshots: false };
    let total = crate::shm::layout::Geometry::total_for(REGION, needs).unwrap();
    let arena = Arena::create_for(total, needs).unwrap();
    let mut owners: Vec<_> =
        (0..WORKERS).map(|worker| (Allocator::new(arena.clone(), worker), VecDeque::new())).collect();
    let mut random = Random(1);
    let (mut refused, mut entries) = (0, 0);
    for batch in 0..100_000 {
        let (owner, in_flight) = &mut owners[batch % WORKERS as usize];
        let len = ((16.0 * KIB as f64 * (1.5 * random.normal()).exp()) as u64).clamp(4 * KIB, LARGEST);
        if in_flight.len() >= 4 {
            // Usually the oldest batch is released.
            let which = if random.next().is_multiple_of(8) { random.next() as usize % 4 } else { 0 };
            let id: u32 = in_flight.remove(which).unwrap();
            arena.release(owner.region(), id, CONSUMER);
        }
        match owner.allocate(len, CONSUMER) {
            Ok(id) => in_flight.push_back(id),
            Err(Error::RegionFull { .. }) => refused += 1,
            Err(error) => panic!("{error}"),
        }
    }
    for (owner, _) in &owners {
        check(owner);
        entries = entries.max(arena.block_count(owner.region()));
    }
    assert_eq!(refused, 0);
    assert!(entries < 200, "{entries}");
}
