//! A worker's slot: its process may end at any point, its rings and region are reset, and another process replaces it.
//! Other workers, and leases on its blocks, are unaffected.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rustloader::engine::completions::{Completions, Message};
use rustloader::error::Error;
use rustloader::shm::alloc::Allocator;
use rustloader::shm::arena::{Arena, ArenaRing};
use rustloader::shm::block::{CONSUMER, RETURNING, WORKER};
use rustloader::shm::layout::{BlockEntry, WorkerState};
use rustloader::shm::lease::Lease;
use rustloader::shm::ring::{Consumer, Producer};
use rustloader::sys::event::EventFd;
use rustloader::wire::{Leaf, Load, ResultEntry, ResultKind, TaskEntry, TaskKind, Timings};
use rustloader::worker::port::{Keep, Port, Received};

#[path = "common/children.rs"]
mod children;

use children::Child;

/// Bytes of a leaf: enough for a block of its own.
const LEAF: usize = 40_000;
/// Bytes of an index batch: more than fit in a ring's entry.
const INDEX: usize = 100;

fn open(arena: &Arc<Arena>, worker: u32) -> Port {
    let doorbell = EventFd::new().unwrap();
    Port::open(arena.clone(), worker, doorbell.as_fd().try_clone_to_owned().unwrap()).unwrap()
}

/// Allocates a block full of `fill`, which the worker holds.
fn leaf(port: &Port, fill: u8) -> Leaf {
    let (block, memory) = port.allocate(LEAF as u64).unwrap();
    // SAFETY: the block has this many bytes, and belongs to this worker until it is sent.
    unsafe { std::ptr::write_bytes(memory, fill, LEAF) };
    Leaf { block, len: LEAF as u64 }
}

/// Answers a task with one leaf.
fn answer(port: &Port, task: u64) {
    let leaf = leaf(port, task as u8);
    port.send(task, ResultKind::Plain, &[(leaf, Keep::No)], b"", Timings::default()).unwrap();
}

fn bytes(lease: &Lease) -> &[u8] {
    // SAFETY: the lease keeps the bytes, and no process writes to a delivered block.
    unsafe { std::slice::from_raw_parts(lease.ptr(), lease.len()) }
}

/// Returns the number of a region's blocks with any of `bits` in their state.
fn held(arena: &Arena, region: u32, bits: u32) -> usize {
    let table = &arena.table(region)[..arena.block_count(region) as usize];
    table.iter().filter(|block| block.state.load(Relaxed) & bits != 0).count()
}

/// The main process's side of worker 0, without engine and scheduler. It outlives the worker's processes.
struct Main {
    arena: Arc<Arena>,
    tasks: Producer<ArenaRing>,
    completions: Completions,
    allocator: Allocator,
}

impl Main {
    fn new() -> Self {
        let arena = Arena::create_sized(1 << 30, 2, 16).unwrap();
        let tasks = Producer::new(arena.task_ring(0));
        let allocator = Allocator::new(arena.clone(), arena.geometry().main_region());
        Self { completions: Completions::new(&arena), tasks, allocator, arena }
    }

    /// Sends a task whose index batch is in a block.
    fn send(&mut self, task: u64) {
        let block = self.allocator.allocate(INDEX as u64, CONSUMER).unwrap();
        let entry = TaskEntry::in_block(task, TaskKind::Plain, block, INDEX as u64);
        self.tasks.push(&entry.to_words()).unwrap();
    }

    /// Takes the next result of worker 0. Returns its task, and a lease on its leaf.
    fn take(&mut self) -> Option<(u64, Lease)> {
        let incoming = self.completions.pop(0).unwrap()?;
        let mut message = Message::open(&self.arena, &incoming, Vec::new()).unwrap();
        Some((incoming.entry.task, message.leaves.take(0).unwrap()))
    }

    /// Resets worker 0's slot for its next process. Returns the withdrawn tasks.
    fn reset(&mut self) -> Vec<u64> {
        let mut withdrawn = Vec::new();
        let region = self.arena.geometry().main_region();
        let take = |words| {
            let entry = TaskEntry::from_words(&words).unwrap();
            self.arena.release(region, entry.block.unwrap(), CONSUMER);
            withdrawn.push(entry.task);
        };
        self.arena.reset_worker(0, take).unwrap();
        assert_eq!(held(&self.arena, 0, WORKER), 0, "the worker holds nothing");
        let control = self.arena.control(0);
        assert_eq!((control.status.pid.load(Relaxed), control.sleeper.0.asleep.load(Relaxed)), (0, 0));
        assert_eq!(self.arena.promised_by_others(1), 0);
        let table = &self.arena.table(0)[..self.arena.block_count(0) as usize];
        let lost = |block: &&BlockEntry| block.state.load(Relaxed) & RETURNING != 0;
        assert!(table.iter().filter(lost).all(|block| block.warm.load(Relaxed) == 0), "lost blocks have no pages");
        withdrawn
    }
}

type End = fn(&Arc<Arena>, &Port);

/// Points at which a worker can be killed, and how many blocks of its region remain held because of it.
const POINTS: [(&str, usize, End); 8] = [
    ("idle", 0, |_, _| {}),
    ("asleep", 0, |arena, _| _ = arena.control(0).sleeper.0.announce()),
    ("a task was taken, and its index batch not yet released", 0, |arena, _| {
        Consumer::new(arena.task_ring(0)).pop().unwrap().unwrap();
    }),
    ("pages are promised", 0, |arena, _| arena.promise(0, 1 << 40)),
    ("a leaf was written", 0, |_, port| _ = leaf(port, 7)),
    ("a message was written and not published", 1, |arena, _| {
        Allocator::new(arena.clone(), 0).allocate(5000, CONSUMER).unwrap();
    }),
    ("returned blocks were taken off their stack", 0, |arena, _| {
        assert_ne!(arena.region_head(0).returned.swap(0, Relaxed), 0);
    }),
    ("a result was published and its ring not marked", 0, |arena, _| {
        let answered = TaskEntry::inline(98, TaskKind::Plain, &[]).unwrap();
        let entry = ResultEntry {
            task: answered.task,
            kind: ResultKind::Exhausted,
            block: None,
            len: 0,
            checksum: 0,
            timings: Timings::default(),
            load: Load::default(),
        };
        Producer::new(arena.result_ring(0)).push(&entry.to_words()).unwrap();
    }),
];

#[test]
fn a_worker_may_end_at_any_point() {
    for (point, stays, end) in POINTS {
        let mut main = Main::new();
        let arena = main.arena.clone();
        let port = open(&arena, 0);
        let other = open(&arena, 1);
        let before = (held(&arena, 1, !0), other.take_up().unwrap());
        main.send(0);
        main.send(1);
        assert!(matches!(port.receive(), Ok(Received::Task(entry)) if entry.task == 0), "{point}");
        answer(&port, 0);
        let (_, lease) = main.take().unwrap();
        end(&arena, &port);
        std::mem::forget(port);
        while main.completions.pop(0).unwrap().is_some() {}

        // Task 1 was not taken, or was taken last.
        assert!(main.reset().iter().all(|task| *task == 1), "{point}");
        assert_eq!(held(&arena, 0, CONSUMER), 1 + stays, "{point}");
        assert_eq!(held(&arena, 0, RETURNING) > 0, point.starts_with("returned blocks"), "{point}");
        assert_eq!((held(&arena, 1, !0), other.take_up().unwrap()), before, "{point}");

        let port = open(&arena, 0);
        assert!(port.take_up().unwrap().is_none() && main.take().is_none(), "{point}");
        main.send(2);
        assert!(matches!(port.receive(), Ok(Received::Task(entry)) if entry.task == 2), "{point}");
        answer(&port, 2);
        let (task, new) = main.take().unwrap();
        assert_eq!((task, bytes(&new)), (2, &[2; LEAF][..]), "{point}");
        assert_eq!(bytes(&lease), &[0; LEAF][..], "{point}: the lease of the first process is damaged");
        let place = lease.ptr();
        drop(lease);
        let again = (0..20).any(|_| port.allocate(LEAF as u64).unwrap().1 == place);
        assert!(again, "{point}: the block of the lease is not used again");
    }
}

#[test]
fn results_that_were_not_taken_in_are_not_reset() {
    let mut main = Main::new();
    let port = open(&main.arena, 0);
    answer(&port, 0);
    let refused = main.arena.reset_worker(0, |_| {});
    assert!(matches!(refused, Err(Error::Usage { .. })), "{refused:?}");
    assert_eq!(main.take().map(|(task, _)| task), Some(0));
    assert!(main.reset().is_empty());
}

/// Answers tasks until it is killed.
fn serve(arena: &Arc<Arena>) -> bool {
    let port = open(&arena.inherited(), 0);
    loop {
        if let Received::Task(entry) = port.receive().unwrap() {
            let leaf = leaf(&port, entry.task as u8);
            let keep = if entry.task % 2 == 0 { Keep::No } else { Keep::Yes };
            port.send(entry.task, ResultKind::Plain, &[(leaf, keep)], &[1; 5000], Timings::default()).unwrap();
            if keep == Keep::Yes {
                port.release(leaf.block);
            }
            port.enter(WorkerState::Idle);
        }
    }
}

#[test]
fn processes_that_are_killed_at_random_follow_each_other() {
    const ROUNDS: u64 = 100;
    let mut main = Main::new();
    let arena = main.arena.clone();
    let mut leases = VecDeque::new();
    let (mut seed, mut answered) = (0x9e37_79b9_7f4a_7c15_u64, 0);
    for round in 0..ROUNDS {
        let first = round * 1000;
        let child = Child::fork(|| serve(&arena));
        let (mut sent, mut next) = (0, first);
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let last = (seed >> 33) % 40;
        let end = std::time::Instant::now() + Duration::from_secs(20);
        // Leaves the last results in the ring, so that the kill may come at any point.
        while next < first + last {
            if sent < last + 16 && first + sent < next + 16 {
                main.send(first + sent);
                sent += 1;
                let sleeper = &arena.control(0).sleeper.0;
                if sleeper.must_ring() {
                    rustloader::sys::futex::wake(&sleeper.bell, 1).unwrap();
                }
            }
            if let Some((task, lease)) = main.take() {
                assert_eq!(task, next, "not of this process, or out of order");
                next += 1;
                leases.push_back((task, lease));
            }
            assert!(std::time::Instant::now() < end, "the process does not answer");
        }
        child.kill();
        while let Some((task, lease)) = main.take() {
            assert_eq!(task, next);
            next += 1;
            leases.push_back((task, lease));
        }
        for task in main.reset() {
            assert!((next..first + sent).contains(&task), "it was already answered");
        }
        answered += next - first;
        while leases.len() > 8 {
            let (task, lease) = leases.pop_front().unwrap();
            assert!(bytes(&lease).iter().all(|byte| *byte == task as u8), "task {task}");
        }
    }
    assert!(answered >= ROUNDS * 10, "the processes answer too little: {answered}");
    leases.clear();
    // From each process at most the batch in progress: its message, and its leaf if publishing had begun.
    let lost = held(&arena, 0, !0) as u64;
    assert!(lost <= 2 * ROUNDS, "{lost} blocks are lost");
}
