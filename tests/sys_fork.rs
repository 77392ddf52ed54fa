//! What a forked child can do with its parent's objects.

use std::io::Write;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustloader::error::Error;
use rustloader::sys::event::EventFd;
use rustloader::sys::fork::{ForkHandlers, Step};
use rustloader::sys::fork_witness::ForkWitness;
use rustloader::sys::map::Mapping;
use rustloader::sys::poll::PollSet;
use rustloader::sys::{fork, memfd};

#[path = "common/children.rs"]
mod children;

use children::Child;

/// Runs `work` in a child. Panics if it returns false or the child is killed.
fn in_child(work: impl FnOnce() -> bool) {
    assert_eq!(Child::fork(work).wait(), 0, "wait status of the child");
}

/// The handlers that have run, two digits each: 1, 2 or 3 for prepare, parent or child, and the step's number.
static TRACE: AtomicU64 = AtomicU64::new(0);
static GENERATION_IN_CHILD_HANDLER: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static TRACED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

fn record(part: u64, step: Step) {
    // Other tests of this file fork too.
    if TRACED.get() {
        TRACE.store(TRACE.load(Ordering::Relaxed) * 100 + 10 * part + step as u64, Ordering::Relaxed);
    }
}

static CONNECTIONS: ForkHandlers = ForkHandlers {
    prepare: || record(1, Step::Connections),
    parent: || record(2, Step::Connections),
    child: || {
        record(3, Step::Connections);
        GENERATION_IN_CHILD_HANDLER.store(fork::generation(), Ordering::Relaxed);
    },
};
static BLOCKS: ForkHandlers = ForkHandlers {
    prepare: || {
        record(1, Step::Blocks);
        std::panic::resume_unwind(Box::new("a panic stops no other step"));
    },
    parent: || record(2, Step::Blocks),
    child: || record(3, Step::Blocks),
};
static ARRAYS: ForkHandlers = ForkHandlers {
    prepare: || record(1, Step::Arrays),
    parent: || record(2, Step::Arrays),
    child: || record(3, Step::Arrays),
};

#[test]
fn steps_run_in_their_own_order_around_a_fork_and_the_generation_rises_in_the_child() {
    let before = fork::generation();
    assert_eq!(Step::ALL, [Step::Generation, Step::Connections, Step::Blocks, Step::Arrays]);
    assert!(Step::ALL.iter().enumerate().all(|(place, &step)| step as usize == place));
    // They are registered in a different order.
    for (step, handlers) in [(Step::Blocks, &BLOCKS), (Step::Arrays, &ARRAYS), (Step::Connections, &CONNECTIONS)] {
        assert!(fork::on_fork(step, handlers).unwrap());
        assert!(!fork::on_fork(step, handlers).unwrap());
    }
    TRACED.set(true);
    in_child(|| {
        fork::generation() > before
            && GENERATION_IN_CHILD_HANDLER.load(Ordering::Relaxed) == fork::generation()
            && TRACE.load(Ordering::Relaxed) == 13_12_11_31_32_33
    });
    assert_eq!(TRACE.load(Ordering::Relaxed), 13_12_11_21_22_23);
    TRACED.set(false);
    assert_eq!(fork::generation(), before);
    in_child(|| {
        let here = fork::generation();
        in_child(|| fork::generation() > here);
        true
    });
}

#[test]
fn all_have_ended_once_the_last_child_has_whatever_it_closes() {
    let (witness, mapping) = ForkWitness::new().unwrap();
    let (go_reader, go_writer) = std::io::pipe().unwrap();
    let child = Child::fork(|| {
        let mut byte = 0_u8;
        let kept = go_reader.as_raw_fd() as u32;
        // SAFETY: the arguments are plain numbers. The child ends without using what it has closed.
        unsafe {
            libc::close_range(3, kept - 1, 0);
            libc::close_range(kept + 1, u32::MAX, 0);
        }
        // SAFETY: `byte` has room for one byte.
        unsafe { libc::read(go_reader.as_raw_fd(), (&raw mut byte).cast(), 1) == 1 }
    });
    drop(mapping);
    // The child may close its descriptors meanwhile, which changes nothing.
    for _ in 0..100 {
        assert!(!witness.all_ended());
        std::thread::sleep(Duration::from_millis(1));
    }
    (&go_writer).write_all(&[1]).unwrap();
    child.wait();
    // Another test's child may have been forked meanwhile, and holds the mapping for a moment.
    let end = std::time::Instant::now() + Duration::from_secs(60);
    while !witness.all_ended() {
        assert!(std::time::Instant::now() < end, "a process still holds the mapping");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_poll_set_is_dead_in_a_child() {
    for count in [1, 40] {
        let events: Vec<EventFd> = (0..count).map(|_| EventFd::new().unwrap()).collect();
        let mut set = PollSet::new();
        for (token, event) in events.iter().enumerate() {
            set.add(event.as_fd().as_raw_fd(), token as u64).unwrap();
        }
        in_child(|| {
            let mut ready = Vec::new();
            let dead = matches!(set.wait(None, &mut ready), Err(Error::Usage { .. }))
                && matches!(set.remove(0), Err(Error::Usage { .. }))
                && matches!(set.add(0, 99), Err(Error::Usage { .. }));
            let open = open_descriptors();
            // SAFETY: the child ends without using or dropping `set` again.
            drop(unsafe { std::ptr::read(&set) });
            dead && open_descriptors() == open
        });
        events[0].ring().unwrap();
        let mut ready = Vec::new();
        set.wait(None, &mut ready).unwrap();
        assert_eq!(ready, [0]);
    }
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn a_mapping_is_in_no_core_dump() {
    let fd = memfd::create("a", 4096).unwrap();
    let mapping = Mapping::new(fd.as_fd(), 4096).unwrap();
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let entry = maps.split_once(&format!("{:x}-", mapping.as_ptr() as usize)).unwrap().1;
    let flags = entry.lines().find(|line| line.starts_with("VmFlags:")).unwrap();
    assert!(flags.split(' ').any(|flag| flag == "dd"), "{flags}");
}
