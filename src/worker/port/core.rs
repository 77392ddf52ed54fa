//! The port: the worker's state, and the tasks that it receives.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::ends::Ends;
use crate::config::{AHEAD, IDLE_SLICE, REPLAY_NOTICE_NS, SMALL_MESSAGE, YIELD_FOR};
use crate::error::{Error, Result};
use crate::shm::alloc::Allocator;
use crate::shm::arena::Arena;
use crate::shm::block::{CONSUMER, WORKER};
use crate::shm::forks;
use crate::shm::layout::{NOT_BEGUN, Sleeper, StatusPage, WorkerState};
use crate::shm::queue::Claimer;
use crate::shm::ring::{Consumer, Producer};
use crate::sync::{Ordering, lock};
use crate::sys;
use crate::trace::Recorder;
use crate::transport::Remote;
use crate::wire::{TaskEntry, TaskKind};
use crate::worker::arrays::table::Arrays;
use crate::worker::stack::StackOffer;

/// The result of [`Port::receive`].
#[derive(Debug)]
pub enum Received {
    /// A task, whose payload has been copied.
    Task(TaskEntry),
    /// A time slice has passed, or a signal has arrived: handle signals, and call again.
    Nothing,
    /// The loader is shutting down, or the main process is gone.
    Stop,
}

/// A worker's connection to the main process.
#[derive(Debug)]
pub struct Port {
    pub(super) arena: Arc<Arena>,
    pub(super) worker: u32,
    pub(super) ends: Mutex<Ends>,
    pub(in crate::worker) allocator: Mutex<Allocator>,
    /// The worker's own arrays in its region.
    pub(in crate::worker) arrays: Mutex<Arrays>,
    /// The last array for which no memory was left: the task that needed it, and the error.
    pub(in crate::worker) refused_array: Mutex<Option<(u64, Error)>>,
    /// The main process's doorbell. If a dataset has closed the descriptor, the doorbell does not ring, and the main
    /// process finds results at its next check, within 250 ms.
    pub(super) doorbell: sys::event::EventFd,
    /// A block reserved for the message that reports a lack of memory.
    pub(super) reserve: Mutex<Option<u32>>,
    /// Set when the main process is gone.
    orphaned: AtomicBool,
    /// True if the last wait for the program's loop to release a block expired, and none has been released since. The
    /// port then assumes that the loop keeps its batches.
    pub(super) last_wait_expired: AtomicBool,
    /// The payload of the last task that had its payload in a block.
    pub payload: Mutex<Vec<u8>>,
    /// Bytes of the largest batch in the current period of [`RECENT_BATCHES`](crate::config::RECENT_BATCHES) batches,
    /// and in the previous one. Only the worker's loop writes them.
    pub(super) largest: [AtomicU64; 2],
    stack: StackOffer,
    /// CPU time of the process when the current fetch began, in nanoseconds; 0 if the fetch is not measured.
    fetch_began: AtomicU64,
    /// The connection to the main process, if the main process is on another machine. The main process cannot see the
    /// status page in that case.
    pub(super) remote: Option<Arc<Remote>>,
    /// True if the last notice to `remote` said that a sample is in progress.
    at_sample: AtomicBool,
    /// The time of the last notice to `remote` that a batch of a replay begins, in monotonic nanoseconds.
    pub(super) notified_ns: AtomicU64,
    trace: Recorder,
}

impl Port {
    /// Opens the port of worker `worker` in the main process's arena.
    pub fn open(arena: Arc<Arena>, worker: u32, doorbell: OwnedFd) -> Result<Self> {
        let doorbell = sys::event::EventFd::from_owned_fd(doorbell);
        let ends = Ends {
            tasks: Consumer::new(arena.task_ring(worker)),
            queue: arena.queue().map(|queue| Claimer::new(queue, worker)),
            held: None,
            claimed: None,
            results: Producer::new(arena.result_ring(worker)),
            head: Vec::new(),
        };
        let mut allocator = Allocator::new(arena.clone(), worker);
        allocator.trust(SMALL_MESSAGE);
        let reserve = allocator.allocate(SMALL_MESSAGE, WORKER).ok();
        forks::watch(&arena, Some(worker))?;
        let status = &arena.control(worker).status;
        status.pid.store(std::process::id(), Ordering::Relaxed);
        let now = sys::clock::monotonic_ns();
        status.since_ns.store(now, Ordering::Relaxed);
        Ok(Self {
            worker,
            ends: Mutex::new(ends),
            allocator: Mutex::new(allocator),
            arrays: Mutex::default(),
            refused_array: Mutex::default(),
            reserve: Mutex::new(reserve),
            doorbell,
            orphaned: AtomicBool::new(false),
            last_wait_expired: AtomicBool::new(false),
            payload: Mutex::new(Vec::new()),
            largest: Default::default(),
            stack: StackOffer::default(),
            fetch_began: AtomicU64::new(0),
            remote: None,
            at_sample: AtomicBool::new(false),
            notified_ns: AtomicU64::new(0),
            trace: Recorder::new(arena.clone(), worker),
            arena,
        })
    }

    /// Opens the port of a worker whose main process is at the other end of a connection. An error ends the connection.
    pub fn over(remote: Arc<Remote>) -> Result<Self> {
        let opened = remote.doorbell().and_then(|bell| Self::open(remote.arena().clone(), 0, bell));
        let port = opened.inspect_err(|_| remote.give_up())?;
        Ok(Self { remote: Some(remote), ..port })
    }

    /// Returns the connection to the main process, if the main process is on another machine.
    pub fn remote(&self) -> Option<&Arc<Remote>> {
        self.remote.as_ref()
    }

    /// Returns the arena.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Returns the worker's ID.
    pub fn worker(&self) -> u32 {
        self.worker
    }

    /// Returns [`Error::Child`] in a child that the dataset forked: the rings, the status page and the region belong to
    /// its parent.
    pub(super) fn check_ours(&self) -> Result<()> {
        let message = "a process that was forked in a DataLoader worker returned to the worker's loop; it must end \
                       with os._exit()";
        if self.arena.is_ours() { Ok(()) } else { Err(Error::Child { what: message }) }
    }

    pub(super) fn status(&self) -> &StatusPage {
        &self.arena.control(self.worker).status
    }

    /// Returns the number of the current task, or of the last task if there is no current one.
    pub(in crate::worker) fn task(&self) -> u64 {
        self.status().task.load(Ordering::Relaxed)
    }

    /// Enters a state. Returns the microseconds spent in the previous one.
    pub fn enter(&self, state: WorkerState) -> u32 {
        if !self.arena.is_ours() {
            return 0;
        }
        let (now, before) = (sys::clock::monotonic_ns(), self.activity());
        let spent = self.status().change(state, now);
        // The message that begins an epoch is not a batch.
        if state != WorkerState::Starting {
            self.record(before, now, spent);
        }
        if let Some(remote) = &self.remote
            && self.at_sample.swap(false, Ordering::Relaxed)
        {
            remote.at_sample(self.status().task.load(Ordering::Relaxed), 0);
        }
        self.end_fetch(spent);
        if state == WorkerState::Idle {
            self.stack.check_handler(self.status(), now);
        }
        u32::try_from(spent / 1000).unwrap_or(u32::MAX)
    }

    /// Returns the worker's state, its task, and whether it is replaying earlier batches, for [`Port::record`].
    #[inline]
    fn activity(&self) -> (u32, u64, bool) {
        let StatusPage { state, task, place, .. } = self.status();
        let (state, task) = (state.load(Ordering::Relaxed), task.load(Ordering::Relaxed));
        (state, task, place.load(Ordering::Relaxed) == NOT_BEGUN)
    }

    /// Records the worker's activity until now, if a trace is on.
    #[inline]
    fn record(&self, (state, task, replays): (u32, u64, bool), now: u64, spent: u64) {
        if self.trace.is_on() {
            let state = WorkerState::from_u32(state);
            self.trace.spent(state, (now.saturating_sub(spent), spent), task, replays);
        }
    }

    /// Records the time since the worker entered [`WorkerState::Publish`], if it is in this state and a trace is on. Call
    /// it just before the result of `task` is published.
    #[inline]
    pub(super) fn record_published(&self, task: u64) {
        let StatusPage { state, since_ns, .. } = self.status();
        if self.trace.is_on() && state.load(Ordering::Relaxed) == WorkerState::Publish as u32 {
            let (since, now) = (since_ns.load(Ordering::Relaxed), sys::clock::monotonic_ns());
            self.trace.published((since, now.saturating_sub(since)), task);
        }
    }

    /// Returns true if a trace records each sample.
    #[inline]
    pub fn traces_samples(&self) -> bool {
        self.trace.has_samples() && self.arena.is_ours()
    }

    /// Records in the trace that a sample has ended and, if `index` is given, that the sample with this index begins.
    pub fn trace_sample(&self, index: Option<u64>) {
        self.trace.sample(index, sys::clock::monotonic_ns(), self.task());
    }

    /// Notes that a batch of a replay begins or, if `ends` is set, that the replay is over. The time of the batch or
    /// task counts from now. Until the replay is over, the worker counts as not having begun its task.
    pub fn progress(&self, ends: bool) {
        if !self.arena.is_ours() {
            return;
        }
        let now = sys::clock::monotonic_ns();
        let page = self.status();
        page.task_since_ns.store(now, Ordering::Relaxed);
        page.place.store(if ends { 0 } else { NOT_BEGUN }, Ordering::Relaxed);
        let Some(remote) = &self.remote else { return };
        if ends {
            self.notified_ns.store(0, Ordering::Relaxed);
            remote.at_sample(page.task.load(Ordering::Relaxed), 0);
        } else if now.saturating_sub(self.notified_ns.load(Ordering::Relaxed)) >= REPLAY_NOTICE_NS {
            self.notified_ns.store(now, Ordering::Relaxed);
            remote.begin_replay();
        }
    }

    /// Stores the index, within the current index batch, of the sample that is about to be fetched, for the report if
    /// the worker dies. If the main process is on another machine, this may wait for the connection, so call it without
    /// the GIL.
    #[inline]
    pub fn at_sample(&self, place: u64) {
        // A child of the worker shares the worker's status page.
        if !self.arena.is_ours() {
            return;
        }
        if self.status().at_sample(place)
            && let Some(remote) = &self.remote
        {
            self.at_sample.store(true, Ordering::Relaxed);
            remote.at_sample(self.status().task.load(Ordering::Relaxed), place.saturating_add(1));
        }
    }

    /// Begins to measure the CPU time of a fetch, if this fetch must be measured.
    fn begin_fetch(&self) {
        let began = if self.status().measures_fetch() { sys::clock::process_cpu_ns() } else { 0 };
        self.fetch_began.store(began, Ordering::Relaxed);
    }

    /// Ends the measurement of a fetch, which took `wall` nanoseconds, if one is in progress.
    #[inline]
    fn end_fetch(&self, wall: u64) {
        let began = self.fetch_began.load(Ordering::Relaxed);
        if began != 0 {
            self.fetch_began.store(0, Ordering::Relaxed);
            self.status().add_fetch(sys::clock::process_cpu_ns().saturating_sub(began), wall);
        }
    }

    /// Creates the file for stack dumps; see [`StackOffer::make_file`].
    pub fn make_stack_file(&self) -> Option<i32> {
        StackOffer::make_file(self.status())
    }

    /// Offers stack dumps in the file of [`Port::make_stack_file`]. `fd` is `None` if no handler writes them.
    pub fn offer_stack(&self, fd: Option<i32>) {
        self.stack.offer(self.status(), fd);
    }

    /// Returns true if the worker should leave before the next sample.
    #[inline]
    pub fn stopping(&self) -> bool {
        self.arena.header().stop.0.load(Ordering::Relaxed) != 0 || self.orphaned.load(Ordering::Relaxed)
    }

    /// Returns the bell on which the worker sleeps: the worker's own, or that of the shared queue.
    pub(super) fn sleeper(&self) -> &Sleeper {
        self.arena.sleeper_of(self.worker)
    }

    /// Makes the worker leave, because the main process is gone.
    pub fn stop(&self) {
        self.orphaned.store(true, Ordering::Relaxed);
        let sleeper = self.sleeper();
        sleeper.ring_always();
        // The caller ends the process soon, even if the wake fails.
        let _ = sys::futex::wake(&sleeper.bell, u32::MAX);
    }

    /// Takes the next task, without waiting. If the task's payload is in a block, copies it to [`Port::payload`].
    pub fn take_up(&self) -> Result<Option<TaskEntry>> {
        self.check_ours()?;
        self.poll()
    }

    /// Takes the next task, waiting for at most one time slice. If the task's payload is in a block, copies it to
    /// [`Port::payload`].
    pub fn receive(&self) -> Result<Received> {
        self.check_ours()?;
        if let Some(entry) = self.poll()? {
            return Ok(Received::Task(entry));
        }
        if let Some(remote) = &self.remote
            && !self.stopping()
            && remote.wait(self.slice())?
        {
            return self.end_wait();
        }
        let start = sys::clock::monotonic();
        while sys::clock::monotonic() - start < YIELD_FOR {
            sys::clock::yield_now();
            if let Some(entry) = self.poll()? {
                return Ok(Received::Task(entry));
            }
        }
        let sleeper = self.sleeper();
        let ticket = sleeper.announce();
        let polled = self.poll();
        if matches!(polled, Ok(None)) && !self.stopping() {
            let woken = sys::futex::wait(&sleeper.bell, ticket.0, Some(self.slice()));
            sleeper.awake();
            // If a sandbox refuses futexes, poll instead.
            if woken.is_err() {
                std::thread::sleep(Duration::from_millis(1));
            }
            if woken.is_ok() {
                return self.end_wait();
            }
            return Ok(self.poll()?.map_or(Received::Nothing, Received::Task));
        }
        sleeper.awake();
        Ok(polled?.map_or(Received::Stop, Received::Task))
    }

    /// Takes the next task after a wait, which ended because there is a task, the time slice has passed, or the
    /// program's loop has released a block. If there is no task, releases idle memory.
    fn end_wait(&self) -> Result<Received> {
        let entry = self.poll()?;
        if entry.is_none() {
            self.trim()?;
        }
        Ok(entry.map_or(Received::Nothing, Received::Task))
    }

    /// Returns the longest time to wait before idle memory may have to be released.
    fn slice(&self) -> Duration {
        self.idle().clamp(AHEAD, IDLE_SLICE)
    }

    /// Returns the time for which the worker has had nothing to do.
    pub(super) fn idle(&self) -> Duration {
        let since = self.status().since_ns.load(Ordering::Relaxed);
        Duration::from_nanos(sys::clock::monotonic_ns().saturating_sub(since))
    }

    fn poll(&self) -> Result<Option<TaskEntry>> {
        if self.stopping() {
            return Ok(None);
        }
        let Some(words) = lock(&self.ends).next()? else { return Ok(None) };
        sys::moment::task_taken();
        let entry = TaskEntry::from_words(&words)?;
        let (status, now, before) = (self.status(), sys::clock::monotonic_ns(), self.activity());
        let spent = status.begin(entry.task, entry.kind, now);
        self.record(before, now, spent);
        self.stack.check_handler(status, now);
        if let Some(block) = entry.block {
            let region = self.arena.geometry().main_region();
            let mut payload = lock(&self.payload);
            self.arena.read_block(region, block, entry.len, &mut payload)?;
            self.arena.release(region, block, CONSUMER);
            status.show_index(&entry, &payload);
        } else {
            status.show_index(&entry, &entry.inline[..entry.len as usize]);
        }
        if matches!(entry.kind, TaskKind::Plain | TaskKind::Pickle) {
            self.begin_fetch();
        }
        Ok(Some(entry))
    }

    /// Marks the worker as having left. The worker must not touch the arena afterwards.
    pub fn leave(&self) {
        self.end_arrays();
        self.enter(WorkerState::Left);
    }
}
