//! Scenarios with windows and with the shared queue.

use super::*;

/// Returns a primed scheduler of two workers with the given settings and a `prefetch_factor` of 2.
fn windowed(dispatch: Dispatch, in_order: bool, window: Option<Window>) -> Machine {
    let mut machine =
        Machine::new(Settings { dispatch, window, persistent: true, ..Settings::torch(2, 2, in_order) }).unwrap();
    begin(&mut machine);
    machine
}

/// Starts an epoch with as many tasks as the limits allow. Returns the number of tasks.
fn begin(machine: &mut Machine) -> usize {
    (0..).find(|asked| !machine.primes(*asked) || machine.submit(machine.next_task.0).is_err()).unwrap()
}

/// Submits a task for each `Submit` decision. Returns the number of tasks, and the first other decision.
fn fill(machine: &mut Machine) -> (u64, Decision<u64, &'static str>) {
    let first = machine.next_task.0;
    loop {
        match machine.next(true) {
            Decision::Submit => machine.submit(machine.next_task.0).map(drop).unwrap(),
            decision => return (machine.next_task.0 - first, decision),
        }
    }
}

fn sized(machine: &mut Machine, worker: u32, task: u64, bytes: u64) {
    let (worker, task) = (WorkerId(worker), TaskId(task));
    at(machine, 0, Event::Completed { worker, task, result: "data", bytes });
}

fn queue(task: u64) -> std::result::Result<(TaskId, Placement), u64> {
    Ok((TaskId(task), Placement::Queue))
}

const QUEUE: Dispatch = Dispatch::SharedQueue;

fn died_at(machine: &mut Machine, worker: u32, task: u64) {
    at(machine, 0, Event::WorkerDied { worker: WorkerId(worker), held: vec![TaskId(task)] });
}

#[test]
fn a_window_is_filled_before_a_wait_and_before_a_delivery() {
    let mut machine = windowed(Dispatch::RoundRobin, true, Some(Window { batches: 6, bytes: None }));
    assert_eq!(
        (machine.outstanding(), fill(&mut machine)),
        (4, (0, WAIT)),
        "prefetch_factor bounds what is outstanding"
    );
    for task in [1, 3] {
        done(&mut machine, 1, task);
    }
    assert_eq!(fill(&mut machine), (2, WAIT), "the worker continues while task 0 is awaited");
    done(&mut machine, 1, 5);
    assert_eq!(fill(&mut machine), (0, WAIT), "the window is full");
    done(&mut machine, 0, 0);
    // Before a delivery, `next` fills the room that the delivery makes.
    assert_eq!(fill(&mut machine), (1, batch(0, 0)));
    assert_eq!(fill(&mut machine), (1, batch(1, 1)));
}

#[test]
fn a_window_may_be_smaller_than_the_number_of_workers() {
    let mut machine = windowed(Dispatch::RoundRobin, true, Some(Window { batches: 1, bytes: None }));
    for task in 0..5 {
        assert_eq!((machine.outstanding(), fill(&mut machine)), (1, (0, WAIT)));
        done(&mut machine, task % 2, u64::from(task));
        assert_eq!(fill(&mut machine), (1, batch(u64::from(task), task % 2)));
    }
}

#[test]
fn the_bytes_of_a_window_count_ready_and_expected_results() {
    let mut machine = windowed(Dispatch::RoundRobin, true, Some(Window::of_bytes(50, 4)));
    assert_eq!((machine.outstanding(), fill(&mut machine)), (4, (0, WAIT)), "no size is known");
    sized(&mut machine, 1, 1, 10);
    assert_eq!(fill(&mut machine), (1, WAIT), "10 + 4 x 10 fit");
    sized(&mut machine, 1, 3, 10);
    assert_eq!(fill(&mut machine), (0, WAIT), "20 + 4 x 10 do not");
    sized(&mut machine, 0, 0, 100);
    assert_eq!(fill(&mut machine), (0, batch(0, 0)), "20 + 3 x 100 do not");
    for decision in [batch(1, 1), WAIT] {
        assert_eq!(fill(&mut machine), (0, decision));
    }
    // A single task is always admitted.
    for (worker, task) in [(0, 2), (0, 4)] {
        sized(&mut machine, worker, task, 10);
    }
    for wanted in [(0, batch(2, 0)), (0, batch(3, 1)), (1, batch(4, 0)), (0, WAIT)] {
        assert_eq!(fill(&mut machine), wanted);
    }
    // The largest size is still known in the next epoch.
    at(&mut machine, 0, Event::EpochReset);
    sized(&mut machine, 1, 5, 10);
    (0..2).for_each(|worker| at(&mut machine, 0, Event::Resumed(WorkerId(worker))));
    assert_eq!(begin(&mut machine), 1);
}

#[test]
fn a_sampler_that_has_ended_is_asked_again_by_torch_and_in_the_next_epoch_but_not_by_a_window() {
    for window in [None, Some(Window { batches: 9, bytes: None })] {
        let mut machine = windowed(Dispatch::RoundRobin, true, window);
        at(&mut machine, 0, Event::SamplerEnded);
        done(&mut machine, 0, 0);
        let asked = machine.next(true) == Decision::Submit;
        assert_eq!(asked, window.is_none());
        assert!(!asked || machine.next(true) == batch(0, 0));
        at(&mut machine, 0, Event::EpochReset);
        for (worker, task) in [(1, 1), (0, 2), (1, 3)] {
            done(&mut machine, worker, task);
        }
        (0..2).for_each(|worker| at(&mut machine, 0, Event::Resumed(WorkerId(worker))));
        assert_eq!(begin(&mut machine), 4);
    }
}

#[test]
fn a_window_asks_for_nothing_while_an_error_of_the_sampler_waits() {
    let mut machine = windowed(Dispatch::RoundRobin, true, Some(Window { batches: 9, bytes: None }));
    done(&mut machine, 0, 0);
    assert_eq!((machine.next(true), machine.next(false)), (Decision::Submit, batch(0, 0)));
    assert_eq!((machine.next(false), machine.next(true)), (WAIT, Decision::Submit));
    // Without a window, as in torch, errors of the sampler do not prevent draws.
    let mut machine = primed(2, 1, true);
    done(&mut machine, 0, 0);
    assert_eq!((machine.next(false), machine.next(false)), (Decision::Submit, batch(0, 0)));
}

#[test]
fn a_window_draws_no_index_batch_that_exhausted_workers_would_not_take() {
    let mut machine = windowed(Dispatch::RoundRobin, true, Some(Window { batches: 9, bytes: None }));
    exhausted(&mut machine, 0, 0);
    assert_eq!(fill(&mut machine), (2, WAIT));
    exhausted(&mut machine, 1, 1);
    assert_eq!(fill(&mut machine), (0, Decision::End));
}

#[test]
fn with_a_window_the_fair_share_counts_unanswered_tasks() {
    let mut machine = windowed(Dispatch::FairShare, true, Some(Window { batches: 7, bytes: None }));
    // Worker 0 is stuck. The other one continues until the window is full.
    for task in [1, 3, 4, 5, 6] {
        done(&mut machine, 1, task);
        assert_eq!(fill(&mut machine), (u64::from(task < 5), WAIT), "{task}");
    }
    assert_eq!(machine.load_of(WorkerId(0)), 2);
}

#[test]
fn any_worker_may_answer_a_task_of_the_shared_queue_but_only_once() {
    let mut machine = windowed(QUEUE, true, Some(Window { batches: 5, bytes: None }));
    assert_eq!(machine.submit(4), queue(4).and(Err(4)), "only 4 may be outstanding");
    for task in [2, 1, 3] {
        done(&mut machine, 1, task);
    }
    assert_eq!(fill(&mut machine), (1, WAIT));
    assert_eq!(machine.undelivered()[..2], [(TaskId(0), None), (TaskId(1), Some(WorkerId(1)))]);
    for (worker, task) in [(0, 2), (0, 7), (1, u64::MAX)] {
        let event = Event::Completed { worker: WorkerId(worker), task: TaskId(task), result: "?", bytes: 0 };
        assert!(matches!(machine.on_event(Duration::ZERO, event), Err(Error::Corrupt { .. })), "{task}");
    }
    let event = Event::Exhausted { worker: WorkerId(0), task: TaskId(0) };
    assert!(matches!(machine.on_event(Duration::ZERO, event), Err(Error::Corrupt { .. })));
    let event = Event::Completed { worker: WorkerId(2), task: TaskId(0), result: "?", bytes: 0 };
    assert!(matches!(machine.on_event(Duration::ZERO, event), Err(Error::Usage { .. })));
    assert_eq!((machine.tag_of(TaskId(0)), machine.tag_of(TaskId(1))), (Some(&0), None));
    done(&mut machine, 1, 0);
    for wanted in [(1, batch(0, 1)), (1, batch(1, 1))] {
        assert_eq!(fill(&mut machine), wanted);
    }
}

#[test]
fn the_default_window_of_a_shared_queue_is_the_limit_of_outstanding_tasks() {
    let mut machine = windowed(QUEUE, true, None);
    for task in [1, 2, 3] {
        done(&mut machine, 1, task);
    }
    assert_eq!(fill(&mut machine), (0, WAIT));
    done(&mut machine, 0, 0);
    assert_eq!(fill(&mut machine), (1, batch(0, 0)));
}

#[test]
fn a_shared_queue_runs_ahead_of_a_stuck_task_up_to_its_span() {
    let mut machine = windowed(QUEUE, false, None);
    for task in 1..1024 {
        done(&mut machine, 1, task);
        assert_eq!(fill(&mut machine), (u64::from(task <= 1020), batch(task, 1)), "{task}");
    }
    assert_eq!((machine.outstanding(), machine.next(true)), (1, WAIT));
    done(&mut machine, 0, 0);
    assert_eq!(fill(&mut machine), (4, batch(0, 0)));
}

#[test]
fn a_worker_of_the_shared_queue_that_dies_loses_only_the_tasks_that_it_held() {
    let mut machine = windowed(QUEUE, true, None);
    died_at(&mut machine, 1, 1);
    done(&mut machine, 0, 0);
    assert_eq!(fill(&mut machine), (0, batch(0, 0)), "no more index batches are taken");
    assert_eq!(machine.outstanding(), 2, "another worker takes the tasks that wait");
    assert_eq!((machine.next(true), machine.next(true)), (dead(1, Some(1)), dead(1, Some(1))));
    assert_eq!(machine.oldest_task_of(WorkerId(1)), Some((TaskId(1), &1)));
    let late = Event::Completed { worker: WorkerId(1), task: TaskId(2), result: "?", bytes: 0 };
    assert!(machine.on_event(Duration::ZERO, late).is_err(), "it is dead");
}

#[test]
fn when_a_worker_dies_with_a_later_task_the_earlier_ones_are_still_delivered() {
    let mut machine = windowed(QUEUE, true, None);
    died_at(&mut machine, 1, 3);
    assert_eq!(machine.next(true), WAIT);
    (0..3).for_each(|task| done(&mut machine, 0, task));
    (0..3).for_each(|task| assert_eq!(machine.next(true), batch(task, 0)));
    assert_eq!(machine.next(true), dead(1, Some(3)));
}

#[test]
fn with_the_last_worker_all_tasks_of_the_shared_queue_are_lost() {
    let mut machine = windowed(QUEUE, true, None);
    died_at(&mut machine, 1, 2);
    died(&mut machine, 0);
    assert_eq!(machine.outstanding(), 0);
    // Task 0 waited in the queue, so the report names the task that a worker held.
    assert_eq!(machine.next(true), dead(1, Some(2)));
    let mut machine = windowed(QUEUE, true, None);
    for worker in [1, 0] {
        died(&mut machine, worker);
    }
    assert_eq!(machine.next(true), dead(1, None));
    let held = Event::WorkerDied { worker: WorkerId(0), held: vec![TaskId(9)] };
    assert!(machine.on_event(Duration::ZERO, held).is_ok(), "it is already dead");
    let mut machine = windowed(QUEUE, true, None);
    let held = Event::WorkerDied { worker: WorkerId(0), held: vec![TaskId(9)] };
    assert!(matches!(machine.on_event(Duration::ZERO, held), Err(Error::Corrupt { .. })));
}

#[test]
fn a_reset_withdraws_the_tasks_that_wait_in_the_shared_queue() {
    let mut machine = windowed(QUEUE, true, None);
    done(&mut machine, 1, 1);
    at(&mut machine, 0, Event::EpochReset);
    let result = Some("data");
    assert_eq!(machine.poll(), Some(Action::Discard { task: TaskId(1), tag: Some(1), result }));
    for task in [0, 2, 3] {
        assert_eq!(machine.poll(), Some(Action::Withdraw(TaskId(task))));
    }
    (0..2).for_each(|worker| assert_eq!(machine.poll(), Some(Action::Resume(WorkerId(worker)))));
    // A second reset does not withdraw the tasks again.
    at(&mut machine, 0, Event::EpochReset);
    assert_eq!(machine.poll(), None);
    at(&mut machine, 0, Event::Withdrawn(TaskId(3)));
    assert_eq!(machine.poll(), dropped(3));
    for task in [3, 1, 4] {
        let event = Event::Withdrawn(TaskId(task));
        assert!(matches!(machine.on_event(Duration::ZERO, event), Err(Error::Corrupt { .. })), "{task}");
    }
    done(&mut machine, 0, 0);
    assert_eq!(machine.poll(), Some(Action::Discard { task: TaskId(0), tag: Some(0), result }));
    let resume = |worker| Some(Action::Resume(WorkerId(worker)));
    at(&mut machine, 0, Event::Resumed(WorkerId(0)));
    assert_eq!((machine.poll(), machine.poll()), (resume(0), None));
    at(&mut machine, 0, Event::Resumed(WorkerId(0)));
    assert_eq!((machine.submit(4), machine.poll()), (Err(4), None));
    // Worker 1 took task 2, but did not answer it.
    at(&mut machine, 0, Event::Resumed(WorkerId(1)));
    assert_eq!((machine.poll(), machine.poll()), (resume(1), None));
    at(&mut machine, 0, Event::Resumed(WorkerId(1)));
    assert_eq!((machine.poll(), machine.poll()), (dropped(2), None));
    assert_eq!(machine.submit(4), queue(4));
    let event = Event::Withdrawn(TaskId(4));
    assert!(machine.on_event(Duration::ZERO, event).is_err(), "it is not stale");
}

#[test]
fn a_shutdown_returns_the_tasks_that_wait_in_the_shared_queue() {
    let mut machine = windowed(QUEUE, false, None);
    died_at(&mut machine, 1, 1);
    at(&mut machine, 0, Event::Shutdown);
    (0..4).for_each(|task| assert_eq!(machine.poll(), dropped(task)));
    at(&mut machine, 0, Event::Withdrawn(TaskId(0)));
    assert_eq!(machine.poll(), None);
}
