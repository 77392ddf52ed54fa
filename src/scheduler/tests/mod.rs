//! What `tests/scheduler_model.rs`, which compares random programs with a reference model, does not contain: refused
//! settings and events, new tasks before others are sent again, and the span of a shared queue.

use super::*;

type Machine = Scheduler<u64, &'static str>;

/// Returns a scheduler after the initial submissions of its first epoch. The tag of each task is its number.
fn machine(settings: Settings) -> Machine {
    let mut machine = Machine::new(settings).unwrap();
    for _ in 0..machine.max_tasks() {
        machine.submit(machine.next_task.0).unwrap();
    }
    machine
}

fn at(machine: &mut Machine, millis: u64, event: Event<&'static str>) {
    machine.on_event(Duration::from_millis(millis), event).unwrap();
}

fn completed(worker: u32, task: u64) -> Event<&'static str> {
    Event::Completed { worker: WorkerId(worker), task: TaskId(task), result: "data", bytes: 0 }
}

fn done(machine: &mut Machine, worker: u32, task: u64) {
    at(machine, 0, completed(worker, task));
}

fn death(worker: u32, held: &[u64]) -> Event<&'static str> {
    Event::WorkerDied { worker: WorkerId(worker), held: held.iter().copied().map(TaskId).collect() }
}

fn batch(task: u64, worker: u32) -> Decision<u64, &'static str> {
    Decision::Deliver { task: TaskId(task), worker: WorkerId(worker), tag: task, result: "data" }
}

/// Returns the expected result of `submit` for a task that is sent to `worker`.
fn to(task: u64, worker: u32) -> std::result::Result<(TaskId, Placement), u64> {
    Ok((TaskId(task), Placement::Worker(WorkerId(worker))))
}

const WAIT: Decision<u64, &str> = Decision::Wait(None);

#[test]
fn settings_beyond_the_limits_are_refused() {
    for (workers, prefetch_factor) in [(0, 2), (2, 0), (1 << 20, 1), (1 << 18, 1 << 20), (2, usize::MAX)] {
        let settings = Settings::torch(workers, prefetch_factor, true);
        assert!(matches!(Machine::new(settings), Err(Error::Usage { .. })), "{workers} {prefetch_factor}");
    }
    for (batches, fits) in [(0, false), (1, true), (1 << 24, true), ((1 << 24) + 1, false)] {
        let window = Some(Window { batches, bytes: None });
        let settings = Settings { window, ..Settings::torch(3, 2, true) };
        assert_eq!(Machine::new(settings).is_ok(), fits, "{batches}");
    }
    assert_eq!(Window::of_bytes(50, 4), Window { batches: 1024, bytes: Some(50) });
}

/// Asserts that events fail: as damage if `is_damage`, otherwise as wrong usage.
fn assert_refused(machine: &mut Machine, is_damage: bool, events: impl IntoIterator<Item = Event<&'static str>>) {
    for event in events {
        let text = format!("{event:?}");
        match machine.on_event(Duration::ZERO, event) {
            Err(Error::Corrupt { .. }) if is_damage => {}
            Err(Error::Usage { .. }) if !is_damage => {}
            other => panic!("{text}: {other:?}"),
        }
    }
}

#[test]
fn impossible_events_are_refused_and_change_nothing() {
    let [worker, other] = [0, 1].map(WorkerId);
    let settings = Settings { persistent: true, restarts: true, ..Settings::torch(2, 2, true) };
    let mut machine = machine(settings.clone());
    assert!(matches!(machine.begin_with(WorkerId(2)), Err(Error::Usage { .. })));
    assert_refused(&mut machine, true, [(0, 2), (0, 1), (1, 0), (1, 7)].map(|(worker, task)| completed(worker, task)));
    assert_refused(&mut machine, true, [Event::Resumed(worker), Event::Withdrawn(TaskId(0)), death(0, &[0])]);
    assert_refused(&mut machine, false, [death(2, &[]), Event::WorkerReplaced(worker), Event::GivenUp(worker)]);
    assert_refused(&mut machine, false, [Event::Postponed { worker, until: Duration::ZERO }]);
    done(&mut machine, 0, 0);
    assert_eq!((machine.next(true), machine.next(true)), (Decision::Submit, batch(0, 0)));
    done(&mut machine, 0, 2);
    assert_refused(&mut machine, true, [completed(0, 2)]);
    // A vacant worker has no process that could answer, and its next process has not received the task yet.
    at(&mut machine, 0, death(1, &[]));
    assert_refused(&mut machine, true, [completed(1, 1), Event::Resumed(other)]);
    at(&mut machine, 0, Event::WorkerReplaced(other));
    assert_refused(&mut machine, true, [completed(1, 1)]);
    machine.resent();
    done(&mut machine, 1, 1);
    at(&mut machine, 0, death(1, &[]));
    at(&mut machine, 0, Event::GivenUp(other));
    assert_refused(&mut machine, true, [completed(1, 3)]);
    assert_refused(&mut machine, false, [Event::EpochReset, Event::WorkerReplaced(other), Event::GivenUp(other)]);
    assert_refused(&mut self::machine(Settings::torch(1, 1, true)), false, [Event::EpochReset]);

    let mut machine = self::machine(Settings { dispatch: Dispatch::SharedQueue, restarts: false, ..settings });
    done(&mut machine, 1, 2);
    assert_eq!((machine.tag_of(TaskId(0)), machine.tag_of(TaskId(2))), (Some(&0), None));
    assert_eq!(machine.undelivered()[1..3], [(TaskId(1), None), (TaskId(2), Some(other))]);
    let exhausted = Event::Exhausted { worker, task: TaskId(0) };
    assert_refused(&mut machine, true, [completed(0, 2), completed(0, 7), completed(1, u64::MAX), exhausted]);
    assert_refused(&mut machine, true, [death(0, &[9]), Event::Withdrawn(TaskId(0))]);
    assert_refused(&mut machine, false, [completed(2, 0)]);
    at(&mut machine, 0, Event::EpochReset);
    at(&mut machine, 0, Event::Withdrawn(TaskId(3)));
    assert_refused(&mut machine, true, [3, 2, 4].map(|task| Event::Withdrawn(TaskId(task))));
    at(&mut machine, 0, death(1, &[]));
    assert_refused(&mut machine, true, [completed(1, 0)]);
    at(&mut machine, 0, death(1, &[9]));
}

#[test]
fn new_tasks_wait_for_those_that_are_to_be_sent_again() {
    let window = Some(Window { batches: 100, bytes: None });
    let mut machine = machine(Settings { window, restarts: true, ..Settings::torch(2, 2, true) });
    at(&mut machine, 0, death(1, &[]));
    at(&mut machine, 0, Event::WorkerReplaced(WorkerId(1)));
    done(&mut machine, 0, 0);
    assert_eq!(machine.submit(4), to(4, 0));
    done(&mut machine, 0, 2);
    assert_eq!(machine.submit(5), Ok((TaskId(5), Placement::Later)));
    for task in [1, 3, 5] {
        assert_eq!(machine.next(true), Decision::Resend);
        assert_eq!(machine.unsent().map(|(worker, task, _)| (worker.0, task.0)), Some((1, task)));
        machine.resent();
    }
    assert_eq!(machine.unsent(), None);
    done(&mut machine, 1, 1);
    assert_eq!(machine.submit(6), to(6, 0));
    done(&mut machine, 1, 3);
    assert_eq!(machine.submit(7), to(7, 1));
}

#[test]
fn tasks_that_a_worker_of_the_shared_queue_held_are_bound_to_it_in_order() {
    let shared = Settings { dispatch: Dispatch::SharedQueue, restarts: true, ..Settings::torch(2, 2, true) };
    let mut machine = machine(shared);
    at(&mut machine, 0, death(1, &[2, 0]));
    assert!(machine.tasks_of(WorkerId(1)).map(|(task, _)| task.0).eq([0, 2]));
    assert_refused(&mut machine, true, [completed(0, 2), completed(1, 0), completed(1, 1)]);
    at(&mut machine, 0, Event::WorkerReplaced(WorkerId(1)));
    machine.resent();
    done(&mut machine, 1, 0);
    done(&mut machine, 1, 1);
    assert_eq!(machine.unsent(), Some((WorkerId(1), TaskId(2), &2)));
}

#[test]
fn a_dataset_that_ends_again_drops_the_unsent_tasks() {
    let (worker, task) = (WorkerId(1), TaskId(1));
    let mut machine = machine(Settings { restarts: true, ..Settings::torch(2, 2, true) });
    at(&mut machine, 0, death(1, &[]));
    at(&mut machine, 0, Event::WorkerReplaced(worker));
    machine.resent();
    at(&mut machine, 0, Event::Exhausted { worker, task });
    assert_eq!((machine.unsent(), machine.tasks_of(worker).count()), (None, 0));
    assert_ne!(machine.next(true), Decision::Resend);
}

#[test]
fn a_shared_queue_runs_ahead_of_a_stuck_task_up_to_its_span() {
    let mut machine = machine(Settings { dispatch: Dispatch::SharedQueue, ..Settings::torch(2, 2, false) });
    for task in 1..1024 {
        done(&mut machine, 1, task);
        if task <= 1020 {
            assert_eq!(machine.next(true), Decision::Submit);
            machine.submit(task + 3).unwrap();
        }
        assert_eq!(machine.next(true), batch(task, 1), "{task}");
    }
    assert_eq!((machine.outstanding(), machine.next(true)), (1, WAIT));
    done(&mut machine, 0, 0);
    assert_eq!(machine.next(true), Decision::Submit);
}
