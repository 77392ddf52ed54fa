//! An engine with remote workers: their end, and their share of a queue. `tests/python/remote` has whole epochs.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustloader::engine::Ending;
use rustloader::scheduler::{Dispatch, Settings};
use rustloader::shm::layout::WorkerState;
use rustloader::transport::frame::{Head, Kind};
use rustloader::wire::TaskKind;

use super::rig::{LIMIT, engine, until};

#[test]
fn a_worker_that_does_not_leave_is_killed_by_the_end_of_its_connection() {
    let mut engine = engine(Settings::torch(1, 2, true));
    let (one, _held) = UnixStream::pair().unwrap();
    engine.attached(0, one.into(), 1).unwrap();
    assert_eq!(engine.handle().alive(), 1);
    engine.handle().close();
    assert!(!engine.handle().wait_gone(Duration::from_millis(50)).unwrap());
    engine.handle().signal_all(libc::SIGKILL);
    until(|| engine.handle().wait_gone(LIMIT).unwrap());
    let process = engine.handle().process(0).unwrap();
    let reason = process.link.as_ref().unwrap().reason().unwrap();
    assert_eq!(reason, "the main process has killed the worker");
    assert!(matches!(engine.finish(), Ending::Retire(_)));
}

#[test]
fn each_worker_gets_a_task_of_a_shared_queue_before_one_gets_two() {
    let mut engine = engine(Settings { dispatch: Dispatch::SharedQueue, ..Settings::torch(4, 2, true) });
    let mut workers = Vec::new();
    for worker in 0..4 {
        let (one, mut other) = UnixStream::pair().unwrap();
        engine.attached(worker, one.into(), 1).unwrap();
        // The link's thread looks into the queue before it reads this.
        other.write_all(&Head::bare(Kind::Ready).to_bytes()).unwrap();
        let state = || engine.handle().status(worker).unwrap().unwrap().names().0;
        until(|| state() == WorkerState::Idle.name());
        workers.push(other);
    }
    for round in 0..2 {
        for worker in 0..4 {
            engine.submit(0, TaskKind::Plain, b"").unwrap().unwrap();
            let link = engine.handle().process(worker).unwrap().link.clone().unwrap();
            assert_eq!(link.outstanding(), [Some(1), None][round]);
        }
    }
    engine.handle().close();
    drop(workers);
    until(|| engine.handle().wait_gone(LIMIT).unwrap());
}
