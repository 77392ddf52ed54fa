//! Whatever a broken worker writes to shared memory is reported as damage.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use rustloader::engine::Step;
use rustloader::engine::completions::{Completions, Incoming, Message};
use rustloader::error::Error;
use rustloader::scheduler::{Dispatch, Settings};
use rustloader::shm::arena::Arena;
use rustloader::sys::event::EventFd;
use rustloader::wire::{Leaf, ResultKind, TaskKind, Timings};
use rustloader::worker::port::{Keep, Port};

use super::rig::{Rig, engine, open};

/// Returns a result from the ring: a message with two leaves, which are in the same block if `twice`.
fn sent(kind: ResultKind, twice: bool) -> (Arc<Arena>, Incoming) {
    let arena = Arena::create_sized(1 << 30, 1, 4).unwrap();
    let doorbell = EventFd::new().unwrap().as_fd().try_clone_to_owned().unwrap();
    let port = Port::open(arena.clone(), 0, doorbell).unwrap();
    let first = port.allocate(20_000).unwrap().0;
    let second = if twice { first } else { port.allocate(20_000).unwrap().0 };
    let leaves = [first, second].map(|block| (Leaf { block, len: 20_000 }, Keep::No));
    port.send(0, kind, &leaves, b"payload", Timings::default()).unwrap();
    let (_, incoming) = Completions::new(&arena).next(&arena).unwrap().unwrap();
    (arena, incoming)
}

#[test]
fn a_pickle_that_has_changed_on_its_way_is_not_opened() {
    for kind in [ResultKind::Pickle, ResultKind::Tied, ResultKind::Error] {
        for damaged in [false, true] {
            let (arena, incoming) = sent(kind, false);
            let (block, len) = (incoming.entry.block.unwrap(), incoming.entry.len);
            let memory = arena.block_memory(0, block, len).unwrap().as_ptr();
            // SAFETY: this is the message's last byte, and nothing else reads it now.
            unsafe { *memory.add(len as usize - 1) ^= u8::from(damaged) };
            match Message::open(&arena, &incoming, Vec::new()) {
                Ok(message) => assert!(!damaged && message.payload() == b"payload"),
                Err(error) => assert!(damaged && matches!(error, Error::Corrupt { .. }), "{error}"),
            }
        }
    }
}

#[test]
fn a_block_that_two_leaves_name_is_leased_once() {
    let (arena, incoming) = sent(ResultKind::Plain, false);
    let mut leaves = Message::open(&arena, &incoming, Vec::new()).unwrap().leaves;
    let both = (leaves.take(0), leaves.take(1));
    assert!(both.0.is_ok() && both.1.is_ok());

    let (arena, incoming) = sent(ResultKind::Plain, true);
    let mut leaves = Message::open(&arena, &incoming, Vec::new()).unwrap().leaves;
    let _first = leaves.take(0).unwrap();
    assert!(matches!(leaves.take(1), Err(Error::Corrupt { .. })));
}

/// Returns the text of an error, which must report damage.
fn damage<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    error.to_string()
}

#[test]
fn a_head_of_the_shared_queue_that_hides_a_task_is_no_silent_wait() {
    for head in [1, 3, u64::MAX] {
        let mut engine = engine(Settings { dispatch: Dispatch::SharedQueue, ..Settings::torch(2, 2, true) });
        let ports = [open(&engine, 0), open(&engine, 1)];
        engine.arena().queue_control().unwrap().head.0.store(head, Relaxed);
        engine.submit(0, TaskKind::Plain, &[0; 8]).unwrap().unwrap();
        for port in &ports {
            assert!(damage(port.receive()).contains("has passed entry 0"));
        }
    }
}

/// Found by `tests/python/unit/test_damage.py`: this damage used to be reported as an internal error.
#[test]
fn a_worker_that_says_it_has_taken_less_than_it_has_is_broken() {
    let mut rig = Rig::new(Settings::torch(1, 4, true));
    for tag in 4..1000 {
        rig.answer(0, ResultKind::Plain);
        // Claims that no slot of the ring is free.
        let ring = &rig.arena.control(0).tasks;
        ring.head.0.store(ring.tail.0.load(Relaxed).wrapping_sub(rig.arena.geometry().ring_slots), Relaxed);
        loop {
            match rig.engine.step().unwrap() {
                Step::Submit => match rig.engine.submit(tag, TaskKind::Plain, &[0; 8]) {
                    Err(Error::Corrupt { .. }) => return,
                    other => drop(other.unwrap()),
                },
                Step::Deliver { .. } => break,
                other => panic!("{other:?}"),
            }
        }
    }
    panic!("the ring was never full");
}
