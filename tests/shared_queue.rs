//! Workers with a shared queue may end at any point, and the queue's entries show which task each of them held.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustloader::engine::Handle;
use rustloader::engine::completions::{Completions, discard};
use rustloader::shm::alloc::Allocator;
use rustloader::shm::arena::{Arena, ArenaQueue};
use rustloader::shm::block::CONSUMER;
use rustloader::shm::layout::Needs;
use rustloader::shm::pool;
use rustloader::shm::queue::Submitter;
use rustloader::shm::ring::Producer;
use rustloader::sys::event::EventFd;
use rustloader::sys::futex;
use rustloader::wire::{ResultKind, TaskEntry, TaskKind, Timings};
use rustloader::worker::port::{Port, Received};

#[path = "common/children.rs"]
mod children;

use children::Child;

const WORKERS: u32 = 3;
const OUTSTANDING: u32 = 12;
/// After this time a test counts as hung.
const LIMIT: Duration = Duration::from_secs(30);
/// Bytes of an index batch: more than fit in an entry.
const INDEX: usize = 100;

fn needs(shared_queue: bool) -> Needs {
    Needs { workers: WORKERS, outstanding: OUTSTANDING, shared_queue, snapshots: false }
}

fn open(arena: &Arc<Arena>, worker: u32) -> Port {
    let doorbell = EventFd::new().unwrap();
    Port::open(arena.clone(), worker, doorbell.as_fd().try_clone_to_owned().unwrap()).unwrap()
}

fn answer(port: &Port, task: u64) {
    port.send(task, ResultKind::Plain, &[], &task.to_le_bytes(), Timings::default()).unwrap();
}

/// The main process's side, without engine and scheduler.
struct Main {
    arena: Arc<Arena>,
    queue: Submitter<ArenaQueue>,
    completions: Completions,
    allocator: Allocator,
    unanswered: BTreeSet<u64>,
}

impl Main {
    fn new() -> Self {
        let arena = Arena::create_for(1 << 30, needs(true)).unwrap();
        Self {
            queue: Submitter::new(arena.queue().unwrap()),
            completions: Completions::new(&arena),
            allocator: Allocator::new(arena.clone(), arena.geometry().main_region()),
            unanswered: BTreeSet::new(),
            arena,
        }
    }

    /// Queues a task. Its index batch is in a block if its number is odd.
    fn send(&mut self, task: u64) {
        let entry = if task.is_multiple_of(2) {
            TaskEntry::inline(task, TaskKind::Plain, &[7; 8]).unwrap()
        } else {
            let block = self.allocator.allocate(INDEX as u64, CONSUMER).unwrap();
            TaskEntry::in_block(task, TaskKind::Plain, block, INDEX as u64)
        };
        assert_eq!(self.queue.push(&entry.to_words()), Ok(task));
        self.unanswered.insert(task);
        self.wake(1);
    }

    fn wake(&self, most: u32) {
        let sleeper = self.arena.sleeper_of(0);
        if sleeper.must_ring() {
            futex::wake(&sleeper.bell, most).unwrap();
        }
    }

    /// Takes all results. Returns (task, worker) of each.
    fn take(&mut self) -> Vec<(u64, u32)> {
        let mut results = Vec::new();
        while let Some((worker, incoming)) = self.completions.next(&self.arena).unwrap() {
            let task = incoming.entry.task;
            discard(&self.arena, &incoming);
            assert!(self.unanswered.remove(&task), "{task} was not sent, or was answered twice");
            assert!(self.queue.answered(task, worker), "worker {worker} did not hold {task}");
            results.push((task, worker));
        }
        results
    }

    /// Takes results until at most `expected` tasks are unanswered. Returns those.
    fn settle(&mut self, expected: usize) -> Vec<u64> {
        let end = Instant::now() + LIMIT;
        while self.unanswered.len() > expected {
            assert!(Instant::now() < end, "{:?} are not answered", self.unanswered);
            self.take();
            std::thread::sleep(Duration::from_millis(1));
        }
        self.unanswered.iter().copied().collect()
    }

    /// Returns the number of blocks that hold index batches.
    fn payloads(&self) -> usize {
        let region = self.arena.geometry().main_region();
        let table = &self.arena.table(region)[..self.arena.block_count(region) as usize];
        table.iter().filter(|block| block.state.load(Relaxed) & CONSUMER != 0).count()
    }
}

/// Answers tasks until it is killed or told to stop.
fn serve(arena: &Arc<Arena>, worker: u32) -> bool {
    let port = open(&arena.inherited(), worker);
    loop {
        match port.receive().unwrap() {
            Received::Task(entry) => {
                assert_eq!(entry.len, if entry.block.is_some() { INDEX as u64 } else { 8 });
                answer(&port, entry.task);
            }
            Received::Nothing => {}
            Received::Stop => return true,
        }
    }
}

fn start(arena: &Arc<Arena>, worker: u32) -> Child {
    Child::fork(|| serve(arena, worker))
}

#[test]
fn each_task_is_answered_once_by_the_worker_that_holds_it() {
    let mut main = Main::new();
    let arena = main.arena.clone();
    let children: Vec<Child> = (0..WORKERS).map(|worker| start(&arena, worker)).collect();
    let (mut sent, mut claimers) = (0, BTreeSet::new());
    let end = Instant::now() + LIMIT;
    // Until more than one worker has claimed tasks: on a busy machine only one may run for a while.
    while sent < 3000 || claimers.len() < 2 || !main.unanswered.is_empty() {
        assert!(Instant::now() < end, "{:?} are not answered; {claimers:?} have claimed tasks", main.unanswered);
        while (sent < 3000 || claimers.len() < 2) && main.unanswered.len() < OUTSTANDING as usize {
            main.send(sent);
            sent += 1;
        }
        claimers.extend(main.take().into_iter().map(|(_, worker)| worker));
    }
    assert_eq!(main.payloads(), 0);
    // They fall asleep, and are told to leave.
    let handle = Handle::new(arena.clone()).unwrap();
    let end = Instant::now() + LIMIT;
    while arena.sleeper_of(0).asleep.load(Relaxed) < WORKERS {
        assert!(Instant::now() < end, "they do not fall asleep");
        std::thread::sleep(Duration::from_millis(1));
    }
    handle.close();
    for child in children {
        assert_eq!(child.wait(), 0);
    }
}

#[test]
fn control_messages_come_before_tasks_and_withdrawn_tasks_never() {
    let mut main = Main::new();
    let port = open(&main.arena, 1);
    (0..6).for_each(|task| main.send(task));
    let message = TaskEntry::inline(0, TaskKind::Resume, &[]).unwrap();
    Producer::new(main.arena.task_ring(1)).push(&message.to_words()).unwrap();
    assert!(matches!(port.receive().unwrap(), Received::Task(entry) if entry.kind == TaskKind::Resume));
    let take = |port: &Port| match port.take_up().unwrap() {
        Some(entry) => (entry.task, entry.kind),
        None => (99, TaskKind::Leave),
    };
    assert_eq!(take(&port), (0, TaskKind::Plain));
    assert_eq!(TaskEntry::from_words(&main.queue.withdraw(1).unwrap()).unwrap().task, 1);
    assert!(main.queue.withdraw(0).is_none() && main.queue.withdraw(2).is_some());
    assert_eq!((take(&port), main.queue.holder(3)), ((3, TaskKind::Plain), Some(1)));
    assert_eq!(main.queue.held_by(1), Some(0), "the oldest unanswered task");
    assert!(main.queue.withdraw(5).is_some());
    assert_eq!((take(&port), take(&port)), ((4, TaskKind::Plain), (99, TaskKind::Leave)));
    // The main process still holds the blocks of the withdrawn tasks 1 and 5; the worker has released that of 3.
    assert_eq!(main.payloads(), 2);
}

#[test]
fn a_sleeping_worker_is_woken_although_another_was_killed_in_its_sleep() {
    let mut main = Main::new();
    let arena = main.arena.clone();
    let mut children: Vec<Child> = (0..WORKERS).map(|worker| start(&arena, worker)).collect();
    let asleep = |count| {
        let end = Instant::now() + LIMIT;
        while arena.sleeper_of(0).asleep.load(Relaxed) < count {
            assert!(Instant::now() < end, "they do not fall asleep");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    asleep(WORKERS);
    std::thread::sleep(Duration::from_millis(20));
    children.pop().unwrap().kill();
    // Without wake-ups, each task would wait until a worker's sleep times out.
    let end = Instant::now() + LIMIT;
    for task in 0..150 {
        // The killed worker still counts as asleep, and so does at least one other.
        asleep(2);
        main.send(task);
        main.settle(0);
        assert!(Instant::now() < end, "workers are not woken, but wake up by themselves");
    }
    children.into_iter().for_each(Child::kill);
}

#[test]
fn workers_that_are_killed_at_random_lose_what_they_hold_and_nothing_else() {
    const ROUNDS: u64 = 60;
    let mut main = Main::new();
    let arena = main.arena.clone();
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    let (mut sent, mut lost) = (0, 0);
    let mut children: Vec<Child> = (0..WORKERS).map(|worker| start(&arena, worker)).collect();
    for _ in 0..ROUNDS {
        let (last, victim) = (sent + 10 + random(60), random(u64::from(WORKERS)) as u32);
        let end = Instant::now() + LIMIT;
        while sent < last {
            assert!(Instant::now() < end, "{:?} are not answered", main.unanswered);
            while sent < last && main.unanswered.len() < OUTSTANDING as usize {
                main.send(sent);
                sent += 1;
            }
            main.take();
        }
        // The kill may come at any point of its work.
        children.remove(victim as usize).kill();
        main.take();
        let held = main.queue.held_by(victim);
        // Waiting tasks go to the other workers, which may be asleep because the victim received a wake-up.
        main.wake(u32::MAX);
        assert_eq!(main.settle(usize::from(held.is_some())), held.into_iter().collect::<Vec<_>>());
        if let Some(task) = held {
            assert!(main.queue.answered(task, victim) && main.unanswered.remove(&task));
            lost += 1;
        }
        assert_eq!(main.queue.oldest_waiting(), None);
        arena.reset_worker(victim, |_| panic!("a worker's ring contains a task")).unwrap();
        children.insert(victim as usize, start(&arena, victim));
    }
    assert!(lost < ROUNDS, "no victim was idle");
    children.into_iter().for_each(Child::kill);
    // At most the index batch of each lost task is still held.
    assert!(main.payloads() as u64 <= lost);
}

#[cfg(feature = "failpoints")]
#[test]
fn a_worker_may_end_between_claim_and_work_and_between_work_and_answer() {
    use rustloader::sys::failpoint::{self, Effect};

    for kind in ["task_taken", "task_done"] {
        for nth in 1..6 {
            let mut main = Main::new();
            let arena = main.arena.clone();
            let doomed = Child::fork(|| {
                failpoint::set(kind, nth, Effect::Kill).unwrap();
                serve(&arena, 2)
            });
            // It is the only worker for the first tasks, so that it reaches its failpoint.
            (0..nth).for_each(|task| main.send(task));
            assert_eq!(doomed.wait(), libc::SIGKILL, "{kind} {nth}");
            assert_eq!(main.settle(1), [nth - 1], "{kind} {nth}");
            assert_eq!(main.queue.held_by(2), Some(nth - 1), "{kind} {nth}");
            assert_eq!(main.queue.oldest_waiting(), None);
            let survivor = start(&arena, 0);
            (nth..nth + 8).for_each(|task| main.send(task));
            assert_eq!(main.settle(1), [nth - 1], "{kind} {nth}");
            assert_eq!((main.queue.held_by(2), main.queue.held_by(0)), (Some(nth - 1), None));
            survivor.kill();
        }
    }
}

#[test]
fn the_pool_keeps_arenas_with_a_queue_apart_and_empties_the_queue() {
    pool::clear();
    let arena = pool::take(needs(true)).unwrap();
    let place = Arc::as_ptr(&arena);
    let mut main = Submitter::new(arena.queue().unwrap());
    for task in 0..3 {
        main.push(&TaskEntry::inline(task, TaskKind::Plain, &[]).unwrap().to_words()).unwrap();
    }
    assert_eq!(open(&arena, 0).take_up().unwrap().unwrap().task, 0);
    arena.sleeper_of(0).announce();
    pool::put(arena);
    let other = pool::take(needs(false)).unwrap();
    assert!(other.queue_control().is_none() && Arc::as_ptr(&other) != place);
    let reused = pool::take(needs(true)).unwrap();
    assert_eq!(Arc::as_ptr(&reused), place);
    assert_eq!(reused.sleeper_of(0).asleep.load(Relaxed), 0);
    assert!(open(&reused, 1).take_up().unwrap().is_none(), "a task of the previous iterator");
    let mut main = Submitter::new(reused.queue().unwrap());
    assert_eq!(main.push(&TaskEntry::inline(0, TaskKind::Plain, &[]).unwrap().to_words()), Ok(0));
    assert_eq!(open(&reused, 1).take_up().unwrap().unwrap().task, 0);
    pool::clear();
}

#[test]
fn an_entry_with_the_wrong_number_is_damage() {
    let arena = Arena::create_for(1 << 30, needs(true)).unwrap();
    let mut main = Submitter::new(arena.queue().unwrap());
    main.push(&TaskEntry::inline(5, TaskKind::Plain, &[]).unwrap().to_words()).unwrap();
    assert!(open(&arena, 0).take_up().is_err());
}
