//! An engine whose workers' ports are in this process.

use std::os::fd::AsRawFd;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use rustloader::engine::completions::Message;
use rustloader::engine::{Engine, Incoming, Step};
use rustloader::scheduler::{Dispatch, Settings};
use rustloader::shm::arena::Arena;
use rustloader::shm::block::CONSUMER;
use rustloader::shm::layout::Needs;
use rustloader::sys::poll::PollSet;
use rustloader::wire::{ResultKind, TaskEntry, TaskKind, Timings};
use rustloader::worker::port::{Port, Received};

pub type Loader = Engine<u64, Vec<u8>>;

/// After this time a test counts as hung.
pub const LIMIT: Duration = Duration::from_secs(30);

/// The index batch of each task contains its tag. A worker dies when its process, which only sleeps, is killed.
pub struct Rig {
    pub arena: Arc<Arena>,
    pub engine: Loader,
    pub ports: Vec<Port>,
    pub processes: Vec<Child>,
    /// The tag of the next task.
    pub next: u64,
    /// Bytes of an index batch.
    pub index: usize,
    /// Whether the sampler yields an index whenever the engine asks for one.
    pub submits: bool,
}

pub fn spawn() -> Child {
    Command::new("sleep").arg("1000").spawn().unwrap()
}

pub fn open(engine: &Loader, worker: u32) -> Port {
    let doorbell = engine.handle().doorbell.as_fd().try_clone_to_owned().unwrap();
    Port::open(engine.arena().clone(), worker, doorbell).unwrap()
}

/// Creates an engine over a new arena.
pub fn engine(settings: Settings) -> Loader {
    let (workers, outstanding) = (settings.workers as u32, settings.max_tasks() as u32);
    let shared_queue = settings.dispatch == Dispatch::SharedQueue;
    let needs = Needs { workers, outstanding, shared_queue, snapshots: true };
    Loader::over(Arena::create_for(1 << 30, needs).unwrap(), settings).unwrap()
}

/// Returns the number of a region's blocks that wait for their receiver.
pub fn held_in(arena: &Arena, region: u32) -> usize {
    let table = &arena.table(region)[..arena.block_count(region) as usize];
    table.iter().filter(|block| block.state.load(SeqCst) & CONSUMER != 0).count()
}

/// Returns the number of blocks with results that the main process has not released.
pub fn held(arena: &Arena) -> usize {
    (0..arena.geometry().workers).map(|region| held_in(arena, region)).sum()
}

pub fn until(mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < LIMIT, "the condition never holds");
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Rig {
    pub fn new(settings: Settings) -> Self {
        Self::over(engine(settings), 8)
    }

    /// Starts the workers and the first epoch. Index batches have `index` bytes.
    pub fn over(mut engine: Loader, index: usize) -> Self {
        let arena = engine.arena().clone();
        let workers = arena.geometry().workers;
        let processes: Vec<Child> = (0..workers).map(|_| spawn()).collect();
        for (worker, process) in (0..).zip(&processes) {
            engine.started(worker, process.id() as i32).unwrap();
        }
        let ports = (0..workers).map(|worker| open(&engine, worker)).collect();
        let mut rig = Self { arena, engine, ports, processes, next: 0, index, submits: true };
        rig.prime();
        rig
    }

    /// Submits the first tasks of an epoch.
    pub fn prime(&mut self) {
        let asked = (0..).find(|asked| !self.engine.primes(*asked) || !self.submit());
        assert_eq!(asked, Some(self.engine.max_tasks()));
    }

    /// Submits a task. Returns false if no worker can take it.
    pub fn submit(&mut self) -> bool {
        let index = index_of(self.next, self.index);
        self.next += 1;
        self.engine.submit(self.next - 1, TaskKind::Plain, &index).unwrap().is_some()
    }

    /// Returns the number of blocks that hold index batches.
    pub fn payloads(&self) -> usize {
        held_in(&self.arena, self.arena.geometry().main_region())
    }

    /// Takes a worker's next task.
    pub fn take(&self, worker: usize) -> TaskEntry {
        match self.ports[worker].receive().unwrap() {
            Received::Task(entry) => entry,
            other => panic!("{other:?}"),
        }
    }

    pub fn send(&self, worker: usize, task: u64, kind: ResultKind, payload: &[u8]) {
        self.ports[worker].send(task, kind, &[], payload, Timings::default()).unwrap();
    }

    /// Answers a worker's next task with its tag. Returns the task.
    pub fn answer(&self, worker: usize, kind: ResultKind) -> u64 {
        let entry = self.take(worker);
        let in_block = self.ports[worker].payload.lock().unwrap();
        let index = if entry.block.is_some() { &in_block[..] } else { &entry.inline[..entry.len as usize] };
        self.send(worker, entry.task, kind, &index[..8]);
        entry.task
    }

    pub fn kill(&mut self, worker: usize) {
        self.processes[worker].kill().unwrap();
        self.processes[worker].wait().unwrap();
    }

    /// Starts the next process of a vacant worker.
    pub fn replace(&mut self, worker: usize) {
        self.engine.vacate(worker as u32).unwrap();
        self.processes[worker] = spawn();
        self.engine.started(worker as u32, self.processes[worker].id() as i32).unwrap();
        self.ports[worker] = open(&self.engine, worker as u32);
    }

    /// Sends the task that is to be sent again. Returns its tag.
    pub fn resend(&mut self) -> u64 {
        let tag = *self.engine.unsent().unwrap();
        self.engine.resend(TaskKind::Plain, &index_of(tag, self.index)).unwrap();
        tag
    }

    pub fn wait(&mut self, limit: Option<Duration>) {
        self.engine.wait(limit).unwrap();
        self.engine.after_wait().unwrap();
    }

    /// Returns the next step that is not a submission, a resend or a wait.
    pub fn step(&mut self) -> Step<u64, Vec<u8>> {
        let start = Instant::now();
        loop {
            assert!(start.elapsed() < LIMIT, "next hangs");
            match self.engine.step().unwrap() {
                Step::Submit => _ = self.submits && self.submit(),
                Step::Resend => _ = self.resend(),
                Step::Wait(deadline) => self.wait(deadline),
                other => return other,
            }
        }
    }

    /// Returns the tag of the next batch, which is its payload, and its worker.
    pub fn delivered(&mut self) -> (u64, u32) {
        let Step::Deliver { tag, incoming, ready } = self.step() else { panic!("no batch is delivered") };
        let payload = ready.unwrap_or_else(|| self.payload_of(&incoming));
        assert_eq!(payload, tag.to_le_bytes());
        (tag, incoming.worker)
    }

    pub fn batch(&mut self) -> u64 {
        self.delivered().0
    }

    /// Reads the payload of a result, and releases the result.
    pub fn payload_of(&self, incoming: &Incoming) -> Vec<u8> {
        Message::open(&self.arena, incoming, Vec::new()).unwrap().payload().to_vec()
    }

    /// Whether the main process's doorbell has rung.
    pub fn has_rung(&self) -> bool {
        let (mut poll, mut ready) = (PollSet::new(), Vec::new());
        poll.add(self.engine.handle().doorbell.as_fd().as_raw_fd(), 0).unwrap();
        poll.wait(Some(Duration::ZERO), &mut ready).unwrap();
        !ready.is_empty()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        (0..self.processes.len()).for_each(|worker| self.kill(worker));
    }
}

fn index_of(tag: u64, len: usize) -> Vec<u8> {
    let mut index = tag.to_le_bytes().to_vec();
    index.resize(len, 0);
    index
}
