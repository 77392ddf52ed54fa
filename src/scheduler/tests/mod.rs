//! Short scenarios, one per rule. `tests/scheduler_model.rs` compares the combination of all rules with a reference
//! model.

mod early;
mod restarts;
mod windows;

use super::*;

type Machine = Scheduler<u64, &'static str>;

/// Returns a scheduler after the initial submissions of its first epoch. The tag of each task is its number.
fn primed(workers: usize, prefetch_factor: usize, in_order: bool) -> Machine {
    machine(Settings::torch(workers, prefetch_factor, in_order))
}

fn machine(settings: Settings) -> Machine {
    let mut machine = Machine::new(settings).unwrap();
    prime(&mut machine);
    machine
}

/// Returns a primed scheduler of persistent workers with one task each.
fn persistent(workers: usize) -> Machine {
    machine(Settings { persistent: true, ..Settings::torch(workers, 1, true) })
}

fn prime(machine: &mut Machine) {
    for _ in 0..machine.max_tasks() {
        machine.submit(machine.next_task.0).unwrap();
    }
}

fn at(machine: &mut Machine, millis: u64, event: Event<&'static str>) {
    machine.on_event(Duration::from_millis(millis), event).unwrap();
}

fn done(machine: &mut Machine, worker: u32, task: u64) {
    at(machine, 0, Event::Completed { worker: WorkerId(worker), task: TaskId(task), result: "data", bytes: 0 });
}

fn exhausted(machine: &mut Machine, worker: u32, task: u64) {
    at(machine, 0, Event::Exhausted { worker: WorkerId(worker), task: TaskId(task) });
}

fn died(machine: &mut Machine, worker: u32) {
    at(machine, 0, Event::WorkerDied { worker: WorkerId(worker), held: Vec::new() });
}

fn batch(task: u64, worker: u32) -> Decision<u64, &'static str> {
    Decision::Deliver { task: TaskId(task), worker: WorkerId(worker), tag: task, result: "data" }
}

fn dead(worker: u32, lost: Option<u64>) -> Decision<u64, &'static str> {
    Decision::Dead(Death { worker: WorkerId(worker), lost: lost.map(TaskId) })
}

/// Returns the expected result of `submit` for a task that is sent to `worker`.
fn to(task: u64, worker: u32) -> std::result::Result<(TaskId, Placement), u64> {
    Ok((TaskId(task), Placement::Worker(WorkerId(worker))))
}

fn dropped(task: u64) -> Option<Action<u64, &'static str>> {
    Some(Action::Discard { task: TaskId(task), tag: Some(task), result: None })
}

const WAIT: Decision<u64, &str> = Decision::Wait(None);

#[test]
fn the_cycle_of_an_epoch_begins_with_the_requested_worker() {
    for in_order in [true, false] {
        let settings = Settings { persistent: true, ..Settings::torch(3, 1, in_order) };
        let mut machine = Machine::new(settings).unwrap();
        let mut task = 0;
        // By default, an epoch begins with the first worker.
        for (requested, workers) in [(Some(2), [2, 0, 1]), (None, [0, 1, 2]), (Some(1), [1, 2, 0])] {
            if let Some(first) = requested {
                machine.begin_with(WorkerId(first)).unwrap();
            }
            for worker in workers {
                assert_eq!(machine.submit(task), to(task, worker));
                done(&mut machine, worker, task);
                task += 1;
            }
            at(&mut machine, 0, Event::EpochReset);
            (0..3).for_each(|worker| at(&mut machine, 0, Event::Resumed(WorkerId(worker))));
        }
    }
}

#[test]
fn no_epoch_begins_with_a_worker_that_does_not_exist() {
    let mut machine = Machine::new(Settings::torch(2, 1, true)).unwrap();
    assert!(matches!(machine.begin_with(WorkerId(2)), Err(Error::Usage { .. })));
    assert_eq!(machine.submit(0), to(0, 0));
}

#[test]
fn batches_come_in_order_each_after_a_new_submission() {
    let mut machine = primed(2, 1, true);
    done(&mut machine, 1, 1);
    assert_eq!(machine.next(true), WAIT);
    done(&mut machine, 0, 0);
    assert_eq!(machine.next(true), Decision::Submit);
    assert_eq!(machine.submit(2), to(2, 0));
    assert_eq!(machine.next(true), batch(0, 0));
    // From here on nothing is submitted, as if the sampler had ended. The batches are still delivered.
    assert_eq!(machine.next(true), Decision::Submit);
    assert_eq!(machine.next(true), batch(1, 1));
    assert_eq!(machine.next(true), WAIT);
    done(&mut machine, 0, 2);
    assert_eq!((machine.next(true), machine.next(true)), (Decision::Submit, batch(2, 0)));
    assert_eq!((machine.next(true), machine.next(true)), (Decision::End, Decision::End));
}

#[test]
fn results_that_wait_for_their_turn_still_count_toward_the_limit() {
    let mut machine = primed(2, 1, true);
    done(&mut machine, 1, 1);
    assert_eq!((machine.submit(2), machine.outstanding()), (Err(2), 1));
    done(&mut machine, 0, 0);
    assert_eq!((machine.submit(2), machine.outstanding()), (Err(2), 0));
    assert_eq!(machine.next(true), Decision::Submit);
    assert_eq!(machine.submit(2), to(2, 0));
}

#[test]
fn out_of_order_the_first_result_comes_first_and_a_stuck_worker_gets_no_more_than_its_share() {
    let mut machine = primed(2, 2, false);
    for round in 0..1_000 {
        let task = if round < 2 { 2 * round + 1 } else { round + 2 };
        done(&mut machine, 1, task);
        assert_eq!(machine.next(true), Decision::Submit);
        assert_eq!(machine.submit(round + 4), to(round + 4, 1));
        assert_eq!(machine.next(true), batch(task, 1));
    }
    assert_eq!(machine.load_of(WorkerId(0)), 2);
    assert_eq!(machine.oldest_task_of(WorkerId(0)), Some((TaskId(0), &0)));
}

#[test]
fn an_error_is_raised_in_its_place_and_the_batches_after_it_follow() {
    let mut machine = primed(1, 2, true);
    let (worker, task) = (WorkerId(0), TaskId(0));
    at(&mut machine, 0, Event::Failed { worker, task, result: "error", bytes: 0 });
    done(&mut machine, 0, 1);
    assert_eq!(machine.next(true), Decision::Submit);
    assert_eq!(machine.next(true), Decision::Raise { task, worker, tag: 0, result: "error" });
    assert_eq!((machine.next(true), machine.next(true)), (Decision::Submit, batch(1, 0)));
}

#[test]
fn an_exhausted_worker_is_retired_its_tasks_are_skipped_and_its_exit_is_no_death() {
    let mut machine = primed(2, 2, true);
    exhausted(&mut machine, 0, 0);
    assert_eq!((machine.poll(), machine.poll()), (dropped(0), dropped(2)));
    assert_eq!(machine.poll(), Some(Action::Retire(WorkerId(0))));
    died(&mut machine, 0);
    assert_eq!(machine.next(true), Decision::Submit);
    assert_eq!(machine.submit(4), to(4, 1));
    done(&mut machine, 1, 1);
    assert_eq!((machine.next(true), machine.next(true)), (Decision::Submit, batch(1, 1)));
    exhausted(&mut machine, 1, 3);
    assert_eq!(machine.next(true), Decision::Submit);
    assert_eq!(machine.submit(9), Err(9), "no worker remains, so the index batch is returned");
    assert_eq!(machine.next(true), Decision::End);
}

#[test]
fn the_share_of_the_others_grows_when_a_worker_is_exhausted() {
    let mut machine = primed(3, 2, false);
    exhausted(&mut machine, 2, 2);
    assert_eq!(machine.next(true), Decision::Submit);
    assert_eq!(machine.submit(6), to(6, 0), "3 each for 2 workers, and the cursor is at 0");
    assert_eq!(machine.submit(7), to(7, 1));
    assert_eq!(machine.submit(8), Err(8));
}

#[test]
fn a_result_out_of_its_workers_order_is_damage_and_changes_nothing() {
    let mut machine = primed(2, 2, true);
    for (worker, task) in [(0, 2), (0, 1), (1, 0), (1, 7)] {
        let event = Event::Completed { worker: WorkerId(worker), task: TaskId(task), result: "?", bytes: 0 };
        assert!(matches!(machine.on_event(Duration::ZERO, event), Err(Error::Corrupt { .. })));
    }
    let resumed = Event::Resumed(WorkerId(0));
    assert!(matches!(machine.on_event(Duration::ZERO, resumed), Err(Error::Corrupt { .. })));
    let unknown = Event::WorkerDied { worker: WorkerId(2), held: Vec::new() };
    assert!(matches!(machine.on_event(Duration::ZERO, unknown), Err(Error::Usage { .. })));
    done(&mut machine, 0, 0);
    assert_eq!((machine.next(true), machine.next(true)), (Decision::Submit, batch(0, 0)));
    done(&mut machine, 0, 2);
    let again = Event::Completed { worker: WorkerId(0), task: TaskId(2), result: "twice", bytes: 0 };
    assert!(matches!(machine.on_event(Duration::ZERO, again), Err(Error::Corrupt { .. })));
}

#[test]
fn batches_before_the_first_lost_task_are_delivered_and_then_every_call_raises_the_death() {
    let mut machine = primed(3, 1, true);
    died(&mut machine, 2);
    died(&mut machine, 1);
    assert_eq!(machine.next(true), WAIT, "task 0 is with a living worker");
    done(&mut machine, 0, 0);
    assert_eq!(machine.next(true), batch(0, 0), "no more index batches are taken");
    assert_eq!((machine.next(true), machine.next(true)), (dead(1, Some(1)), dead(1, Some(1))));
    assert_eq!(machine.submit(3), Err(3));
}

#[test]
fn an_idle_workers_death_is_raised_in_place_of_the_end() {
    let mut machine = primed(2, 1, true);
    done(&mut machine, 1, 1);
    died(&mut machine, 1);
    assert_eq!(machine.next(true), WAIT);
    done(&mut machine, 0, 0);
    assert_eq!((machine.next(true), machine.next(true)), (batch(0, 0), batch(1, 1)));
    assert_eq!((machine.next(true), machine.next(true)), (dead(1, None), dead(1, None)));
}

#[test]
fn out_of_order_complete_batches_are_delivered_before_the_death() {
    let mut machine = primed(3, 1, false);
    done(&mut machine, 2, 2);
    died(&mut machine, 1);
    assert_eq!((machine.next(true), machine.next(true)), (batch(2, 2), dead(1, Some(1))));
    done(&mut machine, 0, 0);
    assert_eq!(machine.next(true), dead(1, Some(1)), "a final error hides later results");
    machine.on_event(Duration::ZERO, Event::Shutdown).unwrap();
    let result = Some("data");
    assert_eq!(machine.poll(), Some(Action::Discard { task: TaskId(0), tag: Some(0), result }));
    assert_eq!(machine.poll(), dropped(1));
}

#[test]
fn a_new_epoch_begins_when_every_worker_has_finished_the_old_one() {
    let mut machine = persistent(2);
    done(&mut machine, 1, 1);
    at(&mut machine, 0, Event::EpochReset);
    let result = Some("data");
    assert_eq!(machine.poll(), Some(Action::Discard { task: TaskId(1), tag: Some(1), result }));
    assert_eq!(machine.poll(), Some(Action::Resume(WorkerId(0))));
    assert_eq!(machine.poll(), Some(Action::Resume(WorkerId(1))));
    at(&mut machine, 0, Event::Resumed(WorkerId(1)));
    assert_eq!((machine.next(true), machine.submit(2)), (WAIT, Err(2)));
    done(&mut machine, 0, 0);
    assert_eq!(machine.poll(), Some(Action::Discard { task: TaskId(0), tag: Some(0), result }));
    at(&mut machine, 0, Event::Resumed(WorkerId(0)));
    assert!(!machine.resuming());
    assert_eq!(machine.submit(2), to(2, 0));
    assert_eq!(machine.dispatched(), 1);
}

#[test]
fn an_epoch_that_replaces_one_which_has_not_begun_reaches_every_worker() {
    let mut machine = persistent(2);
    at(&mut machine, 0, Event::EpochReset);
    let resume = |worker| Some(Action::Resume(WorkerId(worker)));
    assert_eq!((machine.poll(), machine.poll()), (resume(0), resume(1)));
    for worker in 0..2 {
        done(&mut machine, worker, worker.into());
        assert!(matches!(machine.poll(), Some(Action::Discard { .. })));
    }
    at(&mut machine, 0, Event::Resumed(WorkerId(0)));
    for _ in 0..2 {
        // An interrupt ends the wait for worker 1.
        at(&mut machine, 0, Event::EpochReset);
    }
    assert_eq!((machine.poll(), machine.poll()), (resume(0), None));
    at(&mut machine, 0, Event::Resumed(WorkerId(1)));
    for _ in 0..2 {
        assert_eq!((machine.poll(), machine.poll(), machine.resuming()), (resume(1), None, true));
        at(&mut machine, 0, Event::Resumed(WorkerId(1)));
    }
    assert_eq!((machine.poll(), machine.resuming()), (None, true));
    at(&mut machine, 0, Event::Resumed(WorkerId(0)));
    assert_eq!(machine.poll(), resume(0));
    at(&mut machine, 0, Event::Resumed(WorkerId(0)));
    assert!(!machine.resuming());
    assert_eq!(machine.submit(2), to(2, 0));
}

#[test]
fn an_abandoned_epoch_asks_for_no_index_batch_in_the_next_one() {
    let mut machine = persistent(2);
    exhausted(&mut machine, 0, 0);
    exhausted(&mut machine, 1, 1);
    // An interrupt ends `next` here, before it asks for index batches.
    at(&mut machine, 0, Event::EpochReset);
    (0..2).for_each(|worker| at(&mut machine, 0, Event::Resumed(WorkerId(worker))));
    prime(&mut machine);
    assert_eq!(machine.next(true), WAIT);
}

#[test]
fn a_death_while_resuming_is_raised_at_once() {
    let mut machine = persistent(2);
    at(&mut machine, 0, Event::EpochReset);
    died(&mut machine, 0);
    assert_eq!(machine.next(true), dead(0, None));
    assert!(machine.on_event(Duration::ZERO, Event::EpochReset).is_err());
}

#[test]
fn the_timeout_counts_from_the_last_result_and_loses_nothing() {
    let timeout = Some(Duration::from_millis(100));
    let mut machine = machine(Settings { timeout, ..Settings::torch(2, 1, true) });
    let wait = |millis| Decision::Wait(Some(Duration::from_millis(millis)));
    at(&mut machine, 1_000, Event::WaitBegan);
    assert_eq!(machine.next(true), wait(1_100));
    at(&mut machine, 1_090, Event::Completed { worker: WorkerId(1), task: TaskId(1), result: "data", bytes: 0 });
    assert_eq!(machine.next(true), wait(1_190));
    at(&mut machine, 1_189, Event::Time);
    assert_eq!(machine.next(true), wait(1_190));
    at(&mut machine, 1_190, Event::Time);
    assert_eq!((machine.next(true), machine.next(true)), (Decision::TimedOut, WAIT));
    at(&mut machine, 5_000, Event::WaitBegan);
    assert_eq!(machine.next(true), wait(5_100));
    // The clock is stopped between an interrupted call and the next one.
    at(&mut machine, 5_010, Event::WaitEnded);
    at(&mut machine, 6_000, Event::Time);
    assert_eq!(machine.next(true), WAIT);
    at(&mut machine, 6_000, Event::WaitBegan);
    assert_eq!(machine.next(true), wait(6_100));
    done(&mut machine, 0, 0);
    assert_eq!((machine.next(true), machine.next(true)), (Decision::Submit, batch(0, 0)));
}

#[test]
fn a_shutdown_returns_all_tags_and_results() {
    let mut machine = primed(2, 1, true);
    done(&mut machine, 0, 0);
    at(&mut machine, 0, Event::Shutdown);
    assert_eq!(machine.next(true), Decision::Shutdown);
    let result = Some("data");
    assert_eq!(machine.poll(), Some(Action::Discard { task: TaskId(0), tag: Some(0), result }));
    assert_eq!(machine.poll(), dropped(1));
    done(&mut machine, 1, 1);
    assert_eq!(machine.poll(), Some(Action::Discard { task: TaskId(1), tag: None, result }), "it arrived late");
    assert_eq!((machine.poll(), machine.submit(2)), (None, Err(2)));
}

#[test]
fn settings_without_a_worker_or_a_task_are_refused() {
    for (workers, prefetch_factor) in [(0, 2), (2, 0), (1 << 20, 1), (1 << 18, 1 << 20), (2, usize::MAX)] {
        let settings = Settings::torch(workers, prefetch_factor, true);
        assert!(matches!(Machine::new(settings), Err(Error::Usage { .. })), "{workers} {prefetch_factor}");
    }
    for (batches, fits) in [(0, false), (1, true), (1 << 24, true), ((1 << 24) + 1, false)] {
        let window = Some(Window { batches, bytes: None });
        let settings = Settings { window, ..Settings::torch(3, 2, true) };
        assert_eq!(Machine::new(settings).is_ok(), fits, "{batches}");
    }
}
