//! What `observe` reads from the arena of an engine in this process, and from files that are not arenas.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustloader::engine::{Engine, Step};
use rustloader::error::Error;
use rustloader::metrics::Count;
use rustloader::observe::{Observed, observe};
use rustloader::scheduler::{Dispatch, Settings};
use rustloader::shm::arena::Arena;
use rustloader::shm::layout::{Header, MainState, Needs, VERSION, WorkerState};
use rustloader::wire::{ResultKind, TaskKind, Timings};
use rustloader::worker::port::{Port, Received};
use rustloader::{sys, tree};

const WORKERS: u32 = 2;

fn arena() -> Arc<Arena> {
    Arena::create_sized(64 << 20, WORKERS, 4).unwrap()
}

fn engine(arena: &Arc<Arena>) -> Engine<u32> {
    let settings = Settings { persistent: true, ..Settings::torch(WORKERS as usize, 2, true) };
    Engine::over(arena.clone(), settings).unwrap()
}

fn port(arena: &Arc<Arena>, worker: u32) -> Port {
    let doorbell = sys::event::EventFd::new().unwrap();
    Port::open(arena.inherited(), worker, doorbell.as_fd().try_clone_to_owned().unwrap()).unwrap()
}

/// Returns an encoded index batch of four ints.
fn indices() -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = tree::Writer::new(&mut bytes);
    writer.open_ints(tree::Group::List, 4);
    (10..14).for_each(|index| writer.next_int(index));
    bytes
}

/// Reopens the arena's file read-only.
fn read_only(arena: &Arena) -> OwnedFd {
    let path = format!("/proc/self/fd/{}", arena.raw_fd());
    File::open(path).unwrap().into()
}

fn view(arena: &Arena) -> Option<Observed> {
    observe(read_only(arena).as_fd()).unwrap()
}

#[test]
fn an_arena_shows_its_iterator_from_the_begin_to_the_end() {
    let arena = arena();
    assert!(view(&arena).is_none(), "no iterator uses it yet");
    let mut engine = engine(&arena);
    let observed = view(&arena).unwrap();
    assert_eq!((observed.pid, observed.state), (std::process::id(), MainState::Starting));
    assert_eq!(observed.name, "", "it has no name yet");
    engine.show_name("train");
    assert_eq!(view(&arena).unwrap().name, "train");
    assert_eq!(
        (observed.prefetch_factor, observed.in_order, observed.persistent, observed.pinning),
        (2, true, true, false)
    );
    assert_eq!(observed.workers.len(), WORKERS as usize);
    let idle = &observed.workers[1];
    assert_eq!((idle.state, idle.totals.pid, idle.batch, &idle.index), (WorkerState::Starting, 0, None, &None));
    engine.finish();
    assert!(view(&arena).is_none(), "it has ended");
    engine.next_begins();
    engine.next_ends();
    assert!(view(&arena).is_none(), "a late call does not write to an arena that another iterator may use");
}

#[test]
fn workers_that_share_a_queue_show_what_waits_in_it() {
    let needs = Needs { workers: WORKERS, outstanding: 4, shared_queue: true, snapshots: false };
    let arena = Arena::create_for(64 << 20, needs).unwrap();
    let settings = Settings { dispatch: Dispatch::SharedQueue, ..Settings::torch(WORKERS as usize, 2, true) };
    let mut engine = Engine::<u32>::over(arena.clone(), settings).unwrap();
    let queued = || view(&arena).unwrap().workers.iter().map(|worker| worker.queued).collect::<Vec<_>>();
    assert_eq!(queued(), [0, 0]);
    (0..4).for_each(|tag| _ = engine.submit(tag, TaskKind::Plain, &indices()).unwrap().unwrap());
    assert_eq!(queued(), [4, 4]);
    let worker = port(&arena, 1);
    assert!(matches!(worker.receive().unwrap(), Received::Task(_)));
    let observed = view(&arena).unwrap().workers.remove(1);
    assert_eq!((observed.state, observed.batch, observed.queued), (WorkerState::Fetch, Some(0), 3));
    assert_eq!(observed.index.as_deref(), Some("[10, 11, 12, 13]"));
    worker.send(0, ResultKind::Plain, &[], b"batch", Timings::default()).unwrap();
    assert_eq!(view(&arena).unwrap().workers[1].ready, 1);
    // A valid header has 0 or 1 here.
    arena.header().shared_queue.store(2, Ordering::Relaxed);
    assert!(matches!(observe(read_only(&arena).as_fd()), Err(Error::Corrupt { .. })));
}

#[test]
fn snapshots_are_no_batches_that_are_ready() {
    let arena = arena();
    let mut engine = engine(&arena);
    let (other, worker) = (port(&arena, 0), port(&arena, 1));
    // Several times around the ring, so that the entries wrap around its end.
    for tag in 0..20 {
        engine.submit(tag, TaskKind::Plain, &indices()).unwrap().unwrap();
        engine.submit(tag, TaskKind::Plain, &indices()).unwrap().unwrap();
        let Received::Task(entry) = worker.receive().unwrap() else { panic!("no task") };
        let ready = || view(&arena).unwrap().workers[1].ready;
        assert_eq!(ready(), 0);
        assert!(worker.send_snapshot(1, b"state", tag % 2 == 0).unwrap());
        assert_eq!(ready(), 0);
        worker.send(entry.task, ResultKind::Plain, &[], b"batch", Timings::default()).unwrap();
        assert_eq!(ready(), 1);
        assert!(worker.send_snapshot(2, b"state", false).unwrap());
        assert_eq!(ready(), 1);
        let Received::Task(entry) = other.receive().unwrap() else { panic!("no task") };
        other.send(entry.task, ResultKind::Plain, &[], b"batch", Timings::default()).unwrap();
        for _ in 0..2 {
            while !matches!(engine.step().unwrap(), Step::Deliver { .. }) {}
        }
    }
}

#[test]
fn a_worker_shows_its_batch_and_its_index() {
    let arena = arena();
    let mut engine = engine(&arena);
    engine.epoch_begins();
    let worker = port(&arena, 0);
    engine.submit(7, TaskKind::Plain, &indices()).unwrap();
    let observed = view(&arena).unwrap().workers.remove(0);
    assert_eq!((observed.queued, observed.totals.start_cpu_ns), (1, 0), "it is starting");
    assert!(matches!(worker.receive().unwrap(), Received::Task(_)));
    std::thread::sleep(Duration::from_millis(2));
    let observed = view(&arena).unwrap().workers.remove(0);
    assert_eq!((observed.state, observed.batch, observed.queued), (WorkerState::Fetch, Some(0), 0));
    assert_eq!(observed.index.as_deref(), Some("[10, 11, 12, 13]"));
    assert!(observed.at_batch_ns >= 2_000_000 && observed.in_state_ns >= 2_000_000);
    assert!(observed.totals.spent_ns[WorkerState::Fetch as usize] >= 2_000_000, "the current state counts");
    let started = observed.totals.start_cpu_ns;
    assert!(started > 0, "its start is complete");
    assert_eq!(observed.totals.fetch_measured_ns, 0, "the fetch has not ended");
    worker.enter(WorkerState::Pack);
    let measured = view(&arena).unwrap().workers.remove(0).totals;
    assert!(measured.fetch_measured_ns >= 2_000_000 && measured.fetch_cpu_ns > 0);
    worker.send(0, ResultKind::Plain, &[], b"batch", Timings::default()).unwrap();
    let observed = view(&arena).unwrap();
    assert_eq!((observed.workers[0].ready, observed.workers[0].totals.tasks), (1, 1));
    assert!(observed.workers[0].warm > 0 && observed.usage.warm >= observed.workers[0].warm);
    // The next index batch is a pickle, which only the worker may open.
    engine.submit(8, TaskKind::Plain, b"").unwrap();
    engine.submit(9, TaskKind::Pickle, &[0; 100]).unwrap();
    assert!(matches!(worker.receive().unwrap(), Received::Task(_)));
    let observed = view(&arena).unwrap().workers.remove(0);
    assert_eq!((observed.batch, observed.index), (Some(2), None));
    worker.enter(WorkerState::Starting);
    worker.enter(WorkerState::Idle);
    assert_eq!(
        view(&arena).unwrap().workers[0].totals.start_cpu_ns,
        started,
        "the start of a later epoch does not count"
    );
    arena.reset_control();
    let status = &arena.control(0).status;
    assert_eq!(status.start_cpu_ns.load(Ordering::Relaxed) + status.start_queued_ns.load(Ordering::Relaxed), 0);
}

#[test]
fn main_shows_its_state_and_only_the_waits_of_a_next_count_as_waiting() {
    let arena = arena();
    let mut engine = engine(&arena);
    let pause = || std::thread::sleep(Duration::from_millis(5));
    let time = |count: Count| view(&arena).unwrap().counts[count as usize];
    let state = || view(&arena).unwrap().state;
    engine.epoch_begins();
    engine.next_begins();
    // Stands for a slow sampler.
    pause();
    assert_eq!(state(), MainState::Next);
    engine.wait(Some(Duration::ZERO)).unwrap();
    pause();
    let observed = view(&arena).unwrap();
    let (in_next, first) = (observed.counts[Count::Next as usize], observed.counts[Count::First as usize]);
    assert_eq!(observed.state, MainState::First);
    assert!(first >= 5_000_000 && in_next >= first + 5_000_000, "{first} of {in_next}");
    engine.after_wait().unwrap();
    let shown = time(Count::First);
    assert!(shown >= first, "a wait that has ended still counts");
    pause();
    assert_eq!((state(), time(Count::First)), (MainState::Next, shown), "between two waits it does not grow");
    engine.wait(Some(Duration::ZERO)).unwrap();
    pause();
    assert!(time(Count::First) >= shown + 5_000_000, "the next wait is added");
    engine.after_wait().unwrap();
    engine.handle().meter.add(Count::Batches, 3);
    engine.next_ends();
    let observed = view(&arena).unwrap();
    assert_eq!((observed.state, observed.epoch_batches), (MainState::Step, 3));
    assert_eq!(observed.counts[Count::Epochs as usize], 1);
    assert_eq!(observed.counts[Count::First as usize], engine.handle().meter.get(Count::First));
    assert!(observed.counts[Count::First as usize] + 10_000_000 <= observed.counts[Count::Next as usize]);
    pause();
    assert!(time(Count::Step) >= 5_000_000);
    engine.next_begins();
    assert!(time(Count::Step) >= 5_000_000, "its time is kept when it ends");
    engine.wait(Some(Duration::ZERO)).unwrap();
    assert_eq!(state(), MainState::Waiting);
    engine.after_wait().unwrap();
    engine.epoch_ends();
    engine.next_ends();
    assert_eq!(state(), MainState::Between);
    engine.handle().close();
    assert!(view(&arena).unwrap().stopping);
}

#[test]
fn observing_writes_nothing_and_allocates_no_page() {
    let arena = arena();
    let _engine = engine(&arena);
    let blocks = || std::fs::metadata(format!("/proc/self/fd/{}", arena.raw_fd())).unwrap().blocks();
    let (before, file) = (blocks(), File::from(read_only(&arena)));
    for _ in 0..10 {
        assert!(observe(file.as_fd()).unwrap().is_some());
    }
    assert_eq!(blocks(), before);
    let refused = file.write_at(b"x", 0).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EBADF));
}

/// Creates a file of `len` bytes that begins with `bytes`.
fn file_of(bytes: &[u8], len: u64) -> OwnedFd {
    let fd = sys::memfd::create("rustloader-test", len).unwrap();
    let file = File::from(fd);
    file.write_all_at(bytes, 0).unwrap();
    file.into()
}

/// Reads the fixed part of an arena's file.
fn head_of(arena: &Arena) -> Vec<u8> {
    let len = arena.geometry().table(0) as usize;
    sys::proc_fd::read(arena.fd(), 0, len)
}

#[test]
fn another_version_is_named() {
    let arena = arena();
    let _engine = engine(&arena);
    let mut head = head_of(&arena);
    let at = std::mem::offset_of!(Header, version);
    head[at..at + 4].copy_from_slice(&77u32.to_le_bytes());
    let error = observe(file_of(&head, arena.geometry().total).as_fd()).unwrap_err();
    assert_eq!(error, Error::Layout { found: 77, expected: VERSION });
    let text = error.to_string();
    assert!(text.contains("layout version 77") && text.contains(&format!("reads version {VERSION}")), "{text}");
}

#[test]
fn what_is_no_whole_arena_is_an_error() {
    let damaged = |file: OwnedFd| assert!(matches!(observe(file.as_fd()), Err(Error::Corrupt { .. })), "{file:?}");
    let arena = arena();
    let _engine = engine(&arena);
    let head = head_of(&arena);
    for len in [0, 1, 64, size_of::<Header>(), 4096, head.len() - 1, head.len()] {
        damaged(file_of(&head[..len], len as u64));
    }
    damaged(file_of(b"short", 100));
    damaged(file_of(&[7; 4096], 1 << 20));
    // A file of zeroes is an arena that is still being created.
    assert!(observe(file_of(b"", 1 << 20).as_fd()).unwrap().is_none());
    let (reader, _writer) = std::io::pipe().unwrap();
    let closed = reader.as_raw_fd() + 1000;
    damaged(reader.into());
    // SAFETY: no descriptor has this number, and the test is that it is rejected.
    assert!(observe(unsafe { BorrowedFd::borrow_raw(closed) }).is_err());
}

#[test]
fn garbage_behind_a_sound_head_is_shown_or_refused_but_leads_nowhere() {
    let arena = arena();
    let _engine = engine(&arena);
    let valid = head_of(&arena);
    let mut state = 3u64;
    let mut random = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        state >> 33
    };
    for round in 0..300 {
        let mut head = valid.clone();
        // Some rounds damage as many words as there are, others only 20.
        let damaged = if round % 3 == 0 { head.len() / 8 } else { 20 };
        for _ in 0..damaged {
            let at = 24 + random() as usize % (head.len() - 32);
            let word = if random() % 2 == 0 { u64::MAX } else { random() << 16 };
            head[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        if round % 5 == 0 {
            // The sizes are damaged, too.
            let at = 8 + random() as usize % 16;
            head[at] ^= random() as u8;
        }
        match observe(file_of(&head, arena.geometry().total).as_fd()) {
            Ok(Some(observed)) => assert_eq!(observed.workers.len(), WORKERS as usize),
            Ok(None) | Err(Error::Corrupt { .. } | Error::Layout { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }
}
