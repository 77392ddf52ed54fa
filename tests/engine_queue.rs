//! An engine with a shared queue: which worker holds which task, deaths, abandoned epochs.

use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use rustloader::engine::completions::discard;
use rustloader::engine::{DeathReport, Ending, Engine, Step};
use rustloader::error::Error;
use rustloader::scheduler::{Dispatch, Settings};
use rustloader::shm::arena::Arena;
use rustloader::shm::block::CONSUMER;
use rustloader::shm::layout::Needs;
use rustloader::wire::{ResultKind, TaskEntry, TaskKind, Timings};
use rustloader::worker::port::{Port, Received};

const WORKERS: u32 = 3;
/// Bytes of an index batch: more than fit in an entry.
const INDEX: usize = 100;

fn settings(in_order: bool) -> Settings {
    let torch = Settings::torch(WORKERS as usize, 2, in_order);
    Settings { dispatch: Dispatch::SharedQueue, persistent: true, ..torch }
}

/// An engine over ports in this process. A worker dies when its process, which only sleeps, is killed.
struct Rig {
    arena: Arc<Arena>,
    engine: Engine<u64>,
    ports: Vec<Port>,
    processes: Vec<Child>,
    next: u64,
}

impl Rig {
    fn new(in_order: bool) -> Self {
        let needs = Needs { workers: WORKERS, outstanding: 2 * WORKERS, shared_queue: true, snapshots: false };
        let arena = Arena::create_for(1 << 30, needs).unwrap();
        let mut engine = Engine::over(arena.clone(), settings(in_order)).unwrap();
        let doorbell = || engine.handle().doorbell.as_fd().try_clone_to_owned().unwrap();
        let ports = (0..WORKERS).map(|worker| Port::open(arena.clone(), worker, doorbell()).unwrap()).collect();
        let start = |_| Command::new("sleep").arg("1000").spawn().unwrap();
        let processes: Vec<Child> = (0..WORKERS).map(start).collect();
        for (worker, process) in (0..).zip(&processes) {
            engine.started(worker, process.id() as i32).unwrap();
        }
        let mut rig = Self { arena, engine, ports, processes, next: 0 };
        rig.prime();
        rig
    }

    /// Starts an epoch.
    fn prime(&mut self) {
        let mut asked = 0;
        while self.engine.primes(asked) {
            self.submit();
            asked += 1;
        }
        assert_eq!(asked, 2 * WORKERS as usize);
    }

    fn submit(&mut self) {
        self.engine.submit(self.next, TaskKind::Plain, &[0; INDEX]).unwrap().unwrap();
        self.next += 1;
    }

    /// Claims a task for a worker.
    fn claim(&self, worker: usize) -> TaskEntry {
        match self.ports[worker].receive().unwrap() {
            Received::Task(entry) => entry,
            other => panic!("{other:?}"),
        }
    }

    fn send(&self, worker: usize, task: u64) {
        self.ports[worker].send(task, ResultKind::Plain, &[], b"data", Timings::default()).unwrap();
    }

    fn kill(&mut self, worker: usize) {
        self.processes[worker].kill().unwrap();
        self.processes[worker].wait().unwrap();
    }

    /// Returns the next step that is neither a submission nor a wait.
    fn step(&mut self) -> Step<u64> {
        loop {
            match self.engine.step().unwrap() {
                Step::Submit => self.submit(),
                Step::Wait(deadline) => {
                    self.engine.wait(deadline).unwrap();
                    self.engine.after_wait().unwrap();
                }
                other => return other,
            }
        }
    }

    /// Returns the tag of the next batch, and its worker.
    fn batch(&mut self) -> (u64, u32) {
        match self.step() {
            Step::Deliver { tag, incoming, .. } => {
                discard(&self.arena, &incoming);
                (tag, incoming.worker)
            }
            other => panic!("{other:?}"),
        }
    }

    /// Returns the number of blocks that hold index batches.
    fn payloads(&self) -> usize {
        let region = self.arena.geometry().main_region();
        let table = &self.arena.table(region)[..self.arena.block_count(region) as usize];
        table.iter().filter(|block| block.state.load(Relaxed) & CONSUMER != 0).count()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        (0..self.processes.len()).for_each(|worker| self.kill(worker));
    }
}

#[test]
fn a_slow_task_holds_up_its_worker_alone_and_comes_in_its_place() {
    let mut rig = Rig::new(true);
    assert_eq!((rig.payloads(), rig.claim(2).task), (6, 0));
    for task in 1..6 {
        assert_eq!(rig.claim(0).task, task);
        rig.send(0, task);
    }
    assert_eq!(rig.payloads(), 0, "a worker releases the index batch that it has read");
    assert!(
        matches!(rig.engine.step().unwrap(), Step::Wait(_)),
        "the window is full, and its first task is outstanding"
    );
    let progress = rig.engine.progress();
    assert_eq!((progress.sent, progress.outstanding, progress.loads), (6, 1, vec![5, 0, 1]));
    assert_eq!(progress.undelivered[0], (0, Some(2)));
    assert_eq!(progress.undelivered[1..], [1, 2, 3, 4, 5].map(|task| (task, Some(0))));
    assert_eq!(rig.engine.oldest_task_of(2).map(|(task, tag)| (task.0, *tag)), Some((0, 0)));
    assert_eq!(rig.engine.oldest_task_of(0), None);
    rig.send(2, 0);
    assert_eq!(rig.batch(), (0, 2));
    assert_eq!(rig.engine.progress().undelivered.last(), Some(&(6, None)), "it waits in the queue");
    assert_eq!(rig.engine.oldest_task_of(1).map(|(task, _)| task.0), Some(6), "any worker may claim it");
    (1..6).for_each(|task| assert_eq!(rig.batch(), (task, 0)));
}

#[test]
fn batches_come_as_they_are_completed_while_a_worker_is_stuck() {
    let mut rig = Rig::new(false);
    assert_eq!(rig.claim(1).task, 0);
    // Its entry in the queue is reused many times.
    for task in 1..200 {
        assert_eq!(rig.claim(0).task, task);
        rig.send(0, task);
        assert_eq!(rig.batch(), (task, 0));
    }
    assert_eq!(rig.engine.oldest_task_of(1).map(|(task, _)| task.0), Some(0));
    rig.send(1, 0);
    assert_eq!(rig.batch(), (0, 1));
}

#[test]
fn an_answer_of_a_worker_that_does_not_hold_the_task_is_damage() {
    // The task is held by another worker, waiting, already answered, or was never sent.
    for task in [0, 1, 2, 1000, u64::MAX] {
        let mut rig = Rig::new(true);
        assert_eq!((rig.claim(1).task, rig.claim(2).task, rig.claim(0).task), (0, 1, 2));
        rig.send(0, 2);
        if task == 2 {
            assert!(matches!(rig.engine.step().unwrap(), Step::Wait(_)));
        }
        rig.send(0, if task == 1 { 5 } else { task });
        let damage = loop {
            match rig.engine.step() {
                Ok(Step::Submit) => {}
                Ok(other) => panic!("{task}: {other:?}"),
                Err(error) => break error,
            }
        };
        assert!(matches!(damage, Error::Corrupt { .. }), "{task}: {damage:?}");
    }
}

#[test]
fn a_death_loses_the_task_that_the_worker_held_and_the_others_go_on() {
    let mut rig = Rig::new(true);
    assert_eq!((rig.claim(0).task, rig.claim(1).task), (0, 1));
    rig.send(1, 1);
    // The result that it has published counts.
    assert_eq!(rig.claim(1).task, 2);
    rig.kill(1);
    while rig.engine.death().is_none() {
        assert!(matches!(rig.engine.step().unwrap(), Step::Wait(_)));
        rig.engine.wait(None).unwrap();
        rig.engine.after_wait().unwrap();
    }
    assert_eq!(rig.engine.death().map(|death| (death.worker.0, death.lost.map(|task| task.0))), Some((1, Some(2))));
    assert_eq!(rig.claim(2).task, 3, "waiting tasks go to other workers");
    rig.send(2, 3);
    rig.send(0, 0);
    assert_eq!((rig.batch(), rig.batch()), ((0, 0), (1, 1)));
    let Step::Dead(death) = rig.step() else { panic!("task 2 is lost") };
    let report = rig.engine.report(death);
    let DeathReport { worker, pid, index, .. } = report;
    assert_eq!((worker, pid, index), (1, rig.processes[1].id() as i32, Some(&2)));
}

#[test]
fn an_idle_worker_may_die_without_a_loss() {
    let mut rig = Rig::new(true);
    rig.kill(2);
    for task in 0..6 {
        assert_eq!(rig.claim(task as usize % 2).task, task);
        rig.send(task as usize % 2, task);
    }
    (0..6).for_each(|task| assert_eq!(rig.batch().0, task));
    let Step::Dead(death) = rig.step() else { panic!("nothing is submitted after a death") };
    assert_eq!((death.worker.0, death.lost), (2, None));
}

#[test]
fn without_a_living_worker_the_wait_ends() {
    let mut rig = Rig::new(true);
    (0..3).for_each(|worker| rig.kill(worker));
    let Step::Dead(death) = rig.step() else { panic!("all are dead") };
    assert_eq!(death.lost, None);
    let mut rig = Rig::new(true);
    assert_eq!(rig.claim(1).task, 0);
    (0..3).for_each(|worker| rig.kill(worker));
    let Step::Dead(death) = rig.step() else { panic!("all are dead") };
    assert_eq!((death.worker.0, rig.engine.report(death).index), (1, Some(&0)));
}

#[test]
fn tasks_of_an_abandoned_epoch_are_taken_back_unless_a_worker_holds_them() {
    let mut rig = Rig::new(true);
    assert_eq!((rig.claim(0).task, rig.claim(1).task), (0, 1));
    rig.send(1, 1);
    rig.engine.reset(&[]).unwrap();
    assert_eq!(rig.payloads(), 0, "the index batches of tasks 2 to 5 are released");
    for worker in [1, 2] {
        assert_eq!(rig.claim(worker).kind, TaskKind::Resume);
        rig.ports[worker].answer(0, ResultKind::Resumed).unwrap();
        assert!(rig.ports[worker].take_up().unwrap().is_none(), "a task of the abandoned epoch");
    }
    assert!(matches!(rig.engine.step().unwrap(), Step::Wait(_)));
    assert!(rig.engine.resuming());
    // Worker 0 first answers its task, in vain.
    rig.send(0, 0);
    assert_eq!(rig.claim(0).kind, TaskKind::Resume);
    rig.ports[0].answer(0, ResultKind::Resumed).unwrap();
    let step = rig.engine.step().unwrap();
    assert!(matches!(step, Step::Submit | Step::End) && !rig.engine.resuming(), "{step:?}");
    let warm = rig.arena.usage().held;
    rig.prime();
    for task in 6..12 {
        assert_eq!(rig.claim(task as usize % 3).task, task);
        rig.send(task as usize % 3, task);
    }
    (6..12).for_each(|task| assert_eq!(rig.batch().0, task));
    assert!(rig.arena.usage().held <= warm + (6 * 4096), "results of the abandoned epoch are released");
}

#[test]
fn the_end_releases_what_no_worker_has_taken() {
    let mut rig = Rig::new(true);
    assert_eq!(rig.claim(0).task, 0);
    assert_eq!(rig.payloads(), 5);
    rig.engine.handle().close();
    for (worker, port) in rig.ports.iter().enumerate() {
        assert!(matches!(port.receive().unwrap(), Received::Stop), "{worker}");
        port.leave();
    }
    (0..3).for_each(|worker| rig.kill(worker));
    let ending = rig.engine.finish();
    assert!(matches!(ending, Ending::Pool(_)), "{ending:?}");
    ending.carry_out();
    assert_eq!(rig.payloads(), 0);
    rustloader::shm::pool::clear();
}

#[test]
fn an_arena_without_a_queue_serves_no_engine_that_needs_one() {
    let plain = || Arena::create_sized(1 << 30, WORKERS, 6).unwrap();
    assert!(matches!(Engine::<u64>::over(plain(), settings(true)), Err(Error::Usage { .. })));
    let needs = Needs { workers: WORKERS, outstanding: 6, shared_queue: true, snapshots: false };
    let arena = Arena::create_for(1 << 30, needs).unwrap();
    assert!(matches!(Engine::<u64>::over(arena, Settings::torch(3, 2, true)), Err(Error::Usage { .. })));
    assert!(Engine::<u64>::new(settings(true), false).unwrap().arena().queue_control().is_some());
    assert!(Engine::<u64>::new(Settings::torch(3, 2, true), false).unwrap().arena().queue_control().is_none());
}
