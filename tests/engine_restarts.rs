//! Workers that die and are replaced: which tasks each of their processes receives, and which of their results count.

use std::process::{Child, Command};
use std::sync::Arc;
use std::time::Duration;

use rustloader::config::DEATH_CHECK;
use rustloader::engine::completions::{Message, discard};
use rustloader::engine::{Engine, Step};
use rustloader::error::Error;
use rustloader::scheduler::{Dispatch, Settings};
use rustloader::shm::arena::Arena;
use rustloader::shm::layout::Needs;
use rustloader::wire::{ResultKind, TaskEntry, TaskKind, Timings};
use rustloader::worker::port::{Port, Received};

type Loader = Engine<u64, Vec<u8>>;

/// An engine over ports in this process. A worker dies when its process, which only sleeps, is killed.
struct Rig {
    arena: Arc<Arena>,
    engine: Loader,
    ports: Vec<Port>,
    processes: Vec<Child>,
    next: u64,
}

fn spawn() -> Child {
    Command::new("sleep").arg("1000").spawn().unwrap()
}

fn open(arena: &Arc<Arena>, engine: &Loader, worker: u32) -> Port {
    let doorbell = engine.handle().doorbell.as_fd().try_clone_to_owned().unwrap();
    Port::open(arena.clone(), worker, doorbell).unwrap()
}

impl Rig {
    fn new(workers: u32, dispatch: Dispatch) -> Self {
        let shared_queue = dispatch == Dispatch::SharedQueue;
        let needs = Needs { workers, outstanding: 3 * workers, shared_queue, snapshots: true };
        let arena = Arena::create_for(1 << 30, needs).unwrap();
        let torch = Settings::torch(workers as usize, 3, true);
        let settings = Settings { dispatch, persistent: true, restarts: true, ..torch };
        let mut engine = Loader::over(arena.clone(), settings).unwrap();
        let processes: Vec<Child> = (0..workers).map(|_| spawn()).collect();
        for (worker, process) in (0..).zip(&processes) {
            engine.started(worker, process.id() as i32).unwrap();
        }
        let ports = (0..workers).map(|worker| open(&arena, &engine, worker)).collect();
        let mut rig = Self { arena, engine, ports, processes, next: 0 };
        rig.prime();
        rig
    }

    fn prime(&mut self) {
        let mut asked = 0;
        while self.engine.primes(asked) {
            self.submit();
            asked += 1;
        }
    }

    fn submit(&mut self) {
        self.engine.submit(self.next, TaskKind::Plain, &self.next.to_le_bytes()).unwrap().unwrap();
        self.next += 1;
    }

    fn take(&self, worker: usize) -> TaskEntry {
        match self.ports[worker].receive().unwrap() {
            Received::Task(entry) => entry,
            other => panic!("{other:?}"),
        }
    }

    /// Answers a worker's next task, which must be `task`.
    fn answer(&self, worker: usize, task: u64, kind: ResultKind) {
        let entry = self.take(worker);
        assert_eq!(entry.task, task);
        let index = u64::from_le_bytes(entry.inline[..8].try_into().unwrap());
        self.ports[worker].send(task, kind, &[], &index.to_le_bytes(), Timings::default()).unwrap();
    }

    fn kill(&mut self, worker: usize) {
        self.processes[worker].kill().unwrap();
        self.processes[worker].wait().unwrap();
    }

    /// Starts the next process of a vacant worker.
    fn replace(&mut self, worker: usize) {
        self.engine.vacate(worker as u32).unwrap();
        self.processes[worker] = spawn();
        self.engine.started(worker as u32, self.processes[worker].id() as i32).unwrap();
        self.ports[worker] = open(&self.arena, &self.engine, worker as u32);
    }

    /// Resends all tasks that are due. They come before any other step.
    fn resend_all(&mut self) -> Vec<u64> {
        let mut sent = Vec::new();
        while let Some(&index) = self.engine.unsent() {
            assert!(matches!(self.engine.step().unwrap(), Step::Resend));
            self.engine.resend(TaskKind::Plain, &index.to_le_bytes()).unwrap();
            sent.push(index);
        }
        assert!(self.engine.resend(TaskKind::Plain, b"").is_err());
        sent
    }

    /// Returns the next step that is not a submission, a resend or a wait. The sampler never ends.
    fn step(&mut self) -> Step<u64, Vec<u8>> {
        loop {
            match self.engine.step().unwrap() {
                Step::Submit => self.submit(),
                Step::Resend => {
                    let index = *self.engine.unsent().unwrap();
                    self.engine.resend(TaskKind::Plain, &index.to_le_bytes()).unwrap();
                }
                Step::Wait(deadline) => {
                    self.engine.wait(deadline).unwrap();
                    self.engine.after_wait().unwrap();
                }
                other => return other,
            }
        }
    }

    /// Returns the vacant worker, its task, the count of its answers, and its generation.
    fn vacancy(&mut self) -> (u32, Option<u64>, u64, u32) {
        match self.step() {
            Step::Vacant(death) => {
                let report = self.engine.report(death);
                (report.worker, report.task, report.answers, report.generation)
            }
            other => panic!("{other:?}"),
        }
    }

    /// Returns the tag of the next batch, which must be its payload.
    fn batch(&mut self) -> u64 {
        match self.step() {
            Step::Deliver { tag, incoming, ready: None } => {
                let message = Message::open(&self.arena, &incoming, Vec::new()).unwrap();
                assert_eq!(message.payload(), tag.to_le_bytes());
                tag
            }
            Step::Deliver { tag, ready: Some(opened), .. } => {
                assert_eq!(opened, tag.to_le_bytes());
                tag
            }
            other => panic!("{other:?}"),
        }
    }

    fn open_tied(&mut self) {
        let Step::Open { incoming, ready: None } = self.step() else { panic!("no result to open") };
        let message = Message::open(&self.arena, &incoming, Vec::new()).unwrap();
        self.engine.opened(message.payload().to_vec()).unwrap();
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        (0..self.processes.len()).for_each(|worker| self.kill(worker));
    }
}

#[test]
fn a_worker_may_die_again_and_again_and_no_task_is_lost_or_doubled() {
    let mut rig = Rig::new(2, Dispatch::RoundRobin);
    let mut expected = 0;
    for generation in 0..20 {
        // Each process of worker 1 answers once, and then dies with two tasks in its ring.
        rig.answer(1, 2 * u64::from(generation) + 1, ResultKind::Plain);
        rig.answer(0, 2 * u64::from(generation), ResultKind::Plain);
        rig.kill(1);
        while expected < 2 * u64::from(generation) {
            assert_eq!(rig.batch(), expected);
            expected += 1;
        }
        let first = 2 * u64::from(generation) + 3;
        loop {
            match rig.step() {
                Step::Deliver { tag, incoming, .. } => {
                    discard(&rig.arena, &incoming);
                    assert_eq!(tag, expected);
                    expected += 1;
                }
                Step::Vacant(death) => {
                    let report = rig.engine.report(death);
                    assert_eq!((report.worker, report.generation), (1, generation));
                    assert_eq!((report.task, report.index), (Some(first), Some(&first)));
                    assert_eq!(report.answers, u64::from(generation) + 1);
                    break;
                }
                other => panic!("{other:?}"),
            }
        }
        rig.replace(1);
        assert_eq!(rig.resend_all()[0], first);
    }
    assert!(!rig.engine.handle().all_left());
}

#[test]
fn a_vacancy_is_reported_until_it_is_settled_and_again_after_the_time_to_which_it_was_postponed() {
    let mut rig = Rig::new(2, Dispatch::RoundRobin);
    rig.kill(1);
    rig.answer(0, 0, ResultKind::Plain);
    let refused = |result| assert!(matches!(result, Err(Error::Usage { .. })), "{result:?}");
    refused(rig.engine.postpone(1, Duration::ZERO));
    refused(rig.engine.give_up(1));
    for _ in 0..2 {
        loop {
            match rig.step() {
                Step::Vacant(death) => break assert_eq!(death.worker.0, 1),
                // This batch is delivered before the death is noticed.
                Step::Deliver { tag: 0, incoming, .. } => discard(&rig.arena, &incoming),
                other => panic!("{other:?}"),
            }
        }
    }
    let before = rustloader::sys::clock::monotonic();
    rig.engine.postpone(1, Duration::from_millis(300)).unwrap();
    // Meanwhile the other worker continues.
    rig.answer(0, 2, ResultKind::Plain);
    while let Step::Deliver { incoming, .. } = rig.step() {
        discard(&rig.arena, &incoming);
    }
    let waited = rustloader::sys::clock::monotonic() - before;
    assert!(waited >= Duration::from_millis(300) && waited < Duration::from_secs(20), "{waited:?}");
    rig.engine.give_up(1).unwrap();
    refused(rig.engine.vacate(1));
    for _ in 0..2 {
        assert!(matches!(rig.step(), Step::Dead(death) if death.lost.map(|task| task.0) == Some(1)));
    }
}

#[test]
fn what_a_worker_of_the_shared_queue_held_goes_to_its_next_process_whenever_that_dies_too() {
    let mut rig = Rig::new(2, Dispatch::SharedQueue);
    assert_eq!(rig.take(0).task, 0);
    rig.kill(0);
    assert_eq!(rig.vacancy(), (0, Some(0), 0, 0));
    // The other worker continues with the waiting tasks.
    rig.answer(1, 1, ResultKind::Plain);
    rig.replace(0);
    // The new process claims a task before task 0 is resent, and dies with both.
    assert_eq!(rig.take(0).task, 2);
    rig.kill(0);
    assert_eq!(rig.vacancy(), (0, Some(2), 0, 1), "the task that it was working on");
    rig.replace(0);
    assert!(matches!(rig.engine.step().unwrap(), Step::Resend));
    rig.kill(0);
    // One task is resent but not claimed, the other is not resent.
    rig.engine.resend(TaskKind::Plain, &0u64.to_le_bytes()).unwrap();
    assert_eq!(rig.vacancy(), (0, Some(0), 0, 2));
    rig.replace(0);
    assert_eq!(rig.resend_all(), [0, 2]);
    rig.answer(0, 0, ResultKind::Plain);
    rig.answer(0, 2, ResultKind::Plain);
    for task in 3..6 {
        rig.answer(1, task, ResultKind::Plain);
    }
    for tag in 0..6 {
        assert_eq!(rig.batch(), tag);
    }
}

#[test]
fn a_tied_result_that_was_not_opened_is_made_again_with_all_that_followed_it() {
    for is_noticed in [false, true] {
        let mut rig = Rig::new(1, Dispatch::RoundRobin);
        rig.answer(0, 0, ResultKind::Tied);
        rig.open_tied();
        assert_eq!(rig.batch(), 0);
        rig.answer(0, 1, ResultKind::Tied);
        rig.answer(0, 2, ResultKind::Plain);
        rig.ports[0].send_snapshot(3, b"after what is lost", false).unwrap();
        if is_noticed {
            assert!(matches!(rig.step(), Step::Open { .. }));
        }
        rig.kill(0);
        // The next step checks for deaths before it reads results.
        std::thread::sleep(DEATH_CHECK);
        while !matches!(rig.step(), Step::Vacant(_)) {
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(rig.vacancy(), (0, Some(2), 1, 0), "the task that it had taken last");
        assert_eq!(rig.engine.handle().snapshot(0, 9).unwrap(), None);
        rig.replace(0);
        assert_eq!(rig.resend_all(), [1, 2, 3]);
        rig.answer(0, 1, ResultKind::Tied);
        rig.open_tied();
        rig.answer(0, 2, ResultKind::Plain);
        assert_eq!([rig.batch(), rig.batch()], [1, 2]);
    }
}

#[test]
fn a_worker_of_the_shared_queue_may_have_held_several_tasks() {
    let mut rig = Rig::new(2, Dispatch::SharedQueue);
    for task in 0..2 {
        rig.answer(0, task, ResultKind::Tied);
    }
    assert_eq!(rig.take(0).task, 2);
    rig.kill(0);
    std::thread::sleep(DEATH_CHECK);
    assert_eq!(rig.vacancy(), (0, Some(2), 0, 0), "the task that it was working on");
    rig.replace(0);
    assert_eq!(rig.resend_all(), [0, 1, 2]);
    for task in 0..3 {
        rig.answer(0, task, ResultKind::Plain);
    }
    assert_eq!([rig.batch(), rig.batch(), rig.batch()], [0, 1, 2]);
}

#[test]
fn a_tied_result_that_cannot_be_opened_because_its_worker_ends_is_no_error() {
    let mut rig = Rig::new(1, Dispatch::RoundRobin);
    rig.answer(0, 0, ResultKind::Tied);
    assert!(!rig.engine.lost_tied().unwrap(), "there is no tied result yet");
    let Step::Open { incoming, .. } = rig.step() else { panic!("no result to open") };
    discard(&rig.arena, &incoming);
    // Its message is already released, as after a failed attempt.
    rig.engine.delivery().open_interrupted(Vec::new());
    assert!(!rig.engine.lost_tied().unwrap(), "the worker lives");
    rig.kill(0);
    assert!(rig.engine.lost_tied().unwrap());
    assert_eq!(rig.vacancy(), (0, Some(0), 0, 0));
    rig.replace(0);
    assert!(matches!(rig.engine.step().unwrap(), Step::Resend));
}

#[test]
fn a_worker_that_dies_before_it_has_resumed_begins_the_epoch_with_its_next_process() {
    for dispatch in [Dispatch::RoundRobin, Dispatch::SharedQueue] {
        let mut rig = Rig::new(2, dispatch);
        let first = if dispatch == Dispatch::SharedQueue { 0 } else { 1 };
        rig.answer(1, first, ResultKind::Plain);
        rig.kill(1);
        loop {
            match rig.step() {
                Step::Deliver { tag: 0, incoming, .. } => discard(&rig.arena, &incoming),
                Step::Vacant(death) => break assert_eq!(rig.engine.report(death).answers, 1),
                other => panic!("{other:?}"),
            }
        }
        rig.engine.reset(b"").unwrap();
        if dispatch == Dispatch::RoundRobin {
            // An answer of the previous epoch does not count.
            rig.answer(0, 0, ResultKind::Plain);
        }
        let Step::Vacant(death) = rig.step() else { panic!("worker 1 is not vacant") };
        let report = rig.engine.report(death);
        assert_eq!((report.worker, report.index, report.task, report.answers), (1, None, None, 0));
        assert!(report.first_task >= 6);
        rig.kill(0);
        std::thread::sleep(DEATH_CHECK);
        assert_eq!(rig.vacancy(), (1, None, 0, 0));
        rig.engine.postpone(1, Duration::from_secs(1000)).unwrap();
        assert_eq!(rig.vacancy(), (0, None, 0, 0));
        rig.replace(0);
        rig.replace(1);
        // Its snapshots belong to this epoch.
        rig.ports[1].send_snapshot(0, b"new", false).unwrap();
        assert!(!rig.engine.resuming());
        rig.engine.process_outside_next().unwrap();
        assert!((0..2).all(|worker| rig.ports[worker].take_up().unwrap().is_none()), "they receive no message");
        assert_eq!(rig.engine.handle().snapshot(1, 0).unwrap().map(|it| it.payload), Some(b"new".to_vec()));
        let first = rig.next;
        rig.prime();
        assert_eq!(rig.take(0).task, first);
    }
}

#[test]
fn a_thousand_replacements_leave_no_descriptor_and_no_block() {
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mut rig = Rig::new(1, Dispatch::RoundRobin);
    let mut settled = None;
    rig.kill(0);
    for round in 0..1_000 {
        assert!(matches!(rig.step(), Step::Vacant(_)), "round {round}");
        rig.engine.vacate(0).unwrap();
        let mut process = Command::new("true").spawn().unwrap();
        rig.ports[0] = open(&rig.arena, &rig.engine, 0);
        rig.engine.started(0, process.id() as i32).unwrap();
        process.wait().unwrap();
        if round == 20 {
            settled = Some((descriptors(), rig.arena.usage().held));
        }
    }
    let (before, held) = settled.unwrap();
    // Tests that run at the same time have descriptors, too.
    assert!(descriptors() < before + 200);
    assert_eq!(rig.arena.usage().held, held);
}
