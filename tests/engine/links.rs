//! An engine with remote workers: order, deaths, their end, and their share of a queue.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use rustloader::engine::completions::Message;
use rustloader::engine::{Ending, Step};
use rustloader::scheduler::{Dispatch, Settings};
use rustloader::shm::layout::WorkerState;
use rustloader::transport::Remote;
use rustloader::transport::frame::{Head, Kind};
use rustloader::wire::{ResultKind, TaskKind, Timings};
use rustloader::worker::port::{Port, Received};

use super::rig::{LIMIT, Loader, engine, until};

/// Runs a worker in this thread. It closes its connection without notice before its answer number `dies`.
fn serve(socket: UnixStream, dies: u64, answered: Arc<AtomicU64>) {
    let lost = Arc::new(AtomicBool::new(false));
    let lost_flag = lost.clone();
    let cut = socket.try_clone().unwrap();
    let remote = Remote::start(socket.into(), 8, 1 << 28, move || lost_flag.store(true, Relaxed), || {}).unwrap();
    let port = Port::over(remote.clone()).unwrap();
    remote.ready();
    let mut answers = 0;
    loop {
        let entry = match port.receive().unwrap() {
            Received::Task(entry) => entry,
            Received::Nothing => continue,
            Received::Stop => break,
        };
        if answers == dies {
            cut.shutdown(std::net::Shutdown::Both).unwrap();
            return;
        }
        answers += 1;
        answered.fetch_add(1, Relaxed);
        let payload = &entry.inline[..entry.len as usize];
        port.send(entry.task, ResultKind::Plain, &[], payload, Timings::default()).unwrap();
    }
    port.leave();
    assert!(lost.load(Relaxed) || remote.finish(Duration::from_secs(30)));
}

fn attach(engine: &mut Loader, worker: u32, dies: u64, answered: &Arc<AtomicU64>) {
    let (one, other) = UnixStream::pair().unwrap();
    let answered = answered.clone();
    std::thread::spawn(move || serve(other, dies, answered));
    // A remote process may have the same pid as any local process.
    engine.attached(worker, one.into(), std::process::id() as i32).unwrap();
}

/// Runs an epoch of `batches` with workers that die before each `every`-th answer. Returns the number of deaths.
fn epoch(dispatch: Dispatch, batches: u64, every: u64) -> u64 {
    let mut engine = engine(Settings { dispatch, restarts: true, ..Settings::torch(2, 3, true) });
    let (mut next, mut received, mut deaths) = (0, 0, 0);
    let answered = Arc::new(AtomicU64::new(0));
    for worker in 0..2 {
        attach(&mut engine, worker, every, &answered);
    }
    let send = |engine: &mut Loader, next: &mut u64| {
        if *next == batches {
            return engine.sampler_ended().unwrap();
        }
        engine.submit(*next, TaskKind::Plain, &next.to_le_bytes()).unwrap().unwrap();
        *next += 1;
    };
    let mut asked = 0;
    while engine.primes(asked) {
        send(&mut engine, &mut next);
        asked += 1;
    }
    loop {
        match engine.step().unwrap() {
            Step::Submit => send(&mut engine, &mut next),
            Step::Resend => {
                let index = *engine.unsent().unwrap();
                engine.resend(TaskKind::Plain, &index.to_le_bytes()).unwrap();
            }
            Step::Wait(deadline) => {
                engine.wait(deadline).unwrap();
                engine.after_wait().unwrap();
            }
            Step::Deliver { incoming, .. } => {
                let message = Message::open(engine.arena(), &incoming, Vec::new()).unwrap();
                assert_eq!(message.payload(), next_bytes(&mut received));
            }
            Step::Vacant(death) => {
                deaths += 1;
                let worker = death.worker.0;
                assert_eq!(engine.report(death).status, None);
                engine.vacate(worker).unwrap();
                attach(&mut engine, worker, every, &answered);
            }
            Step::End => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(received, batches);
    assert!(answered.load(Relaxed) >= batches);
    engine.handle().close();
    until(|| engine.handle().wait_gone(LIMIT).unwrap());
    let pooled = matches!(engine.finish(), Ending::Pool(_));
    assert_eq!(pooled, deaths == 0, "an arena is reused if all workers have left");
    deaths
}

/// Returns the expected payload of the next batch, and counts the batch.
fn next_bytes(received: &mut u64) -> [u8; 8] {
    *received += 1;
    (*received - 1).to_le_bytes()
}

#[test]
fn each_batch_is_delivered_once_whatever_connections_end() {
    for dispatch in [Settings::torch(2, 3, true).dispatch, Dispatch::SharedQueue] {
        for every in [1, 7] {
            assert!(epoch(dispatch, 100, every) >= 10, "{dispatch:?} {every}");
        }
    }
}

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
