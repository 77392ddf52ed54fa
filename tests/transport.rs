//! A worker's connection to the engine: the same rules hold in one shared arena, and over sockets between two arenas.
//!
//! `transport/main_end.rs` and `transport/worker_end.rs` test each end against a peer that misbehaves. No transport
//! here uses heap memory, because an arena returns pages by punching holes in its memfd. Only rings are tested on the
//! heap, in `loom_ring.rs`.

use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustloader::engine::completions::{Completions, Incoming, Message};
use rustloader::error::Error;
use rustloader::shm::alloc::Allocator;
use rustloader::shm::arena::{Arena, ArenaRing};
use rustloader::shm::block::CONSUMER;
use rustloader::shm::layout::WorkerState;
use rustloader::shm::ring::Producer;
use rustloader::sys::event::EventFd;
use rustloader::transport::{Link, Remote};
use rustloader::wire::{Leaf, ResultKind, TaskEntry, TaskKind, Timings};
use rustloader::worker::port::{Keep, Port, Received};

#[path = "transport/main_end.rs"]
mod main_end;
#[path = "transport/worker_end.rs"]
mod worker_end;

/// Tasks that may be outstanding.
const OUTSTANDING: u32 = 8;
/// Bytes of an arena.
const ARENA: u64 = 1 << 30;
const LIMIT: Duration = Duration::from_secs(30);

/// How engine and worker are connected.
#[derive(Clone, Copy, Debug)]
enum Transport {
    /// By one arena that both use.
    Arena,
    /// By two arenas and a pair of Unix sockets.
    Pair,
    /// By two arenas and TCP.
    Tcp,
}

const TRANSPORTS: [Transport; 3] = [Transport::Arena, Transport::Pair, Transport::Tcp];
const SOCKETS: [Transport; 2] = [Transport::Pair, Transport::Tcp];

fn sockets(transport: Transport) -> (OwnedFd, OwnedFd) {
    match transport {
        Transport::Tcp => {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            (one.into(), listener.accept().unwrap().0.into())
        }
        _ => UnixStream::pair().map(|(one, other)| (one.into(), other.into())).unwrap(),
    }
}

/// Returns two connected sockets. The test uses the second directly. It may be a TCP socket in a `UnixStream`, since
/// both kinds are read, written and shut down by the same calls.
fn raw_sockets(transport: Transport) -> (OwnedFd, UnixStream) {
    let (one, other) = sockets(transport);
    let other = UnixStream::from(other);
    other.set_read_timeout(Some(LIMIT)).unwrap();
    (one, other)
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

    /// Creates an arena of this many bytes, and a link over one end of a connection.
    fn linked(socket: OwnedFd, bytes: u64) -> Self {
        let mut main = Self::over(Arena::create_sized(bytes, 1, OUTSTANDING).unwrap());
        main.link = Some(Link::start(&main.arena, 0, socket, main.doorbell.clone()).unwrap());
        main
    }

    fn send(&mut self, task: u64, kind: TaskKind, payload: &[u8]) {
        let entry = TaskEntry::inline(task, kind, payload).unwrap_or_else(|| {
            let len = payload.len() as u64;
            let block = self.allocator.allocate(len, CONSUMER).unwrap();
            let memory = self.arena.block_memory(self.allocator.region(), block, len).unwrap();
            // SAFETY: the block has this many bytes, and nothing else uses it.
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

    /// Returns the payload and the leaves of a result.
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

    /// Waits for the end of the connection. Returns its reason.
    fn ended(&self) -> Option<String> {
        let link = self.link.as_ref().unwrap();
        wait_until(|| link.has_ended());
        assert!(self.blocks_match_results());
        link.reason()
    }

    /// Whether the main process holds as many blocks of the worker's region as its results name.
    fn blocks_match_results(&self) -> bool {
        let table = &self.arena.table(0)[..self.arena.block_count(0) as usize];
        let held = table.iter().filter(|block| block.state.load(Relaxed) & CONSUMER != 0).count();
        let mut named = 0;
        let mut completions = Completions::new(&self.arena);
        while let Some(incoming) = completions.pop(0).unwrap() {
            let message = incoming.entry.block.map(|_| Message::open(&self.arena, &incoming, Vec::new()).unwrap());
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

fn open(transport: Transport) -> (Main, Worker) {
    open_sized(transport, ARENA)
}

/// Connects a worker to a main process with an arena of this many bytes.
fn open_sized(transport: Transport, bytes: u64) -> (Main, Worker) {
    let lost = Arc::new(AtomicBool::new(false));
    if let Transport::Arena = transport {
        let main = Main::over(Arena::create_sized(bytes, 1, OUTSTANDING).unwrap());
        let doorbell = main.doorbell.as_fd().try_clone_to_owned().unwrap();
        let port = Port::open(main.arena.clone(), 0, doorbell).unwrap();
        return (main, Worker { port, remote: None, lost });
    }
    let (one, other) = sockets(transport);
    let main = Main::linked(one, bytes);
    let worker = Worker::over(other, main.arena.geometry().region_len);
    (main, worker)
}

impl Worker {
    /// Starts a worker's end. `room` is the size of the main process's regions in bytes.
    fn over(socket: OwnedFd, room: u64) -> Self {
        let lost = Arc::new(AtomicBool::new(false));
        let lost_flag = lost.clone();
        let remote = Remote::start(socket, OUTSTANDING, room, move || lost_flag.store(true, Relaxed), || {}).unwrap();
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

    /// Answers with the payload, and with leaves of these lengths. Waits for memory.
    fn answer(&self, task: u64, payload: &[u8], lens: &[usize]) {
        let leaf = |len: &usize| {
            let start = Instant::now();
            let (block, memory) = loop {
                match self.port.allocate(*len as u64) {
                    Ok(allocated) => break allocated,
                    Err(error) => assert!(start.elapsed() < LIMIT, "{error}"),
                }
                std::thread::sleep(Duration::from_millis(1));
            };
            // SAFETY: the block has this many bytes, and belongs to this worker until it is sent.
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

    /// Answers tasks, in a new thread, until it is told to leave.
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

impl Drop for Worker {
    fn drop(&mut self) {
        // Ends its threads.
        if let Some(remote) = &self.remote {
            remote.finish(Duration::ZERO);
        }
    }
}

/// Returns the lengths of the leaves that a payload requests.
fn lens_of(payload: &[u8]) -> Vec<usize> {
    payload.as_chunks().0.iter().map(|len| u32::from_le_bytes(*len) as usize).collect()
}

fn request(lens: &[u32]) -> Vec<u8> {
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
    for transport in TRANSPORTS {
        let (mut main, worker) = open(transport);
        let worker = worker.run();
        for round in 0..20_u64 {
            for (at, shape) in shapes.iter().enumerate() {
                main.send(6 * round + at as u64, TaskKind::Plain, &request(shape));
            }
            for (at, shape) in shapes.iter().enumerate() {
                let incoming = main.take();
                let task = 6 * round + at as u64;
                assert_eq!(
                    (incoming.entry.task, incoming.entry.timings.fetch_us),
                    (task, task as u32),
                    "{transport:?}"
                );
                let (payload, leaves) = main.open(&incoming);
                assert_eq!(payload, request(shape));
                assert_eq!(leaves.len(), shape.len());
                for (leaf, len) in leaves.iter().zip(shape) {
                    assert!(
                        leaf.len() == *len as usize && leaf.iter().all(|byte| *byte == task as u8),
                        "{transport:?}"
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
    for transport in TRANSPORTS {
        let (mut main, worker) = open(transport);
        for (task, kind) in [(0, TaskKind::Plain), (1, TaskKind::Pickle), (2, TaskKind::Plain), (3, TaskKind::Plain)] {
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
                // This verifies the checksum.
                drop(Message::open(&main.arena, &incoming, Vec::new()).unwrap());
            }
        }
        use ResultKind::{Exhausted, FailedSnapshot, Pickle, Snapshot};
        assert_eq!(kinds, [Snapshot, FailedSnapshot, Pickle, ResultKind::Error, Exhausted], "{transport:?}");
        // The next epoch begins although task 3 is not answered.
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
fn released_memory_is_reused() {
    for transport in TRANSPORTS {
        let (mut main, worker) = open(transport);
        let worker = worker.run();
        for task in 0..300 {
            main.send(task, TaskKind::Plain, &request(&[3 << 20]));
            let incoming = main.take();
            main.open(&incoming);
        }
        assert!(main.arena.usage().warm < 100 << 20, "{transport:?}: {:?}", main.arena.usage());
        main.stop();
        worker.join().unwrap();
    }
}

#[test]
fn a_consumer_that_keeps_all_memory_holds_the_worker_back_and_loses_nothing() {
    for transport in TRANSPORTS {
        let (mut main, worker) = open_sized(transport, 96 << 20);
        let worker = worker.run();
        let room = main.arena.geometry().region_len;
        for task in 0..6 {
            main.send(task, TaskKind::Plain, &request(&[(room / 3) as u32]));
        }
        let mut kept = Vec::new();
        for task in 0..6 {
            let incoming = main.take();
            assert_eq!(incoming.entry.task, task);
            let mut message = Message::open(&main.arena, &incoming, Vec::new()).unwrap();
            kept.push(message.leaves.take(0).unwrap());
            if kept.len() == 2 {
                // Nothing more fits.
                std::thread::sleep(Duration::from_millis(50));
                assert!(main.completions.pop(0).unwrap().is_none(), "{transport:?}");
                kept.clear();
            }
        }
        main.stop();
        worker.join().unwrap();
        if main.link.is_some() {
            assert_eq!(main.ended(), None);
        }
    }
}

#[test]
fn a_batch_that_is_larger_than_the_main_process_has_room_for_is_refused_and_the_next_one_comes() {
    for transport in TRANSPORTS {
        let (mut main, worker) = open_sized(transport, 96 << 20);
        let room = main.arena.geometry().region_len;
        main.send(0, TaskKind::Plain, b"");
        worker.next().unwrap();
        let refused = worker.port.allocate(room + 1).unwrap_err();
        assert!(matches!(refused, Error::RegionFull { size, .. } if size <= room), "{transport:?}: {refused}");
        worker.port.send(0, ResultKind::Error, &[], b"", Timings::default()).unwrap();
        assert_eq!(main.take().entry.kind, ResultKind::Error);
        // The largest block that it can allocate fits in the main process.
        main.send(1, TaskKind::Plain, b"");
        worker.next().unwrap();
        let fits = |len: &u64| worker.port.allocate(*len).map(|(block, _)| worker.port.release(block)).is_ok();
        let largest = (0..room).rev().step_by(4096).find(fits).unwrap();
        assert!(largest > room / 2);
        worker.answer(1, b"", &[largest as usize]);
        assert_eq!(main.take().entry.task, 1, "{transport:?}");
        assert_eq!(main.reason(), None);
    }
}

#[test]
fn a_main_process_that_takes_nothing_holds_no_worker_back_and_gets_all_after_its_end() {
    for transport in TRANSPORTS {
        let (mut main, worker) = open(transport);
        let tasks = 0..u64::from(OUTSTANDING);
        tasks.clone().for_each(|task| main.send(task, TaskKind::Plain, b"index"));
        for task in tasks.clone() {
            assert_eq!(worker.next().unwrap().0.task, task);
            worker.answer(task, b"", &[4 << 20]);
        }
        worker.leave();
        for task in tasks {
            let incoming = main.take();
            let leaves = main.open(&incoming).1;
            assert_eq!((incoming.entry.task, leaves), (task, vec![vec![task as u8; 4 << 20]]), "{transport:?}");
        }
        if main.link.is_some() {
            assert_eq!(main.ended(), None);
        }
    }
}

#[test]
fn a_worker_learns_of_the_end_of_the_main_process() {
    for transport in SOCKETS {
        let (main, worker) = open(transport);
        main.link.as_ref().unwrap().cut("the test ends it");
        assert_eq!(main.ended().as_deref(), Some("the test ends it"));
        assert!(worker.next().is_none());
        wait_until(|| worker.lost.load(Relaxed));
    }
}

#[test]
fn a_kill_reaches_a_worker_that_is_fetching() {
    let (one, other) = sockets(Transport::Tcp);
    let main = Main::linked(one, ARENA);
    let (killed, end) = mpsc::channel();
    let remote = Remote::start(other, OUTSTANDING, ARENA / 2, || {}, move || killed.send(()).unwrap()).unwrap();
    main.link.as_ref().unwrap().kill();
    end.recv_timeout(LIMIT).unwrap();
    drop(remote);
}

#[test]
fn workers_of_a_shared_queue_claim_as_many_tasks_as_they_have_room_for() {
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
        let (one, other) = sockets(Transport::Pair);
        workers.push(Worker::over(other, arena.geometry().region_len));
        links.push(Link::start(&arena, worker, one, doorbell.clone()).unwrap());
        // The link's thread has claimed as many tasks as it may.
        wait_until(|| (0..2 * u64::from(worker) + 2).all(|task| queue.holder(task).is_some()));
    }
    let holders: Vec<_> = (0..6).map(|task| queue.holder(task)).collect();
    assert_eq!(holders, [Some(0), Some(0), Some(1), Some(1), None, None]);
    assert_eq!(links[0].outstanding(), None);
    let (entry, _) = workers[1].next().unwrap();
    assert_eq!(entry.task, 2);
    workers[1].answer(2, b"", &[]);
    wait_until(|| queue.holder(4) == Some(1));
    assert_eq!(queue.holder(5), None);
}
