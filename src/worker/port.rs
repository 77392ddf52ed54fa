//! A worker's connection to the main process: ring ends, allocator and doorbell.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::arrays::Arrays;
use super::stack::StackOffer;
use crate::config::{
    AHEAD, IDLE_SLICE, LARGE, POOL_IDLE, RECENT_BATCHES, RETURN_WAIT, SMALL_MESSAGE, YIELD_FOR,
};
use crate::error::{Error, Result};
use crate::shm::alloc::{Allocator, settle};
use crate::shm::arena::{Arena, ArenaQueue, ArenaRing};
use crate::shm::block::{CONSUMER, WORKER, mark_if, release_owned};
use crate::shm::layout::{Sleeper, StatusPage, WorkerState};
use crate::shm::queue::Claimer;
use crate::shm::ring::{Consumer, Entry, Producer};
use crate::shm::{doorbell, forks};
use crate::sync::Ordering;
use crate::sys;
use crate::wire::{self, Leaf, Load, ResultEntry, ResultKind, TaskEntry, TaskKind, Timings};

/// The result of [`Port::receive`].
#[derive(Debug)]
pub enum Received {
    /// A task, whose payload has been copied.
    Task(TaskEntry),
    /// A slice has passed, or a signal arrived: check signals, and call again.
    Nothing,
    /// The loader shuts down, or the main process is gone.
    Stop,
}

#[derive(Debug)]
struct Ends {
    tasks: Consumer<ArenaRing>,
    /// The queue of the workers, if they share one. The ring then carries only control messages.
    queue: Option<Claimer<ArenaQueue>>,
    results: Producer<ArenaRing>,
    /// Buffer for the head of a message.
    head: Vec<u8>,
}

/// A worker's connection to the main process.
#[derive(Debug)]
pub struct Port {
    arena: Arc<Arena>,
    worker: u32,
    ends: Mutex<Ends>,
    pub(super) allocator: Mutex<Allocator>,
    /// The worker's own arrays in its region.
    pub(super) arrays: Mutex<Arrays>,
    /// Not rung if a dataset has closed it: the main process then finds results at its own check after 250 ms.
    doorbell: sys::event::EventFd,
    /// A block for the message that reports missing memory.
    reserve: Mutex<Option<u32>>,
    /// Set when the main process is gone.
    orphaned: AtomicBool,
    /// The last wait for a block of the loop was in vain, and none has come back since: the loop keeps its batches.
    waited_in_vain: AtomicBool,
    /// Payload of the last task that came in a block.
    pub payload: Mutex<Vec<u8>>,
    /// Bytes of the largest batch of the current and the previous [`RECENT_BATCHES`]. Only the worker's loop writes it.
    largest: [AtomicU64; 2],
    stack: StackOffer,
    /// CPU nanoseconds of the process when the current fetch began; 0 if it is not measured.
    fetch_began: AtomicU64,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ends {
    /// The next entry: of the own ring, so that control messages come first, else of the queue.
    #[inline]
    fn next(&mut self) -> Result<Option<Entry>> {
        if let Some(entry) = self.tasks.pop()? {
            return Ok(Some(entry));
        }
        let claimed = match &mut self.queue {
            Some(queue) => queue.claim()?,
            None => None,
        };
        match claimed {
            Some((position, entry)) if entry[0] != position => {
                Err(Error::corrupt(format!("place {position} of a queue has task {}", entry[0])))
            }
            claimed => Ok(claimed.map(|(_, entry)| entry)),
        }
    }
}

impl Port {
    /// Opens the port of worker `worker` in the main process's arena.
    pub fn open(arena: Arc<Arena>, worker: u32, doorbell: OwnedFd) -> Result<Self> {
        let doorbell = sys::event::EventFd::from_owned_fd(doorbell);
        let ends = Ends {
            tasks: Consumer::new(arena.task_ring(worker)),
            queue: arena.queue().map(|queue| Claimer::new(queue, worker)),
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
            reserve: Mutex::new(reserve),
            doorbell,
            orphaned: AtomicBool::new(false),
            waited_in_vain: AtomicBool::new(false),
            payload: Mutex::new(Vec::new()),
            largest: Default::default(),
            stack: StackOffer::default(),
            fetch_began: AtomicU64::new(0),
            arena,
        })
    }

    /// The arena.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// The worker's number.
    pub fn worker(&self) -> u32 {
        self.worker
    }

    /// Returns [`Error::Child`] in a child that the dataset forked: rings, status page and region belong to its parent.
    fn check_ours(&self) -> Result<()> {
        let what = "a process that was forked in a DataLoader worker came back into the worker's loop; it has to end by \
                    os._exit()";
        if self.arena.is_ours() { Ok(()) } else { Err(Error::Child { what }) }
    }

    fn status(&self) -> &StatusPage {
        &self.arena.control(self.worker).status
    }

    /// Enters a state. Returns the microseconds spent in the previous one.
    pub fn enter(&self, state: WorkerState) -> u32 {
        if !self.arena.is_ours() {
            return 0;
        }
        let now = sys::clock::monotonic_ns();
        let spent = self.status().change(state, now);
        self.fetch_ends(spent);
        if state == WorkerState::Idle {
            self.stack.check_handler(self.status(), now);
        }
        u32::try_from(spent / 1000).unwrap_or(u32::MAX)
    }

    /// Notes that a batch of a replay begins: its time counts from now.
    pub fn progress(&self) {
        if self.arena.is_ours() {
            self.status().task_since_ns.store(sys::clock::monotonic_ns(), Ordering::Relaxed);
        }
    }

    /// Shows which sample of the current index batch is fetched, for the report of a death.
    #[inline]
    pub fn at_sample(&self, place: u64) {
        // A child of the worker has the same page.
        if self.arena.is_ours() {
            self.status().at_sample(place);
        }
    }

    /// Begins to measure the CPU time of a fetch.
    fn fetch_begins(&self) {
        let began = if self.status().measures_fetch() { sys::clock::process_cpu_ns() } else { 0 };
        self.fetch_began.store(began, Ordering::Relaxed);
    }

    /// Ends the measurement of a fetch that took `wall` nanoseconds, if there is one.
    #[inline]
    fn fetch_ends(&self, wall: u64) {
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

    /// Offers stack dumps in the file of [`Port::make_stack_file`]; `None` if no handler writes them.
    pub fn offer_stack(&self, fd: Option<i32>) {
        self.stack.offer(self.status(), fd);
    }

    /// Whether the worker should leave before the next sample.
    #[inline]
    pub fn stopping(&self) -> bool {
        self.arena.header().stop.0.load(Ordering::Relaxed) != 0 || self.orphaned.load(Ordering::Relaxed)
    }

    /// What the worker sleeps on: its own bell, or that of the shared queue.
    fn sleeper(&self) -> &Sleeper {
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

    /// The next task, without waiting. Copies a payload in a block to `payload`.
    pub fn take_up(&self) -> Result<Option<TaskEntry>> {
        self.check_ours()?;
        self.poll()
    }

    /// The next task, waiting for at most a slice. Copies a payload in a block to `payload`.
    pub fn receive(&self) -> Result<Received> {
        self.check_ours()?;
        if let Some(entry) = self.poll()? {
            return Ok(Received::Task(entry));
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
        let found = self.poll();
        if matches!(found, Ok(None)) && !self.stopping() {
            let slice = self.idle().clamp(AHEAD, IDLE_SLICE);
            let woken = sys::futex::wait(&sleeper.bell, ticket.0, Some(slice));
            sleeper.awake();
            // A sandbox refuses futexes: poll instead.
            if woken.is_err() {
                std::thread::sleep(Duration::from_millis(1));
            }
            let found = self.poll()?;
            // The time has passed, or the loop has released a block.
            if found.is_none() && woken.is_ok() {
                self.trim()?;
            }
            return Ok(found.map_or(Received::Nothing, Received::Task));
        }
        sleeper.awake();
        Ok(found?.map_or(Received::Stop, Received::Task))
    }

    /// How long the worker has had nothing to do.
    fn idle(&self) -> Duration {
        let since = self.status().since_ns.load(Ordering::Relaxed);
        Duration::from_nanos(sys::clock::monotonic_ns().saturating_sub(since))
    }

    /// Returns idle pages: those beyond what the batches under way need; all of them if there are none for long, or if the
    /// worker is ahead of the loop. Then there is time for fresh pages before the loop needs the next batch.
    fn trim(&self) -> Result<()> {
        let (idle, long) = (self.idle(), self.status().long_idle());
        let mut allocator = lock(&self.allocator);
        if idle >= POOL_IDLE || idle >= long && allocator.is_ahead() {
            allocator.trim(0)
        } else if idle >= IDLE_SLICE {
            allocator.trim(self.arena.budget(self.worker))
        } else {
            Ok(())
        }
    }

    /// Before a large block is allocated: waits a moment for the return of one that the loop is about to release, because its
    /// pages are warm. `pause` sleeps.
    pub fn await_return(&self, len: u64, pause: impl Fn(Duration)) -> Result<()> {
        if len < LARGE || !self.arena.is_ours() {
            return Ok(());
        }
        let most = RETURN_WAIT.saturating_mul(u32::try_from(len / LARGE).unwrap_or(u32::MAX));
        let start = sys::clock::monotonic();
        loop {
            let mut allocator = lock(&self.allocator);
            // Ahead of the loop there is more time. An idle worker may be returning as many pages just now.
            let most = if allocator.is_ahead() { (most.saturating_mul(4)).min(AHEAD) } else { most };
            if !allocator.awaits(len)? {
                self.waited_in_vain.store(false, Ordering::Relaxed);
                return Ok(());
            }
            if self.waited_in_vain.load(Ordering::Relaxed) {
                return Ok(());
            }
            if sys::clock::monotonic() - start >= most {
                self.waited_in_vain.store(true, Ordering::Relaxed);
                return Ok(());
            }
            drop(allocator);
            pause(RETURN_WAIT);
        }
    }

    fn poll(&self) -> Result<Option<TaskEntry>> {
        if self.stopping() {
            return Ok(None);
        }
        let Some(words) = lock(&self.ends).next()? else { return Ok(None) };
        sys::moment::task_taken();
        let entry = TaskEntry::from_words(&words)?;
        let (status, now) = (self.status(), sys::clock::monotonic_ns());
        status.begin(entry.task, now);
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
            self.fetch_begins();
        }
        Ok(Some(entry))
    }

    /// Allocates a block of `len` bytes, held by this worker. Does not wait, see [`settle`].
    pub fn allocate(&self, len: u64) -> Result<(u32, *mut u8)> {
        self.check_ours()?;
        let id = lock(&self.allocator).allocate(len, WORKER)?;
        Ok((id, self.arena.block_memory(self.worker, id, len)?.as_ptr()))
    }

    /// Releases this worker's hold on a block. Does nothing in a child of the worker.
    pub fn release(&self, block: u32) {
        if self.arena.is_ours() {
            lock(&self.allocator).release(block);
        }
    }

    /// The block that contains the `len` bytes at `address`, and the offset in it, if the batch can adopt the block: they fill
    /// at least half of it, and it has not been sent before, because a consumer may still hold such a block.
    pub fn adoptable(&self, address: usize, len: u64) -> Option<(u32, u64)> {
        // In a child of the worker a lost thread may hold the lock.
        if !self.arena.is_ours() {
            return None;
        }
        let allocator = lock(&self.allocator);
        let (block, offset) = allocator.find(address)?;
        let entry = &self.arena.table(self.worker)[block as usize];
        let used = entry.warm.load(Ordering::Relaxed);
        let whole = offset + len <= used && len >= used / 2;
        (whole && entry.state.load(Ordering::Relaxed) == WORKER && !allocator.was_sent(block))
            .then_some((block, offset))
    }

    /// Publishes a result with a message, and transfers the blocks of `leaves` to the consumer; see [`Keep`].
    pub fn send(
        &self,
        task: u64,
        kind: ResultKind,
        leaves: &[(Leaf, Keep)],
        payload: &[u8],
        timings: Timings,
    ) -> Result<()> {
        self.check_ours()?;
        let len = wire::message_len(leaves.len(), payload.len());
        let block = settle(|| self.allocate_message(len), std::thread::sleep)?;
        let load = load_of(len, leaves);
        self.note_size(load.bytes);
        let mut ends = lock(&self.ends);
        self.write_message(&mut ends.head, block, leaves, payload)?;
        if !leaves.is_empty() {
            self.hand_over(leaves)?;
        }
        let checksum = if kind == ResultKind::Plain { 0 } else { wire::checksum(payload) };
        let entry = ResultEntry { task, kind, block: Some(block), len, checksum, timings, load };
        let StatusPage { sent, adopted, adopted_bytes, .. } = self.status();
        let add = |word: &AtomicU64, more| word.store(word.load(Ordering::Relaxed) + more, Ordering::Relaxed);
        add(sent, 1);
        for (leaf, _) in leaves.iter().filter(|(_, keep)| *keep != Keep::No) {
            add(adopted, 1);
            add(adopted_bytes, leaf.len);
        }
        self.publish(&mut ends, &entry)
    }

    /// Writes a message into its block, which belongs to this worker until it is published. `head` is a buffer.
    fn write_message(
        &self,
        head: &mut Vec<u8>,
        block: u32,
        leaves: &[(Leaf, Keep)],
        payload: &[u8],
    ) -> Result<()> {
        let len = wire::message_len(leaves.len(), payload.len());
        let memory = self.arena.block_memory(self.worker, block, len)?.as_ptr();
        wire::message_head(leaves.iter().map(|(leaf, _)| leaf), head);
        // SAFETY: the block has `len` bytes, which are head and payload; no other process uses it yet.
        unsafe {
            std::ptr::copy_nonoverlapping(head.as_ptr(), memory, head.len());
            std::ptr::copy_nonoverlapping(payload.as_ptr(), memory.add(head.len()), payload.len());
        }
        Ok(())
    }

    /// Publishes a snapshot that was made after `count` answers of this worker in this epoch, before its next result. The first
    /// one of an epoch has the count 0. At most one comes with each result, and one each at the begin and the end of the
    /// epoch and for an error: the ring has no room for more. Returns false if it is left out for want of memory.
    pub fn send_snapshot(&self, count: u64, payload: &[u8], is_error: bool) -> Result<bool> {
        self.check_ours()?;
        let kind = if is_error { ResultKind::FailedSnapshot } else { ResultKind::Snapshot };
        let len = wire::message_len(0, payload.len());
        // The main process waits for the first one, and an error should be known: these may use the reserve.
        let block = match count == 0 || is_error {
            true => settle(|| self.allocate_message(len), std::thread::sleep),
            false => lock(&self.allocator).allocate(len, CONSUMER),
        };
        let block = match block {
            Ok(block) => Some(block),
            Err(Error::NoMemory { .. } | Error::RegionFull { .. } | Error::Os { .. }) => None,
            Err(error) => return Err(error),
        };
        if block.is_none() && count > 0 {
            return Ok(false);
        }
        let mut ends = lock(&self.ends);
        if let Some(block) = block {
            self.write_message(&mut ends.head, block, &[], payload)?;
        }
        let (checksum, timings, load) = (wire::checksum(payload), Timings::default(), Load::default());
        let entry = ResultEntry { task: count, kind, block, len, checksum, timings, load };
        self.push(&mut ends, &entry)?;
        // Only the first one is waited for. A result follows the others.
        if count == 0 {
            self.ring();
        }
        Ok(block.is_some())
    }

    /// Transfers the leaves to the consumer.
    fn hand_over(&self, leaves: &[(Leaf, Keep)]) -> Result<()> {
        let table = self.arena.table(self.worker);
        let mut allocator = lock(&self.allocator);
        for (leaf, keep) in leaves {
            let state = &table[leaf.block as usize].state;
            match keep {
                Keep::No => state.store(CONSUMER, Ordering::Relaxed),
                Keep::Yes | Keep::Freed => {
                    mark_if(state, WORKER, CONSUMER);
                    match keep {
                        Keep::Yes => allocator.note_sent(leaf.block),
                        // The consumer holds it now, so this cannot free it.
                        _ => {
                            release_owned(state, WORKER);
                        }
                    }
                }
                Keep::HandedOver => {}
                Keep::Unknown { .. } => return Err(Error::usage("a message with an array that may change")),
            }
        }
        Ok(())
    }

    /// Makes the consumer a holder of a block of an unpublished message. The worker's object in it may then go.
    pub fn hand_over_early(&self, block: u32) {
        let state = &self.arena.table(self.worker)[block as usize].state;
        if self.arena.is_ours() && mark_if(state, WORKER, CONSUMER) {
            lock(&self.allocator).note_sent(block);
        }
    }

    /// Undoes [`Port::hand_over_early`], if the message is not published.
    pub fn take_back(&self, block: u32) {
        if self.arena.is_ours() {
            self.arena.release(self.worker, block, CONSUMER);
        }
    }

    /// Bytes of the largest recent batch.
    pub(super) fn largest_batch(&self) -> u64 {
        let [now, before] = [0, 1].map(|half: usize| self.largest[half].load(Ordering::Relaxed));
        now.max(before)
    }

    /// Updates the size of the largest recent batch on the status page.
    fn note_size(&self, bytes: u64) {
        let status = self.status();
        let [mut now, mut before] = [0, 1].map(|half: usize| self.largest[half].load(Ordering::Relaxed));
        if status.tasks_done.load(Ordering::Relaxed).is_multiple_of(RECENT_BATCHES) {
            (now, before) = (0, now);
            self.largest[1].store(before, Ordering::Relaxed);
        }
        now = now.max(bytes);
        self.largest[0].store(now, Ordering::Relaxed);
        status.largest.store(now.max(before), Ordering::Relaxed);
    }

    /// Allocates a message's block. Out of memory it uses the reserve, to report the error; a later call refills that.
    fn allocate_message(&self, len: u64) -> Result<u32> {
        let allocator = &mut *lock(&self.allocator);
        let mut reserve = lock(&self.reserve);
        if len <= SMALL_MESSAGE {
            allocator.trust(SMALL_MESSAGE);
        }
        let block = allocator.allocate(len, CONSUMER);
        match (&block, *reserve) {
            (Err(_), Some(kept)) if len <= SMALL_MESSAGE => {
                *reserve = None;
                allocator.release(kept);
                return allocator.allocate(SMALL_MESSAGE, CONSUMER);
            }
            (Ok(_), None) => *reserve = allocator.allocate(SMALL_MESSAGE, WORKER).ok(),
            _ => {}
        }
        block
    }

    /// Publishes a result without a message.
    pub fn answer(&self, task: u64, kind: ResultKind) -> Result<()> {
        self.check_ours()?;
        let (timings, load) = (Timings::default(), Load::default());
        let entry = ResultEntry { task, kind, block: None, len: 0, checksum: 0, timings, load };
        self.publish(&mut lock(&self.ends), &entry)
    }

    fn publish(&self, ends: &mut Ends, entry: &ResultEntry) -> Result<()> {
        sys::moment::task_done();
        self.push(ends, entry)?;
        self.ring();
        // Last: a reader of the count finds the result published.
        let status = self.status();
        status.tasks_done.store(status.tasks_done.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        Ok(())
    }

    #[inline]
    fn push(&self, ends: &mut Ends, entry: &ResultEntry) -> Result<()> {
        let full =
            || Error::corrupt("a completion ring is full although it has room for all outstanding tasks");
        ends.results.push(&entry.to_words()).map_err(|_| full())?;
        doorbell::mark(self.arena.bitmap(), self.worker);
        Ok(())
    }

    /// Wakes the main process if it sleeps.
    #[inline]
    fn ring(&self) {
        if self.arena.header().doorbell.0.must_ring() {
            let _ = self.doorbell.ring();
        }
    }

    /// Marks the worker as left. It does not touch the arena afterwards.
    pub fn leave(&self) {
        self.end_arrays();
        self.enter(WorkerState::Left);
    }
}

/// The load of a message of `len` bytes. Leaves that the worker does not keep are copies.
fn load_of(len: u64, leaves: &[(Leaf, Keep)]) -> Load {
    let mut load = Load { bytes: len, ..Load::default() };
    for (leaf, keep) in leaves {
        load.bytes += leaf.len;
        if *keep == Keep::No {
            load.copies += 1;
            load.copied_bytes += leaf.len;
        }
    }
    load
}

/// Whether objects of the worker keep a leaf's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// The block was allocated for this message.
    No,
    /// It contains an object of the worker.
    Yes,
    /// It contained one, which may have gone. The consumer holds it already.
    HandedOver,
    /// It contains an array, which begins at `offset` of the leaf. Whether the worker keeps it is known once the batch is dropped.
    Unknown {
        /// Bytes before the array.
        offset: u64,
    },
    /// An array lay in it, whose memory has been freed.
    Freed,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(bytes: u64) -> Port {
        let arena = Arena::create_sized(bytes, 1, 8).unwrap();
        let doorbell = sys::event::EventFd::new().unwrap();
        let doorbell = doorbell.as_fd().try_clone_to_owned().unwrap();
        Port::open(arena, 0, doorbell).unwrap()
    }

    #[test]
    fn an_error_can_be_sent_when_the_region_is_full() {
        let port = port(64 << 20);
        let mut held = Vec::new();
        for len in [1 << 20, 64 << 10, 4096] {
            while let Ok((block, _)) = port.allocate(len) {
                held.push(block);
            }
        }
        assert!(port.allocate(1).is_err());
        port.send(0, ResultKind::Error, &[], b"no memory", Timings::default()).unwrap();
        // The reserve is used up, and refilled after a release.
        assert!(port.send(1, ResultKind::Error, &[], b"none", Timings::default()).is_err());
        held.into_iter().for_each(|block| port.release(block));
        port.send(2, ResultKind::Error, &[], b"some", Timings::default()).unwrap();
        assert!(lock(&port.reserve).is_some());
    }

    #[test]
    fn a_snapshot_for_which_there_is_no_memory_is_left_out_but_the_first_and_an_error_are_reported() {
        let port = port(64 << 20);
        let mut held = Vec::new();
        for len in [1 << 20, 64 << 10, 4096] {
            while let Ok((block, _)) = port.allocate(len) {
                held.push(block);
            }
        }
        let mut results = Consumer::new(port.arena.result_ring(0));
        let mut entry = || results.pop().unwrap().map(|words| ResultEntry::from_words(&words).unwrap());
        assert!(!port.send_snapshot(1, b"state", false).unwrap());
        assert_eq!(entry(), None);
        // The reserve is for these, as far as it goes. The main process waits for the first one in any case.
        assert!(port.send_snapshot(0, b"state", false).unwrap());
        assert!(entry().unwrap().block.is_some());
        assert!(!port.send_snapshot(0, b"state", false).unwrap());
        let none = entry().unwrap();
        assert_eq!((none.kind, none.block, none.task), (ResultKind::Snapshot, None, 0));
        port.release(held.pop().unwrap());
        assert!(port.send_snapshot(3, b"error", true).unwrap());
        let error = entry().unwrap();
        assert_eq!((error.kind, error.block.is_some(), error.task), (ResultKind::FailedSnapshot, true, 3));
        // A large one does not fit into the reserve.
        assert!(!port.send_snapshot(0, &[0; 1 << 20], false).unwrap());
        assert_eq!(entry().unwrap().block, None);
        held.into_iter().for_each(|block| port.release(block));
        assert!(port.send_snapshot(4, &[7; 500_000], false).unwrap());
        let snapshot = entry().unwrap();
        assert_eq!((snapshot.len, snapshot.load), (500_008, Load::default()));
        assert_eq!(snapshot.checksum, wire::checksum(&[7; 500_000]));
    }

    #[test]
    fn a_snapshot_leaves_the_workers_figures_as_they_are() {
        let port = port(64 << 20);
        port.send(0, ResultKind::Plain, &[], &[0; 100], Timings::default()).unwrap();
        let figures = || {
            let StatusPage { sent, largest, tasks_done, task, .. } = port.status();
            [sent, largest, tasks_done, task].map(|word| word.load(Ordering::Relaxed))
        };
        let before = figures();
        assert!(port.send_snapshot(1, &[0; 100_000], false).unwrap());
        assert_eq!((figures(), before), (before, [1, 108, 1, 0]));
    }

    /// Takes a task of the ring, whose fetch sleeps, or computes for as long.
    fn fetch(port: &Port, kind: TaskKind, work: impl FnOnce()) -> (u64, u64) {
        let entry = TaskEntry::inline(0, kind, &[]).unwrap();
        let tasks = &mut crate::shm::ring::Producer::new(port.arena.task_ring(0));
        tasks.push(&entry.to_words()).unwrap();
        let totals = || crate::metrics::WorkerTotals::of(port.status(), (1, false), 0);
        let before = totals();
        assert!(port.take_up().unwrap().is_some());
        work();
        port.enter(WorkerState::Collate);
        let after = totals();
        // Neither time after the fetch counts, nor a second interval in the dataset.
        std::thread::sleep(Duration::from_millis(2));
        port.enter(WorkerState::Fetch);
        port.enter(WorkerState::Pack);
        assert_eq!(totals().fetch_measured_ns, after.fetch_measured_ns);
        let difference =
            (after.fetch_cpu_ns - before.fetch_cpu_ns, after.fetch_measured_ns - before.fetch_measured_ns);
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
        assert_eq!(fetch(&port, TaskKind::Resume, || ()), (0, 0), "a control message is no fetch");
    }

    /// A port with an idle warm block, one that the consumer has received, and one that waits for it.
    fn waiting(len: u64) -> (Port, u32, u32) {
        let port = port(1 << 30);
        let blocks = [0; 3].map(|_| port.allocate(len).unwrap().0);
        let leaves = blocks[1..].iter().map(|&block| (Leaf { block, len }, Keep::No));
        port.send(0, ResultKind::Plain, &leaves.collect::<Vec<_>>(), b"", Timings::default()).unwrap();
        port.release(blocks[0]);
        port.arena.delivered(0, blocks[1]).unwrap();
        port.enter(WorkerState::Idle);
        (port, blocks[1], blocks[2])
    }

    fn has_been_idle(port: &Port, time: Duration) {
        let since = sys::clock::monotonic_ns() - time.as_nanos() as u64;
        port.status().since_ns.store(since, Ordering::Relaxed);
        port.status().task_since_ns.store(since, Ordering::Relaxed);
    }

    #[test]
    fn a_worker_that_is_ahead_of_the_loop_returns_its_idle_pages() {
        const LEN: u64 = 4 << 20;
        let (port, _, waits) = waiting(LEN);
        let warm = || lock(&port.allocator).warm_bytes();
        let all = warm();
        assert!(all >= 3 * LEN);
        has_been_idle(&port, AHEAD / 2);
        port.trim().unwrap();
        assert_eq!(warm(), all, "a moment without a task is usual");
        has_been_idle(&port, AHEAD);
        port.trim().unwrap();
        assert_eq!(warm(), all - LEN);
        // What the consumer holds is untouched; without a message that waits, the loop waits for this worker.
        port.arena.release(0, waits, CONSUMER);
        port.trim().unwrap();
        assert!(lock(&port.allocator).is_ahead(), "the message itself");
        for (id, entry) in port.arena.table(0)[..port.arena.block_count(0) as usize].iter().enumerate() {
            if entry.state.load(Ordering::Relaxed) == CONSUMER {
                port.arena.release(0, id as u32, CONSUMER);
            }
        }
        let (block, _) = port.allocate(LEN).unwrap();
        port.release(block);
        let all = warm();
        has_been_idle(&port, AHEAD);
        port.trim().unwrap();
        assert_eq!(warm(), all);
    }

    #[test]
    fn a_block_that_comes_back_wakes_a_worker_that_is_idle() {
        const LEN: u64 = 4 << 20;
        for (len, idle, state, is_woken) in [
            (LEN, AHEAD, WorkerState::Idle, true),
            (LEN / 8, AHEAD, WorkerState::Idle, false),
            (LEN, AHEAD / 2, WorkerState::Idle, false),
            (LEN, AHEAD, WorkerState::Fetch, false),
        ] {
            let (port, delivered, _) = waiting(len);
            port.enter(state);
            has_been_idle(&port, idle);
            let ticket = port.sleeper().announce();
            port.arena.release_delivered(0, delivered);
            let rung = port.sleeper().bell.load(Ordering::Relaxed) != ticket.0;
            assert_eq!(rung, is_woken, "{len} bytes, {idle:?}, {state:?}");
        }
    }

    #[test]
    fn a_large_block_of_the_loop_is_awaited_for_a_moment() {
        const LEN: u64 = 4 << 20;
        let (port, delivered, waits) = waiting(LEN);
        let pauses = std::cell::Cell::new(0);
        let pause = |time| {
            std::thread::sleep(time);
            pauses.set(pauses.get() + 1);
        };
        port.await_return(LEN, pause).unwrap();
        assert_eq!(pauses.get(), 0, "a block is idle");
        port.allocate(LEN).unwrap();
        port.await_return(LEN, pause).unwrap();
        assert!((1..=16).contains(&pauses.get()), "{}", pauses.get());
        pauses.set(0);
        port.await_return(LEN, pause).unwrap();
        assert_eq!(pauses.get(), 0, "the last wait was in vain");
        port.arena.release_delivered(0, delivered);
        port.await_return(LEN, pause).unwrap();
        assert_eq!(port.allocate(LEN).unwrap().0, delivered);
        port.arena.delivered(0, waits).unwrap();
        port.await_return(LEN, |_| {
            pauses.set(pauses.get() + 1);
            port.arena.release_delivered(0, waits);
        })
        .unwrap();
        assert_eq!(pauses.get(), 1, "a block has come back since");
        assert_eq!(port.allocate(LEN).unwrap().0, waits);
    }

    #[test]
    fn a_batch_of_a_replay_renews_the_time_of_the_task() {
        let port = port(64 << 20);
        let since = || port.status().task_since_ns.load(Ordering::Relaxed);
        assert_eq!(since(), 0);
        let before = sys::clock::monotonic_ns();
        port.progress();
        assert!((before..=sys::clock::monotonic_ns()).contains(&since()));
    }

    #[test]
    fn a_child_asks_for_no_lock_that_another_thread_may_hold() {
        let port = port(64 << 20);
        let (block, memory) = port.allocate(40_000).unwrap();
        let held = lock(&port.allocator);
        // SAFETY: the child leaves by _exit; what it calls allocates nothing.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let nothing = port.adoptable(memory as usize, 40_000).is_none();
            port.release(block);
            // SAFETY: no exit handler runs.
            unsafe { libc::_exit(if nothing { 0 } else { 1 }) };
        }
        let mut status = -1;
        // SAFETY: `status` is a local number that the kernel fills.
        let mut gone = || unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) } == pid;
        let begin = std::time::Instant::now();
        let ended = loop {
            match gone() {
                true => break true,
                false if begin.elapsed() > Duration::from_secs(20) => break false,
                false => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        if !ended {
            // SAFETY: a child of this process, not reaped yet.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        drop(held);
        assert!(ended, "the child waits for the lock");
        assert_eq!(status, 0);
    }

    #[test]
    fn what_was_sent_before_is_not_adopted_again() {
        let port = port(64 << 20);
        let (block, memory) = port.allocate(40_000).unwrap();
        assert_eq!(port.adoptable(memory as usize, 40_000), Some((block, 0)));
        assert_eq!(port.adoptable(memory as usize, 4_000), None);
        let leaf = Leaf { block, len: 40_000 };
        port.send(0, ResultKind::Plain, &[(leaf, Keep::Yes)], b"", Timings::default()).unwrap();
        assert_eq!(port.adoptable(memory as usize, 40_000), None);
        // The consumer has released it, and may have written to it.
        port.arena.release(0, block, CONSUMER);
        assert_eq!(port.adoptable(memory as usize, 40_000), None);
        port.release(block);
        let (again, memory) = port.allocate(40_000).unwrap();
        assert_eq!(again, block);
        assert!(port.adoptable(memory as usize, 40_000).is_some());
    }
}
