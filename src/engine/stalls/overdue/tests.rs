//! Most times in these tests are simulated: a test sets `inbox.last_poll`, which is the time of a check.

use std::process::{Child, Command};

use super::*;
use crate::engine::Engine;
use crate::id::WorkerId;
use crate::scheduler::{Death, Dispatch, Settings};
use crate::shm::arena::Arena;
use crate::shm::layout::{Needs, StatusPage};
use crate::shm::queue::Claimer;
use crate::sync::Ordering::Relaxed;
use crate::wire::TaskKind;

const LIMIT: Duration = Duration::from_secs(10);

const fn ms(value: u64) -> Duration {
    Duration::from_millis(value)
}

/// An engine with two workers, whose processes do nothing: the tests write their status pages.
struct Rig {
    engine: Engine<u64>,
    processes: Vec<Child>,
    /// The origin of the simulated times, which is after the start of the processes.
    zero: Duration,
}

impl Rig {
    fn over(settings: Settings) -> Self {
        let shared_queue = settings.dispatch == Dispatch::SharedQueue;
        let needs = Needs { workers: 2, outstanding: 8, shared_queue, snapshots: false };
        let mut engine = Engine::over(Arena::create_for(1 << 30, needs).unwrap(), settings).unwrap();
        engine.set_stall_timeout(Some(LIMIT));
        let start = |_| Command::new("sleep").arg("1000").spawn().unwrap();
        let processes: Vec<Child> = (0..2).map(start).collect();
        for (worker, process) in (0..).zip(&processes) {
            engine.started(worker, process.id() as i32).unwrap();
        }
        Self { engine, processes, zero: sys::clock::monotonic() + Duration::from_secs(1000) }
    }

    /// Creates a rig whose two workers each have a task, 0 and 1, that they have not taken.
    fn with_tasks() -> Self {
        let mut rig = Self::over(Settings::torch(2, 1, true));
        for tag in [100, 101] {
            rig.engine.submit(tag, TaskKind::Plain, &[0; 8]).unwrap().unwrap();
        }
        rig.show(1, WorkerState::Starting, 0, ms(0));
        rig
    }

    fn page(&self, worker: u32) -> &StatusPage {
        &self.engine.handle.arena.control(worker).status
    }

    /// Writes to a worker's status page that the worker entered a state and took a task at the simulated time `at`.
    fn show(&self, worker: u32, state: WorkerState, task: u64, at: Duration) {
        let page = self.page(worker);
        let at = (self.zero + at).as_nanos() as u64;
        page.task.store(task, Relaxed);
        page.task_since_ns.store(at, Relaxed);
        page.since_ns.store(at, Relaxed);
        page.state.store(state as u32, Relaxed);
    }

    /// Returns the stall that a check finds at the simulated time `at`.
    fn check(&mut self, at: Duration) -> Option<Stall> {
        self.engine.inbox.wait_ends(self.zero + at);
        self.engine.stalled()
    }

    /// Checks about four times per second of simulated time, from `from` to `to`, until a check finds a stall.
    fn find(&mut self, mut from: Duration, to: Duration) -> Option<(Duration, Stall)> {
        loop {
            if let Some(stall) = self.check(from) {
                return Some((from, stall));
            }
            if from >= to {
                return None;
            }
            // Advance by the length of a wait.
            from = (from + WAIT_SLICE.min(self.engine.liveness.overdue.slice(self.zero + from))).min(to);
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        for process in &mut self.processes {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }
}

#[test]
fn a_worker_is_overdue_at_its_limit_and_is_reported_once() {
    for state in [WorkerState::Fetch, WorkerState::Collate, WorkerState::Pack, WorkerState::Publish] {
        let mut rig = Rig::with_tasks();
        rig.show(0, state, 0, ms(100));
        let (at, stall) = rig.find(ms(0), ms(60_000)).unwrap();
        assert_eq!(at, ms(10_100), "{state:?}");
        let Stall { worker, phase, task, time, exceeds, .. } = stall;
        let expected = (0, Phase::Item, Some(TaskId(0)), LIMIT, Some(LIMIT));
        assert_eq!((worker, phase, task, time, exceeds), expected);
        assert_eq!((stall.pid, stall.state), (rig.processes[0].id() as i32, state));
        assert!(rig.find(at, ms(60_000)).is_none());
        // The worker is reported again for its next batch.
        rig.show(0, state, 1, ms(60_000));
        assert_eq!(rig.find(ms(60_000), ms(120_000)).unwrap().0, ms(70_000));
    }
}

#[test]
fn without_a_limit_nothing_is_overdue() {
    let mut rig = Rig::with_tasks();
    assert_eq!(rig.engine.liveness.overdue.slice(rig.zero), LIMIT / 2);
    rig.engine.set_stall_timeout(None);
    rig.show(0, WorkerState::Fetch, 0, ms(0));
    assert!(rig.find(ms(0), ms(60_000)).is_none());
    assert_eq!(rig.engine.liveness.overdue.slice(rig.zero), Duration::MAX);
}

#[test]
fn a_start_has_no_limit_but_each_batch_of_its_replay_does() {
    let mut rig = Rig::with_tasks();
    rig.show(0, WorkerState::Starting, 0, ms(0));
    assert!(rig.find(ms(0), ms(30_000)).is_none());
    // During the first start, the worker has not taken any task.
    rig.page(0).task_since_ns.store(0, Relaxed);
    assert!(rig.find(ms(30_000), ms(60_000)).is_none());
    let renew = |rig: &Rig, at| {
        rig.page(0).task_since_ns.store((rig.zero + at).as_nanos() as u64, Relaxed);
    };
    for at in (60_000..120_000).step_by(9_000).map(ms) {
        renew(&rig, at);
        assert!(rig.find(at, at + ms(9_000)).is_none());
    }
    renew(&rig, ms(120_000));
    let (at, stall) = rig.find(ms(120_000), ms(180_000)).unwrap();
    assert_eq!((at, stall.task), (ms(130_000), None));
}

#[test]
fn a_batch_of_a_replay_renews_the_time_of_the_first_task() {
    let mut rig = Rig::with_tasks();
    rig.show(0, WorkerState::Fetch, 0, ms(0));
    for at in (9_000..90_000).step_by(9_000).map(ms) {
        assert!(rig.find(at - ms(9_000), at).is_none(), "{at:?}");
        rig.page(0).task_since_ns.store((rig.zero + at).as_nanos() as u64, Relaxed);
    }
}

#[test]
fn a_worker_that_nothing_waits_for_is_never_overdue() {
    let mut rig = Rig::over(Settings::torch(2, 1, true));
    for state in [WorkerState::Idle, WorkerState::Fetch, WorkerState::Publish, WorkerState::Left] {
        rig.show(0, state, 0, ms(0));
        assert!(rig.find(ms(0), ms(60_000)).is_none(), "{state:?}");
    }
}

#[test]
fn a_worker_that_has_answered_or_left_is_not_overdue() {
    let mut rig = Rig::with_tasks();
    rig.show(0, WorkerState::Left, 0, ms(0));
    assert!(rig.find(ms(0), ms(60_000)).is_none());
    // The worker has answered, but the pin thread still holds the answer.
    rig.show(0, WorkerState::Idle, 0, ms(0));
    rig.page(0).tasks_done.store(1, Relaxed);
    assert!(rig.find(ms(60_000), ms(120_000)).is_none());
}

#[test]
fn a_worker_that_does_not_take_its_task_is_overdue_from_the_first_check() {
    for (state, task) in [(WorkerState::Idle, 1), (WorkerState::Publish, 0)] {
        let mut rig = Rig::with_tasks();
        rig.show(0, WorkerState::Left, 0, ms(0));
        // Task 1 waits for worker 1 to take it.
        rig.show(1, state, task, ms(0));
        let (at, stall) = rig.find(ms(30_000), ms(90_000)).unwrap();
        assert_eq!((at, stall.worker, stall.task, stall.time), (ms(40_000), 1, Some(TaskId(1)), LIMIT));
    }
}

#[test]
fn a_worker_is_watched_for_half_of_the_limit_before_it_is_overdue() {
    let mut rig = Rig::with_tasks();
    rig.show(0, WorkerState::Fetch, 0, ms(0));
    // The main process was busy until now, or the whole job was suspended.
    assert_eq!(rig.find(ms(20_000), ms(60_000)).unwrap().0, ms(25_000));
}

#[test]
fn a_gap_between_checks_restarts_the_watch() {
    for (gap, at) in [(1_250, 10_250), (1_251, 15_251)] {
        let mut rig = Rig::with_tasks();
        rig.show(0, WorkerState::Fetch, 0, ms(0));
        assert!(rig.find(ms(0), ms(9_000)).is_none());
        assert_eq!(rig.find(ms(9_000 + gap), ms(60_000)).unwrap().0, ms(at));
    }
}

#[test]
fn a_wait_ends_in_time_for_a_check() {
    let mut rig = Rig::with_tasks();
    rig.engine.set_stall_timeout(Some(ms(20)));
    // On a busy machine some waits may take longer.
    let in_time = (0..20).filter(|_| {
        let began = sys::clock::monotonic();
        rig.engine.wait(None).unwrap();
        sys::clock::monotonic() - began < WAIT_SLICE
    });
    assert!(in_time.count() > 10);
}

#[test]
fn checks_are_rare_until_one_is_due() {
    let mut rig = Rig::with_tasks();
    rig.engine.set_stall_timeout(Some(ms(130)));
    rig.show(0, WorkerState::Fetch, 0, ms(0));
    assert!(rig.check(ms(1)).is_none());
    // The change is not seen yet, because the last check was too recent.
    rig.show(0, WorkerState::Fetch, 1, ms(2));
    assert!(rig.check(ms(100)).is_none());
    assert_eq!(rig.engine.liveness.overdue.watched[0].work.task(), Some(TaskId(0)));
    assert!(rig.check(ms(101)).is_none());
    assert_eq!(rig.engine.liveness.overdue.watched[0].work.task(), Some(TaskId(1)));
    // The next check is due half of the limit after task 1 was seen.
    assert_eq!(rig.engine.liveness.overdue.slice(rig.zero + ms(101)), ms(65));
    assert_eq!(rig.engine.liveness.overdue.slice(rig.zero + ms(160)), ms(6));
    assert_eq!(rig.engine.liveness.overdue.slice(rig.zero + ms(170)), ms(1));
    assert!(rig.check(ms(165)).is_none());
    assert!(rig.check(ms(166)).is_some());
}

#[test]
fn an_overdue_worker_is_killed_and_its_death_says_so() {
    let mut rig = Rig::with_tasks();
    let death = Death { worker: WorkerId(0), lost: None };
    rig.show(0, WorkerState::Fetch, 0, ms(0));
    let (_, stall) = rig.find(ms(0), ms(60_000)).unwrap();
    assert!(!rig.engine.report(death).stalled);
    assert_eq!(rig.engine.kill(&stall), Killed::Yes);
    let process = rig.engine.handle.process(0).unwrap();
    let deadline = sys::clock::monotonic() + Duration::from_secs(20);
    while !process.has_exited() {
        assert!(sys::clock::monotonic() < deadline);
        std::thread::sleep(ms(1));
    }
    let report = rig.engine.report(death);
    assert_eq!((report.stalled, report.status), (true, Some(ExitStatus::Signal(libc::SIGKILL))));
    assert!(!rig.engine.report(Death { worker: WorkerId(1), lost: None }).stalled);
    // The worker is neither reported nor killed again, whatever its page says.
    rig.show(0, WorkerState::Fetch, 7, ms(20_000));
    assert!(rig.find(ms(20_000), ms(60_000)).is_none());
    assert_eq!(rig.engine.kill(&stall), Killed::Continued);
    rig.engine.liveness.forget(0);
    assert!(!rig.engine.report(death).stalled);
}

#[test]
fn a_death_other_than_by_the_kill_is_not_a_stall() {
    let mut overdue = Overdue::new(1);
    overdue.watched[0].killed = true;
    let killed = |status| overdue.was_killed(0, status);
    assert!(killed(None) && killed(Some(ExitStatus::Signal(libc::SIGKILL))));
    assert!(!killed(Some(ExitStatus::Signal(libc::SIGSEGV))) && !killed(Some(ExitStatus::Code(0))));
}

#[test]
fn a_worker_that_has_continued_is_not_killed() {
    let mut rig = Rig::with_tasks();
    rig.show(0, WorkerState::Fetch, 0, ms(0));
    let (at, stall) = rig.find(ms(0), ms(60_000)).unwrap();
    rig.show(0, WorkerState::Fetch, 1, at);
    assert_eq!(rig.engine.kill(&stall), Killed::Continued);
    assert!(!rig.engine.handle.process(0).unwrap().has_exited());
    // The worker has begun another batch of a replay.
    rig.show(0, WorkerState::Fetch, 0, ms(5));
    assert_eq!(rig.engine.kill(&stall), Killed::Continued);
    assert!(!rig.engine.liveness.overdue.watched[0].killed);
}

#[test]
fn an_ended_worker_is_not_overdue() {
    let mut rig = Rig::with_tasks();
    rig.show(0, WorkerState::Fetch, 0, ms(0));
    rig.processes[0].kill().unwrap();
    rig.processes[0].wait().unwrap();
    assert!(rig.find(ms(0), ms(60_000)).is_none());
    // The ended worker does not shorten waits.
    assert_eq!(rig.engine.liveness.overdue.slice(rig.zero + ms(60_000)), LIMIT / 2);
}

#[test]
fn a_process_that_does_not_descend_from_this_one_is_not_killed() {
    let mut rig = Rig::with_tasks();
    rig.processes[0].kill().unwrap();
    rig.processes[0].wait().unwrap();
    rig.engine.handle.vacate(0).unwrap();
    let parent = std::os::unix::process::parent_id() as i32;
    rig.engine.handle.started(0, parent).unwrap();
    rig.show(0, WorkerState::Fetch, 0, ms(0));
    let (_, stall) = rig.find(ms(0), ms(60_000)).unwrap();
    assert_eq!((stall.pid, rig.engine.kill(&stall)), (parent, Killed::No));
    assert!(!rig.engine.liveness.overdue.watched[0].killed);
}

#[test]
fn one_check_finds_two_workers() {
    let mut rig = Rig::with_tasks();
    rig.show(0, WorkerState::Fetch, 0, ms(0));
    rig.show(1, WorkerState::Fetch, 1, ms(0));
    let (at, first) = rig.find(ms(0), ms(60_000)).unwrap();
    rig.engine.kill(&first);
    let second = rig.check(at).unwrap();
    assert_eq!((first.worker, second.worker), (0, 1));
    assert!(rig.check(at).is_none());
}

#[test]
fn the_time_of_a_damaged_page_is_at_most_the_age_of_the_process() {
    let mut rig = Rig::with_tasks();
    rig.show(0, WorkerState::Fetch, 0, ms(0));
    rig.page(0).task_since_ns.store(1, Relaxed);
    let started = rig.engine.handle.process(0).unwrap().started;
    // Use the real clock, on which the process is one second old.
    rig.zero = started + Duration::from_secs(1);
    assert_eq!(rig.find(ms(0), ms(60_000)).unwrap().0, ms(9_000));
}

#[test]
fn the_wait_for_the_stack_of_an_overdue_worker_is_short() {
    for (patience, awaited) in [(ms(1000), ms(200)), (ms(50), ms(50))] {
        let mut rig = Rig::with_tasks();
        rig.engine.set_stall_limits([None; 2], Some(patience));
        rig.show(0, WorkerState::Fetch, 0, ms(0));
        assert_eq!(rig.find(ms(0), ms(60_000)).unwrap().1.patience, Some(awaited));
    }
}

#[test]
fn the_holder_of_a_task_of_a_shared_queue_is_overdue() {
    let settings = Settings { dispatch: Dispatch::SharedQueue, ..Settings::torch(2, 1, true) };
    let mut rig = Rig::over(settings);
    rig.engine.submit(100, TaskKind::Plain, &[0; 8]).unwrap().unwrap();
    let mut worker = Claimer::new(rig.engine.arena().queue().unwrap(), 1);
    assert!(worker.claim().unwrap().is_some());
    rig.show(0, WorkerState::Idle, 0, ms(0));
    rig.show(1, WorkerState::Fetch, 0, ms(0));
    let (at, stall) = rig.find(ms(0), ms(60_000)).unwrap();
    assert_eq!((at, stall.worker, stall.task), (ms(10_000), 1, Some(TaskId(0))));
    assert!(rig.find(at, ms(60_000)).is_none(), "the other worker has nothing to do");
}
