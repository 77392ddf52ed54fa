//! Scenarios in which workers are replaced.

use super::*;

/// Returns a primed scheduler of two persistent workers with two tasks each. The workers may be replaced.
fn replacing(dispatch: Dispatch) -> Machine {
    machine(Settings { dispatch, persistent: true, restarts: true, ..Settings::torch(2, 2, true) })
}

fn vacant(worker: u32, lost: Option<u64>) -> Decision<u64, &'static str> {
    Decision::Vacant(Death { worker: WorkerId(worker), lost: lost.map(TaskId) })
}

fn replaced(machine: &mut Machine, worker: u32) {
    at(machine, 0, Event::WorkerReplaced(WorkerId(worker)));
}

fn unsent(machine: &Machine) -> Option<(u32, u64)> {
    machine.unsent().map(|(worker, task, _)| (worker.0, task.0))
}

fn tasks(machine: &Machine, worker: u32) -> Vec<u64> {
    machine.tasks_of(WorkerId(worker)).map(|(task, _)| task.0).collect()
}

fn refused(machine: &mut Machine, worker: u32, task: u64) -> bool {
    let event = Event::Completed { worker: WorkerId(worker), task: TaskId(task), result: "data", bytes: 0 };
    matches!(machine.on_event(Duration::ZERO, event), Err(Error::Corrupt { .. }))
}

#[test]
fn the_next_process_gets_the_unanswered_tasks_before_any_new_one() {
    let window = Some(Window { batches: 100, bytes: None });
    let mut machine = machine(Settings { window, restarts: true, ..Settings::torch(2, 2, true) });
    done(&mut machine, 1, 1);
    died(&mut machine, 1);
    assert!(machine.is_vacant(WorkerId(1)) && !machine.is_dead(WorkerId(1)) && machine.is_active(WorkerId(1)));
    assert!(refused(&mut machine, 1, 3), "there is no process to answer it");
    assert_eq!(machine.next(true), vacant(1, Some(3)));
    assert_eq!(machine.next(true), vacant(1, Some(3)), "it is still vacant");
    done(&mut machine, 0, 0);
    assert_eq!(machine.submit(4), to(4, 0));
    assert_eq!(machine.submit(5), Ok((TaskId(5), Placement::Later)));
    replaced(&mut machine, 1);
    assert_eq!((machine.next(true), unsent(&machine)), (Decision::Resend, Some((1, 3))));
    assert!(refused(&mut machine, 1, 3), "it has not been sent yet");
    machine.resent();
    done(&mut machine, 0, 2);
    // Task 7 comes after task 5, which still has to be sent.
    assert_eq!(machine.submit(6), to(6, 0));
    done(&mut machine, 1, 3);
    assert_eq!(machine.submit(7), Ok((TaskId(7), Placement::Later)));
    assert_eq!(tasks(&machine, 1), [5, 7]);
    for task in [5, 7] {
        assert_eq!((machine.next(true), unsent(&machine)), (Decision::Resend, Some((1, task))));
        machine.resent();
    }
    assert_eq!(unsent(&machine), None);
    done(&mut machine, 0, 4);
    assert_eq!(machine.submit(8), to(8, 0));
    done(&mut machine, 1, 5);
    assert_eq!(machine.submit(9), to(9, 1));
}

#[test]
fn a_dataset_that_ends_again_drops_the_unsent_tasks() {
    let mut machine = replacing(Dispatch::RoundRobin);
    died(&mut machine, 1);
    replaced(&mut machine, 1);
    assert_eq!(unsent(&machine), Some((1, 1)));
    machine.resent();
    exhausted(&mut machine, 1, 1);
    assert_eq!((unsent(&machine), tasks(&machine, 1)), (None, Vec::new()));
    assert_eq!([machine.poll(), machine.poll()], [dropped(1), dropped(3)]);
    assert_ne!(machine.next(true), Decision::Resend);
}

#[test]
fn an_abandoned_epoch_discards_the_tasks_that_no_process_has() {
    let mut machine = replacing(Dispatch::RoundRobin);
    died(&mut machine, 1);
    replaced(&mut machine, 1);
    machine.resent();
    at(&mut machine, 0, Event::EpochReset);
    assert_eq!((unsent(&machine), tasks(&machine, 1)), (None, vec![1]));
    assert_eq!(machine.poll(), dropped(3));
    // Task 1, which was sent, is answered before the resume message.
    done(&mut machine, 1, 1);
    at(&mut machine, 0, Event::Resumed(WorkerId(1)));
    died(&mut machine, 0);
    assert_eq!(machine.next(true), vacant(0, None));
    replaced(&mut machine, 0);
    assert!(!machine.resuming());
    prime(&mut machine);
    assert_eq!(tasks(&machine, 1), [5, 7]);
}

#[test]
fn a_vacant_worker_gets_no_message_and_is_not_reported_while_the_epoch_does_not_need_it() {
    let mut machine = replacing(Dispatch::RoundRobin);
    at(&mut machine, 0, Event::SamplerEnded);
    for (worker, task) in [(0, 0), (1, 1), (0, 2), (1, 3)] {
        done(&mut machine, worker, task);
    }
    died(&mut machine, 1);
    for task in 0..4 {
        assert_eq!(machine.next(true), Decision::Submit);
        assert_eq!(machine.next(true), batch(task, task as u32 % 2));
    }
    assert_eq!(machine.next(true), Decision::End);
    at(&mut machine, 0, Event::EpochReset);
    assert_eq!((machine.poll(), machine.poll()), (Some(Action::Resume(WorkerId(0))), None));
    assert_eq!(machine.next(true), vacant(1, None));
}

#[test]
fn all_tasks_that_a_worker_of_the_shared_queue_held_are_bound_to_it_in_order() {
    let mut machine = replacing(Dispatch::SharedQueue);
    at(&mut machine, 0, Event::WorkerDied { worker: WorkerId(1), held: vec![TaskId(2), TaskId(0)] });
    assert_eq!(tasks(&machine, 1), [0, 2]);
    assert!(refused(&mut machine, 0, 2) && refused(&mut machine, 1, 0) && refused(&mut machine, 1, 1));
    replaced(&mut machine, 1);
    machine.resent();
    done(&mut machine, 1, 0);
    done(&mut machine, 1, 1);
    assert_eq!(unsent(&machine), Some((1, 2)));
    // In an abandoned epoch, a task that was sent may stay unanswered.
    machine.resent();
    at(&mut machine, 0, Event::EpochReset);
    while machine.poll().is_some() {}
    at(&mut machine, 0, Event::Resumed(WorkerId(1)));
    assert_eq!((tasks(&machine, 1), machine.poll()), (Vec::new(), dropped(2)));
}

#[test]
fn a_worker_that_is_given_up_is_dead_and_others_are_replaced_for_the_tasks_before_its_own() {
    let mut machine = replacing(Dispatch::RoundRobin);
    done(&mut machine, 1, 1);
    died(&mut machine, 1);
    at(&mut machine, 0, Event::GivenUp(WorkerId(1)));
    died(&mut machine, 0);
    assert_eq!(machine.next(true), vacant(0, Some(0)));
    at(&mut machine, 0, Event::Postponed { worker: WorkerId(0), until: Duration::from_millis(5) });
    assert_eq!(machine.next(true), Decision::Wait(Some(Duration::from_millis(5))));
    at(&mut machine, 4, Event::Time);
    assert_eq!(machine.next(true), Decision::Wait(Some(Duration::from_millis(5))));
    at(&mut machine, 5, Event::Time);
    assert_eq!(machine.next(true), vacant(0, Some(0)));
    replaced(&mut machine, 0);
    while machine.next(true) == Decision::Resend {
        machine.resent();
    }
    done(&mut machine, 0, 0);
    assert_eq!([machine.next(true), machine.next(true)], [batch(0, 0), batch(1, 1)]);
    // The tasks after the lost one need no process.
    died(&mut machine, 0);
    assert_eq!(machine.next(true), vacant(0, Some(2)));
    replaced(&mut machine, 0);
    machine.resent();
    done(&mut machine, 0, 2);
    died(&mut machine, 0);
    assert_eq!([machine.next(true), machine.next(true)], [batch(2, 0), dead(1, Some(3))]);
    for event in [Event::WorkerReplaced(WorkerId(1)), Event::GivenUp(WorkerId(1))] {
        assert!(matches!(machine.on_event(Duration::ZERO, event), Err(Error::Usage { .. })));
    }
}
