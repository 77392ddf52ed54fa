//! Scenarios of an epoch that begins before the current one has ended.

use super::*;

/// Returns a primed scheduler of persistent workers whose sampler has ended.
fn ended(settings: Settings) -> Machine {
    let mut machine = machine(Settings { persistent: true, ..settings });
    at(&mut machine, 0, Event::SamplerEnded);
    machine
}

/// Finishes a task, and calls `next`, which stages its batch and asks for one more index batch.
fn staged(machine: &mut Machine, task: u64, worker: u32) {
    done(machine, worker, task);
    assert_eq!(machine.next(true), Decision::Submit);
}

#[test]
fn early_tasks_go_around_the_workers_and_are_delivered_in_their_own_epoch() {
    let mut machine = ended(Settings::torch(2, 2, true));
    assert!(!machine.may_be_early() && machine.begin_early().is_err(), "there is no room");
    staged(&mut machine, 0, 0);
    assert!(machine.may_be_early());
    assert_eq!(machine.begin_early().unwrap(), TaskId(4));
    assert_eq!(machine.submit(4), to(4, 0));
    assert_eq!(machine.next(true), batch(0, 0));
    staged(&mut machine, 1, 1);
    assert_eq!(machine.submit(5), to(5, 1));
    assert_eq!(machine.next(true), batch(1, 1));
    // A result of the early epoch is not delivered in the current one.
    done(&mut machine, 0, 2);
    done(&mut machine, 0, 4);
    assert_eq!(machine.next(true), Decision::Submit);
    assert_eq!(machine.submit(6), to(6, 0));
    assert_eq!(machine.next(true), batch(2, 0));
    assert_eq!(machine.next(true), WAIT);
    assert_eq!((machine.dispatched(), machine.outstanding(), machine.undelivered().len()), (4, 1, 1));
    assert!(!machine.may_take_up() && machine.take_up().is_err());
    staged(&mut machine, 3, 1);
    assert_eq!(machine.submit(7), to(7, 1));
    assert!(!machine.may_be_early(), "an epoch starts with 4 tasks");
    assert_eq!(machine.next(true), batch(3, 1));
    assert_eq!(machine.next(true), Decision::End);
    machine.take_up().unwrap();
    assert_eq!((machine.first_task(), machine.dispatched(), machine.outstanding()), (TaskId(4), 4, 3));
    assert_eq!((machine.load_of(WorkerId(0)), machine.load_of(WorkerId(1))), (2, 2));
    assert_eq!(machine.next(true), Decision::Submit);
    assert_eq!(machine.submit(8), to(8, 0));
    assert_eq!(machine.next(true), batch(4, 0));
}

#[test]
fn early_tasks_begin_at_the_first_worker_whatever_their_first_number_is() {
    let mut machine = Machine::new(Settings { persistent: true, ..Settings::torch(3, 2, true) }).unwrap();
    for task in 0..4 {
        assert_eq!(machine.submit(task), to(task, task as u32 % 3));
    }
    at(&mut machine, 0, Event::SamplerEnded);
    done(&mut machine, 0, 0);
    assert_eq!(machine.begin_early().unwrap(), TaskId(4));
    assert_eq!((machine.submit(4), machine.submit(5)), (to(4, 0), to(5, 1)));
}

#[test]
fn results_in_any_order_wait_for_their_epoch() {
    let mut machine = ended(Settings::torch(2, 1, false));
    staged(&mut machine, 1, 1);
    machine.begin_early().unwrap();
    assert_eq!(machine.submit(2), to(2, 0), "regardless of the loads");
    assert_eq!(machine.next(true), batch(1, 1));
    assert_eq!(machine.next(true), WAIT);
    staged(&mut machine, 0, 0);
    assert_eq!(machine.submit(3), to(3, 1));
    done(&mut machine, 1, 3);
    done(&mut machine, 0, 2);
    assert_eq!(machine.next(true), batch(0, 0));
    assert_eq!(machine.next(true), Decision::End);
    machine.take_up().unwrap();
    assert_eq!(machine.next(true), Decision::Submit);
    at(&mut machine, 0, Event::SamplerEnded);
    assert_eq!(machine.next(true), batch(3, 1));
}

#[test]
fn a_reset_abandons_both_epochs() {
    let mut machine = ended(Settings::torch(2, 1, true));
    staged(&mut machine, 0, 0);
    machine.begin_early().unwrap();
    machine.submit(2).unwrap();
    assert_eq!(machine.next(true), batch(0, 0));
    done(&mut machine, 0, 2);
    at(&mut machine, 0, Event::EpochReset);
    let discarded = Some(Action::Discard { task: TaskId(2), tag: Some(2), result: Some("data") });
    assert_eq!(machine.poll(), discarded);
    assert_eq!(machine.poll(), Some(Action::Resume(WorkerId(0))));
    assert_eq!(machine.poll(), Some(Action::Resume(WorkerId(1))));
    // A stale result of the abandoned epoch.
    done(&mut machine, 1, 1);
    assert!(matches!(machine.poll(), Some(Action::Discard { task: TaskId(1), .. })));
    (0..2).for_each(|worker| at(&mut machine, 0, Event::Resumed(WorkerId(worker))));
    assert_eq!((machine.first_task(), machine.outstanding()), (TaskId(3), 0));
    assert_eq!(machine.submit(3), to(3, 0));
}

#[test]
fn a_death_with_only_early_tasks_is_raised_in_their_epoch() {
    let mut machine = ended(Settings::torch(2, 1, true));
    staged(&mut machine, 0, 0);
    machine.begin_early().unwrap();
    machine.submit(2).unwrap();
    assert_eq!(machine.next(true), batch(0, 0));
    at(&mut machine, 0, death(0, &[]));
    assert_eq!(machine.next(true), WAIT);
    done(&mut machine, 1, 1);
    assert_eq!(machine.next(true), batch(1, 1));
    assert_eq!(machine.next(true), Decision::End);
    machine.take_up().unwrap();
    assert_eq!(machine.next(true), dead(0, Some(2)));
}

#[test]
fn a_death_with_a_task_of_the_current_epoch_is_raised_there() {
    let mut machine = ended(Settings::torch(2, 1, true));
    staged(&mut machine, 0, 0);
    machine.begin_early().unwrap();
    machine.submit(2).unwrap();
    assert_eq!(machine.next(true), batch(0, 0));
    at(&mut machine, 0, death(1, &[]));
    assert_eq!(machine.next(true), dead(1, Some(1)));
    assert!(!machine.may_take_up());
}

#[test]
fn a_window_is_filled_with_as_many_early_tasks_as_an_epoch_starts_with() {
    let window = Some(Window { batches: 8, bytes: None });
    for dispatch in [Dispatch::RoundRobin, Dispatch::SharedQueue] {
        let mut machine = ended(Settings { window, dispatch, ..Settings::torch(2, 1, true) });
        done(&mut machine, 0, 0);
        done(&mut machine, 1, 1);
        // The caller tries to begin the early epoch when the sampler ends. After that, the scheduler asks for early
        // tasks.
        machine.begin_early().unwrap();
        for task in 2..4 {
            assert_eq!(machine.next(true), Decision::Submit);
            assert_eq!(machine.submit(task).unwrap().0, TaskId(task));
        }
        for task in 0..2 {
            assert_eq!(machine.next(true), batch(task, task as u32));
        }
        assert_eq!(machine.next(true), Decision::End);
        done(&mut machine, 0, 2);
        machine.take_up().unwrap();
        let loads = [0, 1].map(|worker| machine.load_of(WorkerId(worker)));
        assert_eq!(loads, if dispatch == Dispatch::RoundRobin { [0, 1] } else { [0, 0] });
        assert_eq!(machine.next(true), Decision::Submit);
    }
}
