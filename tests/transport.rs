//! A worker's connection to the engine: the same rules in one arena, and over sockets between two.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rustloader::engine::completions::{Completions, Incoming, Message};
use rustloader::shm::alloc::Allocator;
use rustloader::shm::arena::{Arena, ArenaRing};
use rustloader::shm::block::CONSUMER;
use rustloader::shm::layout::WorkerState;
use rustloader::shm::ring::Producer;
use rustloader::sys::event::EventFd;
use rustloader::transport::counters::COUNTERS;
use rustloader::transport::frame::{Head, Kind, put_words};
use rustloader::transport::{Link, Remote};
use rustloader::wire::{Leaf, Load, ResultEntry, ResultKind, TaskEntry, TaskKind, Timings};
use rustloader::worker::port::{Keep, Port, Received};

/// Tasks that may be outstanding.
const OUTSTANDING: u32 = 8;
const LIMIT: Duration = Duration::from_secs(30);

/// What a way between engine and worker is made of.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// One arena that both use.
    Arena,
    /// Two arenas, and a pair of sockets of this machine.
    Pair,
    /// Two arenas, and TCP.
    Tcp,
}

const WAYS: [Way; 3] = [Way::Arena, Way::Pair, Way::Tcp];

fn sockets(way: Way) -> (OwnedFd, OwnedFd) {
    match way {
        Way::Tcp => {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            (one.into(), listener.accept().unwrap().0.into())
        }
        _ => UnixStream::pair().map(|(one, other)| (one.into(), other.into())).unwrap(),
    }
}

/// The engine's side of worker 0, without engine and scheduler.
struct Main {
    arena: Arc<Arena>,
    tasks: Producer<ArenaRing>,
    allocator: Allocator,
    completions: Completions,
    doorbell: Arc<EventFd>,
    link: Option<Arc<Link>>,
}

/// The worker's side.
struct Worker {
    port: Port,
    remote: Option<Arc<Remote>>,
    lost: Arc<AtomicBool>,
}

impl Main {
    fn over(arena: Arc<Arena>) -> Self {
        let allocator = Allocator::new(arena.clone(), arena.geometry().main_region());
        let (tasks, completions) = (Producer::new(arena.task_ring(0)), Completions::new(&arena));
        let doorbell = Arc::new(EventFd::new().unwrap());
        Self { arena, tasks, allocator, completions, doorbell, link: None }
    }

    /// With a link over one end of a connection.
    fn linked(socket: OwnedFd) -> Self {
        let mut main = Self::over(Arena::create_sized(1 << 30, 1, OUTSTANDING).unwrap());
        main.link = Some(Link::start(&main.arena, 0, socket, main.doorbell.clone()).unwrap());
        main
    }

    fn send(&mut self, task: u64, kind: TaskKind, payload: &[u8]) {
        let entry = TaskEntry::inline(task, kind, payload).unwrap_or_else(|| {
            let len = payload.len() as u64;
            let block = self.allocator.allocate(len, CONSUMER).unwrap();
            let memory = self.arena.block_memory(self.allocator.region(), block, len).unwrap();
            // SAFETY: the block has these bytes, and nothing else uses it.
            unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), memory.as_ptr(), payload.len()) };
            TaskEntry::in_block(task, kind, block, len)
        });
        self.tasks.push(&entry.to_words()).unwrap();
        self.wake();
    }

    fn wake(&self) {
        let sleeper = self.arena.sleeper_of(0);
        match &self.link {
            Some(link) => link.pump(),
            None if sleeper.must_ring() => _ = rustloader::sys::futex::wake(&sleeper.bell, 1).unwrap(),
            None => {}
        }
    }

    fn stop(&self) {
        self.arena.header().stop.0.store(1, Relaxed);
        match &self.link {
            Some(link) => link.wake(),
            None => {
                let sleeper = self.arena.sleeper_of(0);
                sleeper.ring_always();
                rustloader::sys::futex::wake(&sleeper.bell, 1).unwrap();
            }
        }
    }

    fn take(&mut self) -> Incoming {
        let start = Instant::now();
        loop {
            if let Some(incoming) = self.completions.pop(0).unwrap() {
                return incoming;
            }
            assert!(start.elapsed() < LIMIT, "no result: {:?}", self.reason());
            std::thread::yield_now();
        }
    }

    /// The payload and the leaves of a result.
    fn open(&self, incoming: &Incoming) -> (Vec<u8>, Vec<Vec<u8>>) {
        let mut message = Message::open(&self.arena, incoming, Vec::new()).unwrap();
        let (payload, leaves) = message.parts();
        let (payload, count) = (payload.to_vec(), leaves.len());
        let bytes = |at| {
            let lease = leaves.take(at).unwrap();
            // SAFETY: the lease keeps the bytes, and no process writes to them.
            unsafe { std::slice::from_raw_parts(lease.ptr(), lease.len()) }.to_vec()
        };
        (payload, (0..count).map(bytes).collect())
    }

    fn reason(&self) -> Option<String> {
        self.link.as_ref().and_then(|link| link.reason())
    }

    /// Waits for the end of the connection; why it ended.
    fn ended(&self) -> Option<String> {
        let link = self.link.as_ref().unwrap();
        wait_until(|| link.has_ended());
        assert!(self.completions_are_whole());
        link.reason()
    }

    /// Blocks of the worker's region that the consumer holds, and that no result names.
    fn completions_are_whole(&self) -> bool {
        let table = &self.arena.table(0)[..self.arena.block_count(0) as usize];
        let held = table.iter().filter(|block| block.state.load(Relaxed) & CONSUMER != 0).count();
        let mut named = 0;
        let mut completions = Completions::new(&self.arena);
        while let Some(incoming) = completions.pop(0).unwrap() {
            let message =
                incoming.entry.block.map(|_| Message::open(&self.arena, &incoming, Vec::new()).unwrap());
            named += message.map_or(0, |message| 1 + message.leaves.len());
        }
        held == named
    }
}

fn wait_until(done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LIMIT);
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn open(way: Way) -> (Main, Worker) {
    let lost = Arc::new(AtomicBool::new(false));
    if let Way::Arena = way {
        let main = Main::over(Arena::create_sized(1 << 30, 1, OUTSTANDING).unwrap());
        let doorbell = main.doorbell.as_fd().try_clone_to_owned().unwrap();
        let port = Port::open(main.arena.clone(), 0, doorbell).unwrap();
        return (main, Worker { port, remote: None, lost });
    }
    let (one, other) = sockets(way);
    (Main::linked(one), Worker::over(other))
}

impl Worker {
    fn over(socket: OwnedFd) -> Self {
        let lost = Arc::new(AtomicBool::new(false));
        let noted = lost.clone();
        let remote = Remote::start(socket, OUTSTANDING, move || noted.store(true, Relaxed), || {}).unwrap();
        let port = Port::over(remote.clone()).unwrap();
        remote.ready();
        Self { port, remote: Some(remote), lost }
    }

    fn next(&self) -> Option<(TaskEntry, Vec<u8>)> {
        let entry = loop {
            match self.port.receive().unwrap() {
                Received::Task(entry) => break entry,
                Received::Nothing => {}
                Received::Stop => return None,
            }
        };
        let payload = match entry.block {
            Some(_) => self.port.payload.lock().unwrap().clone(),
            None => entry.inline[..entry.len as usize].to_vec(),
        };
        Some((entry, payload))
    }

    /// Answers with the payload, and leaves of the lengths that its words name.
    fn answer(&self, task: u64, payload: &[u8], lens: &[usize]) {
        let leaf = |len: &usize| {
            let (block, memory) = self.port.allocate(*len as u64).unwrap();
            // SAFETY: the block has that many bytes, and is this worker's until it is sent.
            unsafe { std::ptr::write_bytes(memory, task as u8, *len) };
            (Leaf { block, len: *len as u64 }, Keep::No)
        };
        let leaves: Vec<_> = lens.iter().map(leaf).collect();
        let timings = Timings { fetch_us: task as u32, collate_us: 2, pack_us: 3 };
        self.port.send(task, ResultKind::Plain, &leaves, payload, timings).unwrap();
    }

    fn leave(self) {
        self.port.leave();
        if let Some(remote) = &self.remote {
            assert!(remote.finish(LIMIT));
        }
    }

    /// Answers tasks as `answer` does until it is asked to leave.
    fn run(self) -> JoinHandle<()> {
        std::thread::spawn(move || {
            while let Some((entry, payload)) = self.next() {
                match entry.kind {
                    TaskKind::Resume => self.port.answer(0, ResultKind::Resumed).unwrap(),
                    TaskKind::Leave => break,
                    _ => self.answer(entry.task, &payload, &lens_of(&payload)),
                }
            }
            self.leave();
        })
    }
}

/// The lengths of leaves that a payload asks for.
fn lens_of(payload: &[u8]) -> Vec<usize> {
    payload.as_chunks().0.iter().map(|len| u32::from_le_bytes(*len) as usize).collect()
}

fn asks(lens: &[u32]) -> Vec<u8> {
    lens.iter().flat_map(|len| len.to_le_bytes()).collect()
}

#[test]
fn batches_come_back_whole_and_in_order() {
    let shapes: [Vec<u32>; 6] = [
        vec![],
        vec![1],
        vec![40_000, 7, 3],
        vec![9_000_000],
        (0..300).map(|len| len * 60 + 1).collect(),
        vec![128 << 10, (128 << 10) + 1],
    ];
    for way in WAYS {
        let (mut main, worker) = open(way);
        let worker = worker.run();
        for round in 0..20_u64 {
            for (at, shape) in shapes.iter().enumerate() {
                main.send(6 * round + at as u64, TaskKind::Plain, &asks(shape));
            }
            for (at, shape) in shapes.iter().enumerate() {
                let incoming = main.take();
                let task = 6 * round + at as u64;
                assert_eq!(
                    (incoming.entry.task, incoming.entry.timings.fetch_us),
                    (task, task as u32),
                    "{way:?}"
                );
                let (payload, leaves) = main.open(&incoming);
                assert_eq!(payload, asks(shape));
                assert_eq!(leaves.len(), shape.len());
                for (leaf, len) in leaves.iter().zip(shape) {
                    assert!(
                        leaf.len() == *len as usize && leaf.iter().all(|byte| *byte == task as u8),
                        "{way:?}"
                    );
                }
                assert!(incoming.entry.load.bytes >= shape.iter().map(|len| u64::from(*len)).sum());
            }
        }
        main.stop();
        worker.join().unwrap();
        wait_until(|| main.arena.control(0).status.state() == WorkerState::Left as u32);
        if let Some(link) = &main.link {
            assert_eq!(main.ended(), None);
            assert!(link.received() > 20 * 9_000_000);
        }
    }
}

#[test]
fn each_kind_of_answer_arrives_where_it_belongs() {
    for way in WAYS {
        let (mut main, worker) = open(way);
        for (task, kind) in
            [(0, TaskKind::Plain), (1, TaskKind::Pickle), (2, TaskKind::Plain), (3, TaskKind::Plain)]
        {
            main.send(task, kind, &[7; 100]);
        }
        worker.port.send_snapshot(0, b"first", false).unwrap();
        let (entry, payload) = worker.next().unwrap();
        assert_eq!((entry.task, payload.len()), (0, 100));
        worker.port.send_snapshot(1, b"second", true).unwrap();
        worker.port.send(0, ResultKind::Pickle, &[], b"pickle", Timings::default()).unwrap();
        assert_eq!(worker.next().unwrap().0.kind, TaskKind::Pickle);
        worker.port.send(1, ResultKind::Error, &[], b"error", Timings::default()).unwrap();
        worker.next().unwrap();
        worker.port.answer(2, ResultKind::Exhausted).unwrap();
        let mut kinds = Vec::new();
        for _ in 0..5 {
            let incoming = main.take();
            kinds.push(incoming.entry.kind);
            if incoming.entry.block.is_some() {
                // Its checksum is checked.
                drop(Message::open(&main.arena, &incoming, Vec::new()).unwrap());
            }
        }
        use ResultKind::{Error, Exhausted, FailedSnapshot, Pickle, Snapshot};
        assert_eq!(kinds, [Snapshot, FailedSnapshot, Pickle, Error, Exhausted], "{way:?}");
        // Task 3 has no answer. The next epoch begins all the same.
        main.send(0, TaskKind::Resume, &rustloader::wire::epoch_payload(4, b"message"));
        main.send(4, TaskKind::Plain, b"");
        worker.next().unwrap();
        let (entry, payload) = worker.next().unwrap();
        assert_eq!((entry.kind, &payload[8..]), (TaskKind::Resume, &b"message"[..]));
        worker.port.answer(0, ResultKind::Resumed).unwrap();
        worker.answer(worker.next().unwrap().0.task, b"", &[]);
        assert_eq!(main.take().entry.kind, ResultKind::Resumed);
        assert_eq!(main.take().entry.task, 4);
        assert_eq!(main.reason(), None);
        main.stop();
        assert!(worker.next().is_none());
        worker.leave();
    }
}

#[test]
fn memory_that_is_released_is_used_again() {
    for way in WAYS {
        let (mut main, worker) = open(way);
        let worker = worker.run();
        for task in 0..300 {
            main.send(task, TaskKind::Plain, &asks(&[3 << 20]));
            let incoming = main.take();
            main.open(&incoming);
        }
        assert!(main.arena.usage().warm < 100 << 20, "{way:?}: {:?}", main.arena.usage());
        main.stop();
        worker.join().unwrap();
    }
}

/// A receiver that takes nothing holds the worker back, and loses nothing.
#[test]
fn a_consumer_that_keeps_all_memory_holds_the_link_back() {
    let (one, other) = sockets(Way::Tcp);
    let mut main = Main::over(Arena::create_sized(96 << 20, 1, OUTSTANDING).unwrap());
    main.link = Some(Link::start(&main.arena, 0, one, main.doorbell.clone()).unwrap());
    let worker = Worker::over(other).run();
    let room = main.arena.geometry().region_len;
    let each = (room / 3) as u32;
    for task in 0..6 {
        main.send(task, TaskKind::Plain, &asks(&[each]));
    }
    let mut kept = Vec::new();
    for task in 0..6 {
        let incoming = main.take();
        assert_eq!(incoming.entry.task, task);
        let mut message = Message::open(&main.arena, &incoming, Vec::new()).unwrap();
        kept.push(message.leaves.take(0).unwrap());
        if kept.len() == 2 {
            kept.clear();
        }
    }
    main.stop();
    worker.join().unwrap();
    assert_eq!(main.ended(), None);
}

/// The bytes of a result frame.
fn frame(task: u64, leaves: &[usize], payload: &[u8]) -> Vec<u8> {
    let count = leaves.len() as u32;
    let mut bytes = Head { kind: Kind::Result, count, len: payload.len() as u64 }.to_bytes().to_vec();
    let (timings, load) = (Timings::default(), Load::default());
    let kind = ResultKind::Plain;
    let entry = ResultEntry { task, kind, block: Some(0), len: 0, checksum: 0, timings, load };
    put_words(&mut bytes, &entry.to_words());
    put_words(&mut bytes, &[0; COUNTERS]);
    put_words(&mut bytes, &leaves.iter().map(|len| *len as u64).collect::<Vec<_>>());
    bytes.extend_from_slice(payload);
    leaves.iter().for_each(|len| bytes.resize(bytes.len() + len, 9));
    bytes
}

/// A main process with a raw connection in the place of a worker, and a task that it has sent.
fn raw() -> (Main, UnixStream) {
    let (one, other) = UnixStream::pair().unwrap();
    let mut main = Main::linked(one.into());
    main.send(5, TaskKind::Plain, b"index");
    let mut task = [0; 16 + 8 + 5];
    let mut other = other;
    other.read_exact(&mut task).unwrap();
    assert_eq!(&task[24..], b"index");
    (main, other)
}

#[test]
fn a_connection_that_is_cut_at_any_byte_is_an_end_and_leaves_no_block() {
    let whole = frame(5, &[20_000, 10], b"payload");
    let table = whole.len() - 20_010;
    let cuts = (0..table).chain([table + 1, table + 19_999, table + 20_000, whole.len() - 1]);
    for cut in cuts {
        let (main, mut other) = raw();
        other.write_all(&whole[..cut]).unwrap();
        drop(other);
        let reason = main.ended().unwrap();
        assert!(reason.contains(if cut == 0 { "closed" } else { "inside a frame" }), "{cut}: {reason}");
        assert_eq!(main.arena.bitmap()[0].load(Relaxed), 0);
    }
    let (mut main, mut other) = raw();
    other.write_all(&whole).unwrap();
    assert_eq!(main.take_leaves(), [vec![9; 20_000], vec![9; 10]]);
}

impl Main {
    fn take_leaves(&mut self) -> Vec<Vec<u8>> {
        let incoming = self.take();
        self.open(&incoming).1
    }
}

#[test]
fn a_slow_sender_is_waited_for() {
    let (mut main, mut other) = raw();
    for byte in frame(5, &[300], b"payload") {
        other.write_all(&[byte]).unwrap();
    }
    let incoming = main.take();
    assert_eq!(main.open(&incoming), (b"payload".to_vec(), vec![vec![9; 300]]));
}

#[test]
fn huge_and_wrong_lengths_end_the_connection_before_memory_is_taken() {
    let result = |count, len| Head { kind: Kind::Result, count, len }.to_bytes().to_vec();
    let huge_leaf = frame(5, &[], b"")[..].to_vec();
    let mut huge_leaf = [&result(1, 0), &huge_leaf[16..]].concat();
    huge_leaf.extend_from_slice(&(1_u64 << 40).to_le_bytes());
    let mut overflow = [&result(2, 0), &frame(5, &[], b"")[16..]].concat();
    put_words(&mut overflow, &[u64::MAX, u64::MAX]);
    let bad: [(&str, Vec<u8>); 8] = [
        ("a frame of kind", result(0, u64::MAX)),
        ("a frame of kind", result(u32::MAX, 0)),
        ("exceeds a region", huge_leaf),
        ("exceeds a region", overflow),
        ("a frame of kind", vec![0xff; 64]),
        ("a worker sends Task", Head { kind: Kind::Task, count: 1, len: 0 }.to_bytes().to_vec()),
        ("where Some((5, Plain)) is due", frame(6, &[], b"")),
        (
            "after the worker's last one",
            [Head::bare(Kind::Left), Head::bare(Kind::Ready)].map(Head::to_bytes).concat(),
        ),
    ];
    for (reason, bytes) in bad {
        let (main, mut other) = raw();
        other.write_all(&bytes).unwrap();
        let ended = main.ended().unwrap();
        assert!(ended.contains(reason), "{ended}");
        assert!(main.arena.usage().warm < 4 << 20);
    }
}

#[test]
fn an_answer_that_nothing_asked_for_ends_the_connection() {
    let (one, other) = UnixStream::pair().unwrap();
    let (main, mut other) = (Main::linked(one.into()), other);
    other.write_all(&frame(0, &[], b"")).unwrap();
    assert!(main.ended().unwrap().contains("where None is due"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn garbage_ends_the_connection_or_waits_and_never_crashes(
        bytes in proptest::collection::vec(any::<u8>(), 0..600),
        at in 0..400_usize,
    ) {
        let (main, mut other) = raw();
        let mut sent = frame(5, &[100, 3], b"payload");
        let at = at.min(sent.len());
        let end = (at + bytes.len()).min(sent.len());
        sent.splice(at..end, bytes);
        // It may end before all is sent.
        let _ = other.write_all(&sent);
        drop(other);
        main.ended();
    }

    #[test]
    fn garbage_from_the_main_process_makes_the_worker_leave(bytes in proptest::collection::vec(any::<u8>(), 1..200)) {
        let (one, other) = UnixStream::pair().unwrap();
        let worker = Worker::over(other.into());
        let mut one = one;
        let _ = one.write_all(&bytes);
        drop(one);
        while worker.next().is_some() {}
        wait_until(|| worker.lost.load(Relaxed));
    }
}

#[test]
fn a_worker_learns_of_the_end_of_the_main_process() {
    for way in [Way::Pair, Way::Tcp] {
        let (main, worker) = open(way);
        main.link.as_ref().unwrap().cut("the test ends it");
        assert_eq!(main.ended().as_deref(), Some("the test ends it"));
        assert!(worker.next().is_none());
        wait_until(|| worker.lost.load(Relaxed));
    }
}

#[test]
fn a_worker_that_leaves_with_results_sends_them_first() {
    let (mut main, worker) = open(Way::Tcp);
    for task in 0..8 {
        main.send(task, TaskKind::Plain, b"");
    }
    for task in 0..8 {
        assert_eq!(worker.next().unwrap().0.task, task);
        worker.answer(task, b"", &[1 << 20]);
    }
    worker.leave();
    for task in 0..8 {
        let incoming = main.take();
        assert_eq!(incoming.entry.task, task);
        assert_eq!(main.open(&incoming).1, [vec![task as u8; 1 << 20]]);
    }
    assert_eq!(main.ended(), None);
}

#[test]
fn a_kill_reaches_a_worker_that_makes_a_batch() {
    let (one, other) = sockets(Way::Tcp);
    let main = Main::linked(one);
    let (killed, end) = mpsc::channel();
    let remote = Remote::start(other, OUTSTANDING, || {}, move || killed.send(()).unwrap()).unwrap();
    main.link.as_ref().unwrap().kill();
    end.recv_timeout(LIMIT).unwrap();
    drop(remote);
}

#[test]
fn a_full_socket_does_not_hold_the_engine_back() {
    // The worker takes no tasks for now: the rest is sent when it does.
    let (one, mut other) = UnixStream::pair().unwrap();
    let mut main = Main::linked(one.into());
    let payload = vec![3; 4 << 20];
    for task in 0..OUTSTANDING as u64 {
        main.send(task, TaskKind::Plain, &payload);
    }
    let mut bytes = vec![0; 24 + payload.len()];
    for task in 0..OUTSTANDING as u64 {
        other.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes[16..24], task.to_le_bytes());
        assert_eq!(bytes[24..], payload);
    }
}

#[test]
fn the_page_shows_what_the_worker_is_at() {
    let (mut main, worker) = open(Way::Pair);
    let state = |main: &Main| main.arena.control(0).status.state();
    wait_until(|| state(&main) == WorkerState::Idle as u32);
    main.send(3, TaskKind::Plain, b"");
    assert_eq!(state(&main), WorkerState::Fetch as u32);
    worker.next().unwrap();
    worker.answer(3, b"", &[]);
    main.take();
    wait_until(|| state(&main) == WorkerState::Idle as u32);
}

#[test]
fn workers_of_a_shared_queue_get_what_they_have_room_for() {
    use rustloader::shm::layout::Needs;
    use rustloader::shm::queue::Submitter;
    let needs = Needs { workers: 2, outstanding: 8, shared_queue: true, snapshots: false };
    let arena = Arena::create_for(1 << 30, needs).unwrap();
    let doorbell = Arc::new(EventFd::new().unwrap());
    let (mut links, mut workers) = (Vec::new(), Vec::new());
    let mut queue = Submitter::new(arena.queue().unwrap());
    for task in 0..6 {
        let entry = TaskEntry::inline(task, TaskKind::Plain, b"").unwrap();
        assert_eq!(queue.push(&entry.to_words()).unwrap(), task);
    }
    for worker in 0..2 {
        let (one, other) = sockets(Way::Pair);
        workers.push(Worker::over(other));
        links.push(Link::start(&arena, worker, one, doorbell.clone()).unwrap());
        // The thread has taken what it may.
        wait_until(|| (0..2 * u64::from(worker) + 2).all(|task| queue.holder(task).is_some()));
    }
    let holders: Vec<_> = (0..6).map(|task| queue.holder(task)).collect();
    assert_eq!(holders, [Some(0), Some(0), Some(1), Some(1), None, None]);
    assert!(!links[0].has_credit());
    let (entry, _) = workers[1].next().unwrap();
    assert_eq!(entry.task, 2);
    workers[1].answer(2, b"", &[]);
    wait_until(|| queue.holder(4) == Some(1));
    assert_eq!(queue.holder(5), None);
}
