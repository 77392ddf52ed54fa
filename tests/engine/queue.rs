//! An engine with a shared queue: which worker holds which task, deaths, abandoned epochs.

use rustloader::engine::{Ending, Step};
use rustloader::error::Error;
use rustloader::scheduler::{Dispatch, Settings};
use rustloader::wire::{ResultKind, TaskKind};
use rustloader::worker::port::Received;

use super::rig::{Loader, Rig, engine};

fn settings() -> Settings {
    Settings { dispatch: Dispatch::SharedQueue, persistent: true, ..Settings::torch(3, 2, true) }
}

/// Returns a rig of three workers with six tasks, whose index batches do not fit in an entry.
fn rig() -> Rig {
    Rig::over(engine(settings()), 100)
}

fn answer(rig: &Rig, worker: usize, task: u64) {
    assert_eq!(rig.answer(worker, ResultKind::Plain), task);
}

/// Answers a task that the worker has taken, or not.
fn send(rig: &Rig, worker: usize, task: u64) {
    rig.send(worker, task, ResultKind::Plain, &task.to_le_bytes());
}

#[test]
fn a_slow_task_holds_up_its_worker_alone_and_comes_in_its_place() {
    let mut rig = rig();
    assert_eq!((rig.payloads(), rig.take(2).task), (6, 0));
    (1..6).for_each(|task| answer(&rig, 0, task));
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
    send(&rig, 2, 0);
    assert_eq!(rig.delivered(), (0, 2));
    assert_eq!(rig.engine.progress().undelivered.last(), Some(&(6, None)), "it waits in the queue");
    assert_eq!(rig.engine.oldest_task_of(1).map(|(task, _)| task.0), Some(6), "any worker may claim it");
    (1..6).for_each(|task| assert_eq!(rig.delivered(), (task, 0)));
}

#[test]
fn an_answer_of_a_worker_that_does_not_hold_the_task_is_damage() {
    // The task is held by another worker, waiting, already answered, or was never sent.
    for task in [0, 5, 2, 1000, u64::MAX] {
        let mut rig = rig();
        assert_eq!((rig.take(1).task, rig.take(2).task), (0, 1));
        answer(&rig, 0, 2);
        if task == 2 {
            assert!(matches!(rig.engine.step().unwrap(), Step::Wait(_)));
        }
        send(&rig, 0, task);
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
    let mut rig = rig();
    assert_eq!(rig.take(0).task, 0);
    // The result that it has published counts.
    answer(&rig, 1, 1);
    assert_eq!(rig.take(1).task, 2);
    rig.kill(1);
    while rig.engine.death().is_none() {
        assert!(matches!(rig.engine.step().unwrap(), Step::Wait(_)));
        rig.wait(None);
    }
    assert_eq!(rig.engine.death().map(|death| (death.worker.0, death.lost.map(|task| task.0))), Some((1, Some(2))));
    // Waiting tasks go to other workers.
    answer(&rig, 2, 3);
    send(&rig, 0, 0);
    assert_eq!((rig.delivered(), rig.delivered()), ((0, 0), (1, 1)));
    let Step::Dead(death) = rig.step() else { panic!("task 2 is lost") };
    let report = rig.engine.report(death);
    assert_eq!((report.worker, report.pid, report.index), (1, rig.processes[1].id() as i32, Some(&2)));
}

#[test]
fn without_a_living_worker_the_wait_ends() {
    for is_held in [false, true] {
        let mut rig = rig();
        if is_held {
            assert_eq!(rig.take(1).task, 0);
        }
        (0..3).for_each(|worker| rig.kill(worker));
        let Step::Dead(death) = rig.step() else { panic!("all are dead") };
        assert_eq!(rig.engine.report(death).index, is_held.then_some(&0));
        assert!(!is_held || death.worker.0 == 1);
    }
}

#[test]
fn tasks_of_an_abandoned_epoch_are_taken_back_unless_a_worker_holds_them() {
    let mut rig = rig();
    assert_eq!(rig.take(0).task, 0);
    answer(&rig, 1, 1);
    rig.engine.reset(&[]).unwrap();
    assert_eq!(rig.payloads(), 0, "the index batches of tasks 2 to 5 are released");
    for worker in [1, 2] {
        assert_eq!(rig.take(worker).kind, TaskKind::Resume);
        rig.ports[worker].answer(0, ResultKind::Resumed).unwrap();
        assert!(rig.ports[worker].take_up().unwrap().is_none(), "a task of the abandoned epoch");
    }
    assert!(matches!(rig.engine.step().unwrap(), Step::Wait(_)));
    assert!(rig.engine.resuming());
    // Worker 0 first answers its task, in vain.
    send(&rig, 0, 0);
    assert_eq!(rig.take(0).kind, TaskKind::Resume);
    rig.ports[0].answer(0, ResultKind::Resumed).unwrap();
    let step = rig.engine.step().unwrap();
    assert!(matches!(step, Step::Submit | Step::End) && !rig.engine.resuming(), "{step:?}");
    let warm = rig.arena.usage().held;
    rig.prime();
    (6..12).for_each(|task| answer(&rig, task as usize % 3, task));
    (6..12).for_each(|task| assert_eq!(rig.batch(), task));
    assert!(rig.arena.usage().held <= warm + (6 * 4096), "results of the abandoned epoch are released");
}

#[test]
fn the_end_releases_what_no_worker_has_taken() {
    let mut rig = rig();
    assert_eq!((rig.take(0).task, rig.payloads()), (0, 5));
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
}

#[test]
fn an_arena_without_a_queue_serves_no_engine_that_needs_one() {
    let torch = Settings::torch(3, 2, true);
    let refused = |arena: &Loader, settings| {
        assert!(matches!(Loader::over(arena.arena().clone(), settings), Err(Error::Usage { .. })));
    };
    refused(&engine(torch.clone()), settings());
    refused(&engine(settings()), torch.clone());
    assert!(Loader::new(settings(), false).unwrap().arena().queue_control().is_some());
    assert!(Loader::new(torch, false).unwrap().arena().queue_control().is_none());
}
