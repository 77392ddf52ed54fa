//! Workers that die and are replaced: which tasks each of their processes receives, and which of their results count.

use std::process::Command;
use std::time::Duration;

use rustloader::config::DEATH_CHECK;
use rustloader::engine::Step;
use rustloader::engine::completions::discard;
use rustloader::error::Error;
use rustloader::scheduler::{Dispatch, Settings};
use rustloader::wire::ResultKind;

use super::rig::{Rig, engine, open};

/// Bytes of an index batch: more than fit in an entry.
const INDEX: usize = 100;

fn rig(workers: usize, dispatch: Dispatch) -> Rig {
    let torch = Settings::torch(workers, 3, true);
    let engine = engine(Settings { dispatch, persistent: true, restarts: true, ..torch });
    Rig::over(engine, INDEX)
}

fn answer(rig: &Rig, worker: usize, task: u64, kind: ResultKind) {
    assert_eq!(rig.answer(worker, kind), task);
}

/// Resends all tasks that are due. They come before any other step.
fn resend_all(rig: &mut Rig) -> Vec<u64> {
    let mut sent = Vec::new();
    while rig.engine.unsent().is_some() {
        assert!(matches!(rig.engine.step().unwrap(), Step::Resend));
        sent.push(rig.resend());
    }
    sent
}

/// Returns the vacant worker, its task, the count of its answers, and its generation.
fn vacancy(rig: &mut Rig) -> (u32, Option<u64>, u64, u32) {
    match rig.step() {
        Step::Vacant(death) => {
            let report = rig.engine.report(death);
            (report.worker, report.task, report.answers, report.generation)
        }
        other => panic!("{other:?}"),
    }
}

fn open_tied(rig: &mut Rig) {
    let Step::Open { incoming, ready: None } = rig.step() else { panic!("no result to open") };
    let payload = rig.payload_of(&incoming);
    rig.engine.opened(payload).unwrap();
}

fn assert_refused<T: std::fmt::Debug>(result: Result<T, Error>) {
    assert!(matches!(result, Err(Error::Usage { .. })), "{result:?}");
}

#[test]
fn a_worker_may_die_again_and_again_and_no_task_is_lost_or_doubled() {
    let mut rig = rig(2, Dispatch::RoundRobin);
    let mut expected = 0;
    for generation in 0..20 {
        while expected < 2 * u64::from(generation) {
            assert_eq!(rig.batch(), expected);
            expected += 1;
        }
        // Each process of worker 1 answers once, and then dies with two tasks in its ring.
        answer(&rig, 1, 2 * u64::from(generation) + 1, ResultKind::Plain);
        answer(&rig, 0, 2 * u64::from(generation), ResultKind::Plain);
        rig.kill(1);
        let first = 2 * u64::from(generation) + 3;
        loop {
            match rig.step() {
                Step::Deliver { tag, incoming, .. } => {
                    assert_eq!((tag, rig.payload_of(&incoming)), (expected, tag.to_le_bytes().to_vec()));
                    expected += 1;
                }
                Step::Vacant(death) => {
                    let pid = rig.processes[1].id() as i32;
                    let report = rig.engine.report(death);
                    assert_eq!((report.worker, report.generation, report.pid), (1, generation, pid));
                    assert_eq!((report.task, report.index), (Some(first), Some(&first)));
                    assert_eq!(report.answers, u64::from(generation) + 1);
                    break;
                }
                other => panic!("{other:?}"),
            }
        }
        // The index batches of the tasks in the dead worker's ring are released.
        let payloads = rig.payloads();
        rig.engine.vacate(1).unwrap();
        assert!(rig.payloads() < payloads && rig.engine.handle().process(1).is_none());
        rig.replace(1);
        assert!(rig.ports[1].take_up().unwrap().is_none(), "a task of the first process");
        assert_eq!(resend_all(&mut rig)[0], first);
    }
    assert_eq!(rig.engine.handle().status(1).unwrap().unwrap().tasks_done, 0);
    assert!(!rig.engine.handle().all_left());
}

#[test]
fn a_vacancy_is_reported_until_it_is_settled_and_again_after_the_time_to_which_it_was_postponed() {
    let mut rig = rig(2, Dispatch::RoundRobin);
    assert_refused(rig.engine.vacate(1));
    rig.kill(1);
    assert_refused(rig.engine.vacate(1));
    assert_refused(rig.engine.postpone(1, Duration::ZERO));
    assert_refused(rig.engine.give_up(1));
    assert_eq!((vacancy(&mut rig).0, vacancy(&mut rig).0), (1, 1));
    let before = rustloader::sys::clock::monotonic();
    rig.engine.postpone(1, Duration::from_millis(300)).unwrap();
    // Meanwhile the other worker continues.
    answer(&rig, 0, 0, ResultKind::Plain);
    assert_eq!((rig.batch(), vacancy(&mut rig).0), (0, 1));
    let waited = rustloader::sys::clock::monotonic() - before;
    assert!(waited >= Duration::from_millis(300) && waited < Duration::from_secs(20), "{waited:?}");
    rig.engine.give_up(1).unwrap();
    assert_refused(rig.engine.vacate(1));
    for _ in 0..2 {
        assert!(matches!(rig.step(), Step::Dead(death) if death.lost.map(|task| task.0) == Some(1)));
    }
}

#[test]
fn what_a_worker_of_the_shared_queue_held_goes_to_its_next_process_whenever_that_dies_too() {
    let mut rig = rig(2, Dispatch::SharedQueue);
    assert_eq!(rig.take(0).task, 0);
    rig.kill(0);
    assert_eq!(vacancy(&mut rig), (0, Some(0), 0, 0));
    // The other worker continues with the waiting tasks.
    answer(&rig, 1, 1, ResultKind::Plain);
    rig.replace(0);
    // The new process claims a task before task 0 is resent, and dies with both.
    assert_eq!(rig.take(0).task, 2);
    rig.kill(0);
    assert_eq!(vacancy(&mut rig), (0, Some(2), 0, 1), "the task that it was working on");
    rig.replace(0);
    assert!(matches!(rig.engine.step().unwrap(), Step::Resend));
    rig.kill(0);
    // One task is resent but not claimed, the other is not resent.
    assert_eq!(rig.resend(), 0);
    assert_eq!(vacancy(&mut rig), (0, Some(0), 0, 2));
    rig.replace(0);
    assert_eq!(resend_all(&mut rig), [0, 2]);
    for (worker, task) in [(0, 0), (0, 2), (1, 3), (1, 4), (1, 5)] {
        answer(&rig, worker, task, ResultKind::Plain);
    }
    (0..6).for_each(|tag| assert_eq!(rig.batch(), tag));
}

#[test]
fn a_tied_result_that_was_not_opened_is_made_again_with_all_that_followed_it() {
    for is_noticed in [false, true] {
        let mut rig = rig(1, Dispatch::RoundRobin);
        answer(&rig, 0, 0, ResultKind::Tied);
        open_tied(&mut rig);
        assert_eq!(rig.batch(), 0);
        answer(&rig, 0, 1, ResultKind::Tied);
        answer(&rig, 0, 2, ResultKind::Plain);
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
        assert_eq!(vacancy(&mut rig), (0, Some(2), 1, 0), "the task that it had taken last");
        assert_eq!(rig.engine.handle().snapshot(0, 9).unwrap(), None);
        rig.replace(0);
        assert_eq!(resend_all(&mut rig), [1, 2, 3]);
        answer(&rig, 0, 1, ResultKind::Tied);
        open_tied(&mut rig);
        answer(&rig, 0, 2, ResultKind::Plain);
        assert_eq!([rig.batch(), rig.batch()], [1, 2]);
    }
}

#[test]
fn a_worker_of_the_shared_queue_may_have_held_several_tasks() {
    let mut rig = rig(2, Dispatch::SharedQueue);
    (0..2).for_each(|task| answer(&rig, 0, task, ResultKind::Tied));
    assert_eq!(rig.take(0).task, 2);
    rig.kill(0);
    std::thread::sleep(DEATH_CHECK);
    assert_eq!(vacancy(&mut rig), (0, Some(2), 0, 0), "the task that it was working on");
    rig.replace(0);
    assert_eq!(resend_all(&mut rig), [0, 1, 2]);
    (0..3).for_each(|task| answer(&rig, 0, task, ResultKind::Plain));
    assert_eq!([rig.batch(), rig.batch(), rig.batch()], [0, 1, 2]);
}

#[test]
fn a_tied_result_that_cannot_be_opened_because_its_worker_ends_is_no_error() {
    let mut rig = rig(1, Dispatch::RoundRobin);
    assert!(rig.engine.resend(rustloader::wire::TaskKind::Plain, b"").is_err(), "no task is to be sent again");
    answer(&rig, 0, 0, ResultKind::Tied);
    assert!(!rig.engine.lost_tied().unwrap(), "there is no tied result yet");
    let Step::Open { incoming, .. } = rig.step() else { panic!("no result to open") };
    discard(&rig.arena, &incoming);
    // Its message is already released, as after a failed attempt.
    rig.engine.delivery().open_interrupted(Vec::new());
    assert!(!rig.engine.lost_tied().unwrap(), "the worker lives");
    rig.kill(0);
    assert!(rig.engine.lost_tied().unwrap());
    assert_eq!(vacancy(&mut rig), (0, Some(0), 0, 0));
    rig.replace(0);
    assert!(matches!(rig.engine.step().unwrap(), Step::Resend));
}

#[test]
fn a_worker_that_dies_before_it_has_resumed_begins_the_epoch_with_its_next_process() {
    for dispatch in [Dispatch::RoundRobin, Dispatch::SharedQueue] {
        let mut rig = rig(2, dispatch);
        let first = if dispatch == Dispatch::SharedQueue { 0 } else { 1 };
        answer(&rig, 1, first, ResultKind::Plain);
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
            answer(&rig, 0, 0, ResultKind::Plain);
        }
        let Step::Vacant(death) = rig.step() else { panic!("worker 1 is not vacant") };
        let report = rig.engine.report(death);
        assert_eq!((report.worker, report.index, report.task, report.answers), (1, None, None, 0));
        assert!(report.first_task >= 6);
        rig.kill(0);
        std::thread::sleep(DEATH_CHECK);
        assert_eq!(vacancy(&mut rig), (1, None, 0, 0));
        rig.engine.postpone(1, Duration::from_secs(1000)).unwrap();
        assert_eq!(vacancy(&mut rig), (0, None, 0, 0));
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
    let mut rig = rig(1, Dispatch::RoundRobin);
    let mut settled = None;
    rig.kill(0);
    for round in 0..1_000 {
        assert!(matches!(rig.step(), Step::Vacant(_)), "round {round}");
        rig.engine.vacate(0).unwrap();
        let mut process = Command::new("true").spawn().unwrap();
        rig.ports[0] = open(&rig.engine, 0);
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
