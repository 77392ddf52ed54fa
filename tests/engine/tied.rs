//! A tied result is opened before its worker is told to exit.

use rustloader::engine::{Ending, Step};
use rustloader::scheduler::Settings;
use rustloader::wire::{ResultKind, TaskKind};

use super::rig::Rig;

/// Returns a rig of workers with four tasks each, whose sampler yields nothing more.
fn rig(workers: usize) -> Rig {
    let mut rig = Rig::new(Settings::torch(workers, 4, true));
    rig.submits = false;
    rig
}

#[test]
fn the_worker_is_told_to_leave_after_its_last_tied_result_was_opened() {
    let mut rig = rig(2);
    for kind in [ResultKind::Tied, ResultKind::Plain, ResultKind::Tied] {
        rig.answer(0, kind);
    }
    rig.ports[0].answer(rig.take(0).task, ResultKind::Exhausted).unwrap();

    for task in [0, 4_u64] {
        // The step repeats, and no later result is read.
        let Step::Open { .. } = rig.step() else { panic!("no result to open") };
        let Step::Open { incoming, ready: None } = rig.step() else { panic!("no result to open") };
        assert_eq!(rig.engine.active(), [true, true]);
        let opened = rig.payload_of(&incoming);
        assert_eq!(opened, task.to_le_bytes());
        rig.engine.opened(opened).unwrap();
    }
    assert_eq!(rig.batch(), 0);
    assert_eq!(rig.engine.active(), [false, true]);
    assert_eq!(rig.take(0).kind, TaskKind::Leave);

    rig.answer(1, ResultKind::Plain);
    assert_eq!((rig.batch(), rig.batch()), (1, 2));
    assert!(rig.engine.opened(Vec::new()).is_err(), "there is no result to open");
}

/// Sends a tied result that is larger than a page.
fn send_large(rig: &Rig) {
    rig.send(0, rig.take(0).task, ResultKind::Tied, &[7; 100_000]);
}

#[test]
fn a_tied_result_that_nobody_opens_is_given_back() {
    let mut rig = rig(1);
    let before = rig.arena.usage().held;
    send_large(&rig);
    assert!(rig.arena.usage().held > before);
    let Step::Open { .. } = rig.step() else { panic!("no result to open") };
    rig.ports[0].leave();
    rig.kill(0);
    assert!(matches!(rig.engine.finish(), Ending::Pool(_)));
    assert_eq!(rig.arena.usage().held, before);
}

/// Opens the first result, and is interrupted as by a signal handler. The payload stands for the half-opened message.
fn half_open(rig: &mut Rig) {
    let Step::Open { incoming, ready: None } = rig.step() else { panic!("no result to open") };
    let payload = rig.payload_of(&incoming);
    rig.engine.delivery().open_interrupted(payload);
    rig.engine.interrupted();
}

#[test]
fn a_tied_result_whose_opening_was_cut_off_is_opened_again_from_what_is_left() {
    let mut rig = rig(1);
    rig.answer(0, ResultKind::Tied);
    half_open(&mut rig);
    let Step::Open { ready: Some(remainder), .. } = rig.step() else { panic!("the result is not opened again") };
    rig.engine.opened(remainder).unwrap();
    assert_eq!(rig.batch(), 0);
}

#[test]
fn what_is_left_of_a_tied_result_outlives_its_worker_and_its_message_is_given_back_once() {
    let mut rig = rig(1);
    let before = rig.arena.usage().held;
    send_large(&rig);
    half_open(&mut rig);
    assert_eq!(rig.arena.usage().held, before);
    rig.kill(0);
    let remainder = loop {
        match rig.step() {
            // Until the death is noticed, the engine asks to open the result.
            Step::Open { ready, .. } => {
                rig.engine.delivery().open_interrupted(ready.unwrap());
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            Step::Deliver { tag: 0, ready: Some(remainder), .. } => break remainder,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(remainder, [7; 100_000]);
    assert!(matches!(rig.step(), Step::Dead(death) if death.lost.is_some()));
    assert_eq!(rig.arena.usage().held, before);
}
