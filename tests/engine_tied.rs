//! A tied result is opened before its worker is told to exit.

use std::process::Command;
use std::sync::Arc;

use rustloader::engine::completions::Message;
use rustloader::engine::{Ending, Engine, Step};
use rustloader::scheduler::Settings;
use rustloader::shm::arena::Arena;
use rustloader::wire::{ResultKind, TaskEntry, TaskKind, Timings};
use rustloader::worker::port::{Port, Received};

type TestEngine = Engine<u64, Vec<u8>>;

fn start(workers: u32) -> (Arc<Arena>, TestEngine, Vec<Port>) {
    let arena = Arena::create_sized(1 << 30, workers, 16).unwrap();
    let settings = Settings::torch(workers as usize, 4, true);
    let mut engine = TestEngine::over(arena.clone(), settings).unwrap();
    let port = |worker| {
        let doorbell = engine.handle().doorbell.as_fd().try_clone_to_owned().unwrap();
        Port::open(arena.clone(), worker, doorbell).unwrap()
    };
    let ports = (0..workers).map(port).collect();
    for tag in 0..u64::from(4 * workers) {
        engine.submit(tag, TaskKind::Plain, &[0; 8]).unwrap().unwrap();
    }
    (arena, engine, ports)
}

fn task(port: &Port) -> TaskEntry {
    match port.receive().unwrap() {
        Received::Task(entry) => entry,
        other => panic!("{other:?}"),
    }
}

fn answer(port: &Port, kind: ResultKind, payload: &[u8]) {
    port.send(task(port).task, kind, &[], payload, Timings::default()).unwrap();
}

/// Returns the next step that is not a submission. Submits nothing.
fn step(engine: &mut TestEngine) -> Step<u64, Vec<u8>> {
    loop {
        match engine.step().unwrap() {
            Step::Submit => {}
            other => return other,
        }
    }
}

#[test]
fn the_worker_is_told_to_leave_after_its_last_tied_result_was_opened() {
    let (arena, mut engine, ports) = start(2);
    answer(&ports[0], ResultKind::Tied, b"first");
    answer(&ports[0], ResultKind::Plain, b"second");
    answer(&ports[0], ResultKind::Tied, b"third");
    ports[0].answer(task(&ports[0]).task, ResultKind::Exhausted).unwrap();

    for payload in [&b"first"[..], b"third"] {
        // The step repeats, and no later result is read.
        let Step::Open { .. } = step(&mut engine) else { panic!("no result to open") };
        let Step::Open { incoming, ready: None } = step(&mut engine) else { panic!("no result to open") };
        assert_eq!(engine.active(), [true, true]);
        let message = Message::open(&arena, &incoming, Vec::new()).unwrap();
        assert_eq!(message.payload(), payload);
        engine.opened(message.payload().to_vec()).unwrap();
    }
    assert!(matches!(step(&mut engine), Step::Deliver { tag: 0, ready: Some(opened), .. } if opened == b"first"));
    assert_eq!(engine.active(), [false, true]);
    assert_eq!(task(&ports[0]).kind, TaskKind::Leave);

    answer(&ports[1], ResultKind::Plain, b"of the other");
    assert!(matches!(step(&mut engine), Step::Deliver { tag: 1, .. }));
    let Step::Deliver { tag: 2, incoming, .. } = step(&mut engine) else { panic!("no second result") };
    drop(Message::open(&arena, &incoming, Vec::new()).unwrap());
    assert!(engine.opened(Vec::new()).is_err(), "there is no result to open");
}

#[test]
fn a_tied_result_that_nobody_opens_is_given_back() {
    let (arena, mut engine, ports) = start(1);
    let mut process = Command::new("sleep").arg("1000").spawn().unwrap();
    engine.started(0, process.id() as i32).unwrap();
    let before = arena.usage().held;
    answer(&ports[0], ResultKind::Tied, &[7; 100_000]);
    assert!(arena.usage().held > before);
    let Step::Open { .. } = step(&mut engine) else { panic!("no result to open") };
    ports[0].leave();
    process.kill().unwrap();
    process.wait().unwrap();
    assert!(matches!(engine.finish(), Ending::Pool(_)));
    assert_eq!(arena.usage().held, before);
}

/// Opens the first result, and is interrupted as by a signal handler. The payload stands for the half-opened message.
fn half_open(arena: &Arc<Arena>, engine: &mut TestEngine) {
    let Step::Open { incoming, ready: None } = step(engine) else { panic!("no result to open") };
    let message = Message::open(arena, &incoming, Vec::new()).unwrap();
    engine.delivery().open_interrupted(message.payload().to_vec());
    engine.interrupted();
}

#[test]
fn a_tied_result_whose_opening_was_cut_off_is_opened_again_from_what_is_left() {
    let (arena, mut engine, ports) = start(1);
    answer(&ports[0], ResultKind::Tied, b"first");
    half_open(&arena, &mut engine);
    let Step::Open { ready: Some(remainder), .. } = step(&mut engine) else { panic!("the result is not opened again") };
    assert_eq!(remainder, b"first");
    engine.opened(remainder).unwrap();
    assert!(matches!(step(&mut engine), Step::Deliver { tag: 0, ready: Some(opened), .. } if opened == b"first"));
}

#[test]
fn what_is_left_of_a_tied_result_outlives_its_worker_and_its_message_is_given_back_once() {
    let (arena, mut engine, ports) = start(1);
    let mut process = Command::new("sleep").arg("1000").spawn().unwrap();
    engine.started(0, process.id() as i32).unwrap();
    let before = arena.usage().held;
    answer(&ports[0], ResultKind::Tied, &[7; 100_000]);
    half_open(&arena, &mut engine);
    assert_eq!(arena.usage().held, before);
    process.kill().unwrap();
    process.wait().unwrap();
    let remainder = loop {
        match step(&mut engine) {
            // Until the death is noticed, the engine asks to open the result.
            Step::Open { ready, .. } => {
                engine.delivery().open_interrupted(ready.unwrap());
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            Step::Deliver { tag: 0, ready: Some(remainder), .. } => break remainder,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(remainder, [7; 100_000]);
    assert!(matches!(step(&mut engine), Step::Dead(death) if death.lost.is_some()));
    assert_eq!(arena.usage().held, before);
}
