use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::children::Child;
use crate::config::{AHEAD, LARGE, RETURN_WAIT};
use crate::shm::arena::Arena;
use crate::shm::block::CONSUMER;
use crate::shm::layout::WorkerState;
use crate::shm::ring::{Consumer, Producer};
use crate::sync::{Ordering, lock};
use crate::sys;
use crate::transport::{Link, Remote};
use crate::wire::{self, Leaf, Load, ResultEntry, ResultKind, TaskEntry, TaskKind, Timings};

fn port(bytes: u64) -> Port {
    let arena = Arena::create_sized(bytes, 1, 8).unwrap();
    let doorbell = sys::event::EventFd::new().unwrap();
    let doorbell = doorbell.as_fd().try_clone_to_owned().unwrap();
    Port::open(arena, 0, doorbell).unwrap()
}

/// Fills the region. Returns its blocks.
fn fill(port: &Port) -> Vec<u32> {
    let mut held = Vec::new();
    for len in [1 << 20, 64 << 10, 4096] {
        while let Ok((block, _)) = port.allocate(len) {
            held.push(block);
        }
    }
    held
}

#[test]
fn an_error_can_be_sent_when_the_region_is_full() {
    let port = port(64 << 20);
    let held = fill(&port);
    assert!(port.allocate(1).is_err());
    port.send(0, ResultKind::Error, &[], b"no memory", Timings::default()).unwrap();
    // The reserve is used up, and refilled after a release.
    assert!(port.send(1, ResultKind::Error, &[], b"none", Timings::default()).is_err());
    held.into_iter().for_each(|block| port.release(block));
    port.send(2, ResultKind::Error, &[], b"some", Timings::default()).unwrap();
    assert!(lock(&port.reserve).is_some());
}

#[test]
fn a_snapshot_without_memory_is_omitted_but_the_first_and_an_error_are_reported() {
    let port = port(64 << 20);
    let mut held = fill(&port);
    let mut results = Consumer::new(port.arena.result_ring(0));
    let mut entry = || results.pop().unwrap().map(|words| ResultEntry::from_words(&words).unwrap());
    assert!(!port.send_snapshot(1, b"state", false).unwrap());
    assert_eq!(entry(), None);
    // The first snapshot and an error may use the reserve, if it has room. The main process waits for the first one in
    // any case.
    assert!(port.send_snapshot(0, b"state", false).unwrap());
    assert!(entry().unwrap().block.is_some());
    assert!(!port.send_snapshot(0, b"state", false).unwrap());
    let none = entry().unwrap();
    assert_eq!((none.kind, none.block, none.task), (ResultKind::Snapshot, None, 0));
    port.release(held.pop().unwrap());
    assert!(port.send_snapshot(3, b"error", true).unwrap());
    let error = entry().unwrap();
    assert_eq!((error.kind, error.block.is_some(), error.task), (ResultKind::FailedSnapshot, true, 3));
    // A large snapshot does not fit into the reserve.
    assert!(!port.send_snapshot(0, &[0; 1 << 20], false).unwrap());
    assert_eq!(entry().unwrap().block, None);
    held.into_iter().for_each(|block| port.release(block));
    assert!(port.send_snapshot(4, &[7; 500_000], false).unwrap());
    let snapshot = entry().unwrap();
    assert_eq!((snapshot.len, snapshot.load), (500_008, Load::default()));
    assert_eq!(snapshot.checksum, wire::checksum(&[7; 500_000]));
}

/// Puts a task into the ring, takes it from there, and runs `work` as its fetch. Returns the CPU time and the wall time
/// that were added to the measured fetches, in nanoseconds.
fn fetch(port: &Port, kind: TaskKind, work: impl FnOnce()) -> (u64, u64) {
    let entry = TaskEntry::inline(0, kind, &[]).unwrap();
    let tasks = &mut Producer::new(port.arena.task_ring(0));
    tasks.push(&entry.to_words()).unwrap();
    let totals = || crate::metrics::WorkerTotals::of(port.status(), (1, false), 0);
    let before = totals();
    assert!(port.take_up().unwrap().is_some());
    work();
    port.enter(WorkerState::Collate);
    let after = totals();
    // Time after the fetch does not count, nor does a second interval in the dataset.
    std::thread::sleep(Duration::from_millis(2));
    port.enter(WorkerState::Fetch);
    port.enter(WorkerState::Pack);
    assert_eq!(totals().fetch_measured_ns, after.fetch_measured_ns);
    let difference = (after.fetch_cpu_ns - before.fetch_cpu_ns, after.fetch_measured_ns - before.fetch_measured_ns);
    assert_eq!(totals().fetch_cpu_ns, after.fetch_cpu_ns);
    difference
}

#[test]
fn a_fetch_that_waits_takes_wall_time_and_one_that_computes_takes_cpu_time() {
    const LONG: Duration = Duration::from_millis(30);
    let port = port(64 << 20);
    let computes = || {
        let begin = sys::clock::process_cpu_ns();
        while sys::clock::process_cpu_ns() - begin < LONG.as_nanos() as u64 {}
    };
    let (cpu, wall) = fetch(&port, TaskKind::Pickle, computes);
    assert!(u128::from(cpu) >= LONG.as_nanos() && wall > 0, "{cpu} of {wall}");
    let (_, wall) = fetch(&port, TaskKind::Plain, || std::thread::sleep(LONG));
    assert!(u128::from(wall) >= LONG.as_nanos(), "{wall}");
    assert_eq!(fetch(&port, TaskKind::Resume, || ()), (0, 0), "a control message is not a fetch");
}

/// Returns a port with an idle warm block, and two more blocks: one that the consumer has received, and one that waits
/// for the consumer.
fn waiting(len: u64) -> (Port, u32, u32) {
    let port = port(1 << 30);
    let blocks = [0; 3].map(|_| port.allocate(len).unwrap().0);
    let leaves = blocks[1..].iter().map(|&block| (Leaf { block, len }, Keep::No));
    port.send(0, ResultKind::Plain, &leaves.collect::<Vec<_>>(), b"", Timings::default()).unwrap();
    port.release(blocks[0]);
    port.arena.mark_delivered(0, blocks[1]).unwrap();
    port.enter(WorkerState::Idle);
    (port, blocks[1], blocks[2])
}

fn set_idle(port: &Port, time: Duration) {
    let since = sys::clock::monotonic_ns() - time.as_nanos() as u64;
    port.status().since_ns.store(since, Ordering::Relaxed);
    port.status().task_since_ns.store(since, Ordering::Relaxed);
}

/// Returns true if the worker has been idle for [`AHEAD`], perhaps only because the test was stopped.
fn is_long_idle(port: &Port) -> bool {
    port.idle() >= AHEAD
}

#[test]
fn a_worker_that_is_ahead_of_the_loop_returns_its_idle_pages() {
    const LEN: u64 = 4 << 20;
    let (port, _, waits) = waiting(LEN);
    let warm = || lock(&port.allocator).warm_bytes();
    let all = warm();
    assert!(all >= 3 * LEN);
    set_idle(&port, AHEAD / 2);
    port.trim().unwrap();
    assert!(warm() == all || is_long_idle(&port), "a short time without a task is normal");
    set_idle(&port, AHEAD);
    port.trim().unwrap();
    assert_eq!(warm(), all - LEN);
    // Blocks that the consumer holds are untouched. Once no message waits for the loop, this worker is no longer ahead.
    port.arena.release(0, waits, CONSUMER);
    port.trim().unwrap();
    assert!(lock(&port.allocator).is_ahead(), "the block of the message itself waits");
    for (id, entry) in port.arena.table(0)[..port.arena.block_count(0) as usize].iter().enumerate() {
        if entry.state.load(Ordering::Relaxed) == CONSUMER {
            port.arena.release(0, id as u32, CONSUMER);
        }
    }
    let (block, _) = port.allocate(LEN).unwrap();
    port.release(block);
    let all = warm();
    set_idle(&port, AHEAD);
    port.trim().unwrap();
    assert_eq!(warm(), all);
}

#[test]
fn a_returned_block_wakes_an_idle_worker() {
    const LEN: u64 = 4 << 20;
    for (len, idle, state, is_woken) in [
        (LEN, AHEAD, WorkerState::Idle, true),
        (LEN / 8, AHEAD, WorkerState::Idle, false),
        (LEN, AHEAD / 2, WorkerState::Idle, false),
        (LEN, AHEAD, WorkerState::Fetch, false),
    ] {
        let (port, delivered, _) = waiting(len);
        port.enter(state);
        set_idle(&port, idle);
        let ticket = port.sleeper().announce();
        port.arena.release_delivered(0, delivered);
        let rung = port.sleeper().bell.load(Ordering::Relaxed) != ticket.0;
        assert!(rung == is_woken || idle < AHEAD && is_long_idle(&port), "{len} bytes, {idle:?}, {state:?}");
    }
}

#[test]
fn the_return_of_a_large_block_is_awaited_briefly() {
    const LEN: u64 = 4 << 20;
    let (port, delivered, waits) = waiting(LEN);
    let pauses = std::cell::Cell::new(0);
    let pause = |time| {
        std::thread::sleep(time);
        pauses.set(pauses.get() + 1);
    };
    // A wait that began at this time may have expired before its first pause, because the test was stopped.
    let may_have_expired = |begin| sys::clock::monotonic() - begin >= RETURN_WAIT * (LEN / LARGE) as u32;
    port.await_return(LEN, pause).unwrap();
    assert_eq!(pauses.get(), 0, "a block is idle");
    port.allocate(LEN).unwrap();
    let begin = sys::clock::monotonic();
    port.await_return(LEN, pause).unwrap();
    assert!(pauses.get() <= 16 && (pauses.get() > 0 || may_have_expired(begin)), "{}", pauses.get());
    pauses.set(0);
    port.await_return(LEN, pause).unwrap();
    assert_eq!(pauses.get(), 0, "the last wait expired");
    port.arena.release_delivered(0, delivered);
    port.await_return(LEN, pause).unwrap();
    assert_eq!(port.allocate(LEN).unwrap().0, delivered);
    port.arena.mark_delivered(0, waits).unwrap();
    let begin = sys::clock::monotonic();
    port.await_return(LEN, |_| {
        pauses.set(pauses.get() + 1);
        port.arena.release_delivered(0, waits);
    })
    .unwrap();
    if pauses.get() == 0 && may_have_expired(begin) {
        return;
    }
    assert_eq!(pauses.get(), 1, "a block was returned since");
    assert_eq!(port.allocate(LEN).unwrap().0, waits);
}

#[test]
fn a_trace_has_a_batch_before_the_main_process_can_receive_it() {
    let port = port(64 << 20);
    let mut ring = Consumer::new(port.arena.trace_ring(0));
    let mut recorded = || -> Vec<_> { std::iter::from_fn(|| ring.pop().unwrap()).map(|entry| entry[0]).collect() };
    let trace = |level| port.arena.header().trace.0.store(level, Ordering::Relaxed);
    let send = |task| {
        port.status().begin(task, TaskKind::Plain, sys::clock::monotonic_ns());
        port.enter(WorkerState::Publish);
        port.send(task, ResultKind::Plain, &[], b"batch", Timings::default()).unwrap();
    };
    trace(1);
    send(0);
    assert_eq!(recorded(), [WorkerState::Fetch as u64, WorkerState::Publish as u64]);
    port.enter(WorkerState::Idle);
    assert!(recorded().is_empty());
    // The batch was sent before the trace began.
    trace(0);
    send(1);
    trace(1);
    port.enter(WorkerState::Idle);
    assert!(recorded().is_empty());
    port.answer(2, ResultKind::Exhausted).unwrap();
    assert!(recorded().is_empty(), "an answer without a batch");
}

#[test]
fn a_batch_of_a_replay_restarts_the_time_of_the_task() {
    let port = port(64 << 20);
    let since = || port.status().task_since_ns.load(Ordering::Relaxed);
    assert_eq!(since(), 0);
    let before = sys::clock::monotonic_ns();
    port.progress(false);
    assert!((before..=sys::clock::monotonic_ns()).contains(&since()));
}

#[test]
fn a_task_begins_after_its_replay() {
    let port = port(64 << 20);
    let page = port.status();
    page.begin(0, TaskKind::Resume, 1);
    assert!(!page.has_begun(), "the message that begins an epoch");
    page.begin(0, TaskKind::Plain, 2);
    assert!(page.has_begun());
    port.progress(false);
    port.at_sample(3);
    assert!(!page.has_begun());
    // The worker leaves because of an exception from the dataset.
    port.enter(WorkerState::Left);
    assert!(!page.has_begun());
    port.enter(WorkerState::Fetch);
    port.progress(true);
    port.at_sample(3);
    assert!(page.has_begun());
    assert_eq!(page.place.load(Ordering::Relaxed), 4);
    port.enter(WorkerState::Idle);
    assert!(!page.has_begun());
    page.reset();
    assert!(!page.has_begun());
    port.enter(WorkerState::Left);
    assert!(!page.has_begun(), "the start failed");
}

#[test]
fn a_child_takes_no_lock_that_another_thread_may_hold() {
    let port = port(64 << 20);
    let (block, memory) = port.allocate(40_000).unwrap();
    let held = lock(&port.allocator);
    let child = Child::fork(|| {
        port.release(block);
        port.adoptable(memory as usize, 40_000).is_none()
    });
    assert_eq!(child.wait(), 0);
    drop(held);
}

#[test]
fn a_sent_block_is_not_adopted_again() {
    let port = port(64 << 20);
    let (block, memory) = port.allocate(40_000).unwrap();
    assert_eq!(port.adoptable(memory as usize, 40_000), Some((block, 0)));
    assert_eq!(port.adoptable(memory as usize, 4_000), None);
    let leaf = Leaf { block, len: 40_000 };
    port.send(0, ResultKind::Plain, &[(leaf, Keep::Yes)], b"", Timings::default()).unwrap();
    assert_eq!(port.adoptable(memory as usize, 40_000), None);
    // The consumer has released the block, and may have written to it.
    port.arena.release(0, block, CONSUMER);
    assert_eq!(port.adoptable(memory as usize, 40_000), None);
    port.release(block);
    let (reused, memory) = port.allocate(40_000).unwrap();
    assert_eq!(reused, block);
    assert!(port.adoptable(memory as usize, 40_000).is_some());
}

/// Returns the arena of a main process, its link, and the port at the other end.
fn connected() -> (Arc<Arena>, Arc<Link>, Port) {
    let (one, other) = UnixStream::pair().unwrap();
    let arena = Arena::create_sized(64 << 20, 1, 8).unwrap();
    let bell = Arc::new(sys::event::EventFd::new().unwrap());
    let link = Link::start(&arena, 0, one.into(), bell).unwrap();
    let port = Port::over(Remote::start(other.into(), 8, 1 << 29, || {}, || {}).unwrap()).unwrap();
    (arena, link, port)
}

fn wait_until(done: impl Fn() -> bool) {
    let end = sys::clock::monotonic() + Duration::from_secs(30);
    while !done() {
        assert!(sys::clock::monotonic() < end);
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_main_process_on_another_machine_learns_the_current_sample_of_a_task() {
    let (arena, link, port) = connected();
    let page = &arena.control(0).status;
    let shown = || (page.task.load(Ordering::Relaxed), page.place.load(Ordering::Relaxed));
    // No task is outstanding yet.
    port.at_sample(7);
    port.remote().unwrap().ready();
    let mut tasks = Producer::new(arena.task_ring(0));
    for task in [5, 6] {
        tasks.push(&TaskEntry::inline(task, TaskKind::Plain, b"").unwrap().to_words()).unwrap();
    }
    link.pump();
    let next = || wait_until(|| matches!(port.receive().unwrap(), Received::Task(_)));
    next();
    for place in [0, 63] {
        port.at_sample(place);
        wait_until(|| shown() == (5, place + 1));
    }
    // Collation belongs to no sample.
    port.enter(WorkerState::Collate);
    wait_until(|| shown() == (5, 0));
    next();
    port.at_sample(2);
    wait_until(|| shown() == (6, 3));
    // The answer to the previous task may come later.
    port.send(5, ResultKind::Plain, &[], b"", Timings::default()).unwrap();
    wait_until(|| arena.bitmap()[0].load(Ordering::Relaxed) != 0);
    assert_eq!(shown(), (6, 3));
    assert_eq!(page.state(), WorkerState::Fetch as u32);
    assert_eq!(page.tasks_done.load(Ordering::Relaxed), 1, "the counters include the answer that they come with");
    port.leave();
    assert!(port.remote().unwrap().finish(Duration::from_secs(30)));
    wait_until(|| link.has_ended());
    assert_eq!(link.reason(), None);
}

#[test]
fn a_main_process_on_another_machine_learns_of_the_batches_of_a_replay() {
    let (arena, link, port) = connected();
    let page = &arena.control(0).status;
    let since = || page.task_since_ns.load(Ordering::Relaxed);
    port.remote().unwrap().ready();
    let mut tasks = Producer::new(arena.task_ring(0));
    tasks.push(&TaskEntry::inline(0, TaskKind::Plain, b"").unwrap().to_words()).unwrap();
    link.pump();
    wait_until(|| matches!(port.receive().unwrap(), Received::Task(_)));
    wait_until(|| page.has_begun());
    port.at_sample(63);
    wait_until(|| page.place.load(Ordering::Relaxed) == 64);
    for _ in 0..2 {
        let before = since();
        port.progress(false);
        wait_until(|| since() > before);
        assert!(!page.has_begun());
        port.notified_ns.store(0, Ordering::Relaxed);
    }
    port.progress(true);
    wait_until(|| page.has_begun());
}
