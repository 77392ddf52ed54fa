//! Observation of another process's iterator through its arena, without its cooperation.
//!
//! This module uses `pread` on a read-only descriptor and maps nothing, so it neither allocates nor changes pages of
//! the arena. The data that it reads may be torn or garbage. It validates every number that it uses to locate further
//! data. All other numbers are only shown.

use std::os::fd::BorrowedFd;

use crate::config::{PAGE_READS, TABLE_READ};
use crate::error::{Error, Result};
use crate::metrics::{Count, Sums, Totals, WorkerTotals};
use crate::shm::arena::Usage;
use crate::shm::layout::{
    BlockEntry, ControlPage, Geometry, Header, IN_ORDER, INDEX_BYTES, MAGIC, MainPage, MainState, PERSISTENT, PINNING,
    QueueSlot, REMOTE, RegionHead, RingControl, RingSlot, Shared, StatusPage, VERSION, WorkerState,
};
use crate::shm::queue::is_waiting;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::sys;
use crate::tree;
use crate::wire::ResultEntry;

/// A snapshot of an iterator.
#[derive(Clone, Debug)]
pub struct Observed {
    /// Monotonic time of the snapshot, in nanoseconds.
    pub now_ns: u64,
    /// The main process's ID in that process's pid namespace.
    pub pid: u32,
    /// The loader's name.
    pub name: String,
    /// The main process's state.
    pub state: MainState,
    /// Nanoseconds for which the main process has been in this state; in the three states of `next`, since the call of
    /// `next` began.
    pub in_state_ns: u64,
    /// Nanoseconds since the iterator was created.
    pub age_ns: u64,
    /// True if the workers have been asked to exit.
    pub stopping: bool,
    /// The iterator's `prefetch_factor`.
    pub prefetch_factor: u32,
    /// True if batches are delivered in order.
    pub in_order: bool,
    /// True if the workers survive epochs.
    pub persistent: bool,
    /// True if there is a pin thread.
    pub pinning: bool,
    /// True if the workers run on other machines.
    pub remote: bool,
    /// Number of batches delivered in this epoch.
    pub epoch_batches: u64,
    /// The counters, indexed by the number of the [`Count`]. They include the time in the current state.
    pub counts: [u64; Count::LEN],
    /// The workers, indexed by ID.
    pub workers: Vec<ObservedWorker>,
    /// The arena's memory in use.
    pub usage: Usage,
}

impl Observed {
    /// Returns the counters in the form in which the process itself reads them.
    pub fn totals(&self) -> Totals {
        let workers = self.workers.iter().map(|worker| worker.totals).collect();
        Totals {
            sums: Sums { counts: self.counts, workers },
            usage: self.usage,
            high_water: self.usage.high_water,
            pin_threads: self.pinning.into(),
            ready: self.workers.iter().map(|worker| u64::from(worker.ready)).sum(),
            ..Totals::default()
        }
    }
}

/// A snapshot of a worker.
#[derive(Clone, Debug)]
pub struct ObservedWorker {
    /// The worker's state.
    pub state: WorkerState,
    /// Nanoseconds for which the worker has been in this state.
    pub in_state_ns: u64,
    /// The worker's totals, including the time in the current state. The process ID is the one in the worker's
    /// pid namespace.
    pub totals: WorkerTotals,
    /// The ordinal of the current or last batch; `None` before the first one.
    pub batch: Option<u64>,
    /// Nanoseconds since the worker took that batch; 0 before the first one.
    pub at_batch_ns: u64,
    /// The indices of that batch, as a short string.
    pub index: Option<String>,
    /// Number of tasks in the worker's submission ring, or in the shared queue.
    pub queued: u32,
    /// Number of results in the worker's completion ring.
    pub ready: u32,
    /// Number of bytes with pages in the worker's region.
    pub warm: u64,
}

/// Returns a snapshot of the iterator that uses an arena, or `None` while no iterator uses it. Fails with
/// [`Error::Layout`] for an arena of another version, and with [`Error::Corrupt`] for a file that is not an arena.
pub fn observe(fd: BorrowedFd<'_>) -> Result<Option<Observed>> {
    let file = File { fd, len: sys::proc_fd::len(fd) as u64 };
    let header: Header = file.read(0)?;
    let version = header.version.load(Ordering::Relaxed);
    match header.magic.load(Ordering::Relaxed) {
        MAGIC => {}
        // The arena was just created.
        0 if version == 0 => return Ok(None),
        other => return Err(Error::corrupt(format!("the file begins with {other:#x}, expected {MAGIC:#x}"))),
    }
    match version {
        0 => return Ok(None),
        VERSION => {}
        found => return Err(Error::Layout { found, expected: VERSION }),
    }
    let geometry = geometry_of(&header, file.len)?;
    let header = file.read_steady(0, |header: &Header| main_key(&header.main))?;
    let now_ns = sys::clock::monotonic_ns();
    let main = &header.main;
    let state = MainState::from_u32(main.state.load(Ordering::Relaxed));
    if state == MainState::Unused {
        return Ok(None);
    }
    let started_ns = word(&main.started_ns);
    let in_state_ns = now_ns.saturating_sub(word(&main.since_ns));
    let options = main.options.load(Ordering::Relaxed);
    let mut usage = Usage::default();
    let mut observed = Vec::new();
    let shared = if geometry.shared_queue { Some(file.waiting(&geometry)?) } else { None };
    for worker_id in 0..geometry.workers {
        let control = file.read_steady(geometry.control(worker_id), |it: &ControlPage| worker_key(&it.status))?;
        let before = usage.warm;
        file.add_region(&geometry, worker_id, &mut usage)?;
        let warm = usage.warm.saturating_sub(before);
        let ready = file.results(&geometry, worker_id, &control.results)?;
        let mut worker = worker_of(&control, main, warm, ready);
        worker.queued = shared.unwrap_or(worker.queued);
        observed.push(worker);
    }
    file.add_region(&geometry, geometry.main_region(), &mut usage)?;
    let counts = counted(main, state, in_state_ns, now_ns);
    Ok(Some(Observed {
        now_ns,
        pid: main.pid.load(Ordering::Relaxed),
        name: main.name(),
        state,
        in_state_ns,
        age_ns: now_ns.saturating_sub(started_ns),
        stopping: header.stop.0.load(Ordering::Relaxed) != 0,
        prefetch_factor: main.prefetch_factor.load(Ordering::Relaxed),
        in_order: options & IN_ORDER != 0,
        persistent: options & PERSISTENT != 0,
        pinning: options & PINNING != 0,
        remote: options & REMOTE != 0,
        epoch_batches: counts[Count::Batches as usize].saturating_sub(word(&main.epoch_batches)),
        counts,
        workers: observed,
        usage,
    }))
}

fn word(word: &AtomicU64) -> u64 {
    word.load(Ordering::Relaxed)
}

/// Returns the geometry that an arena's header describes. Fails with [`Error::Corrupt`] if its values are inconsistent
/// with each other or with the size of the file.
fn geometry_of(header: &Header, len: u64) -> Result<Geometry> {
    let word = |word: &AtomicU32| word.load(Ordering::Relaxed);
    let (workers, ring_slots) = (word(&header.workers), word(&header.ring_slots));
    let (table_len, region_len) = (word(&header.table_len), header.region_len.load(Ordering::Relaxed));
    let queue = word(&header.shared_queue);
    let shared_queue = queue != 0;
    let stored = Geometry { workers, ring_slots, shared_queue, table_len, region_len, total: len };
    match Geometry::of_file(len, workers, ring_slots, shared_queue) {
        Ok(geometry) if geometry == stored && queue <= 1 => Ok(geometry),
        _ => Err(Error::corrupt(format!("the header of an arena reads {stored:?}"))),
    }
}

fn main_key(page: &MainPage) -> (u32, u64, u64, u64) {
    let next_ns = word(&page.counts[Count::Next as usize]);
    (page.state.load(Ordering::Relaxed), word(&page.since_ns), word(&page.wait_since_ns), next_ns)
}

fn worker_key(page: &StatusPage) -> (u32, u64, u64, u64) {
    (page.state.load(Ordering::Relaxed), word(&page.since_ns), word(&page.task), word(&page.index_task))
}

/// Returns the counters plus the time in the current state. The main process adds that time to the page only at the end
/// of a `next`, a wait or a step.
fn counted(main: &MainPage, state: MainState, in_state_ns: u64, now_ns: u64) -> [u64; Count::LEN] {
    let mut counts = std::array::from_fn(|count| main.counts[count].load(Ordering::Relaxed));
    // The wait may have begun later than the call of `next`, which may call the sampler first.
    let wait_ns = now_ns.saturating_sub(main.wait_since_ns.load(Ordering::Relaxed)).min(in_state_ns);
    let current: &[(Count, u64)] = match state {
        MainState::Next => &[(Count::Next, in_state_ns)],
        MainState::First => &[(Count::Next, in_state_ns), (Count::First, wait_ns)],
        MainState::Waiting => &[(Count::Next, in_state_ns), (Count::Waited, wait_ns)],
        MainState::Step => &[(Count::Step, in_state_ns)],
        MainState::Unused | MainState::Starting | MainState::Between => &[],
    };
    for &(count, ns) in current {
        let sum: &mut u64 = &mut counts[count as usize];
        *sum = sum.saturating_add(ns);
    }
    counts
}

fn worker_of(control: &ControlPage, main: &MainPage, warm: u64, ready: u32) -> ObservedWorker {
    let (page, now_ns) = (&control.status, sys::clock::monotonic_ns());
    // A worker on another machine never writes its pid.
    let pid = page.pid.load(Ordering::Relaxed);
    let state = WorkerState::from_u32(page.state.load(Ordering::Relaxed));
    // A worker writes nothing before it starts.
    let since_ns = match word(&page.since_ns) {
        0 => word(&main.started_ns),
        since_ns => since_ns,
    };
    let (task, taken_ns) = (word(&page.task), word(&page.task_since_ns));
    let index = (word(&page.index_task) == task.wrapping_add(1)).then(|| index_of(page)).flatten();
    ObservedWorker {
        state,
        in_state_ns: now_ns.saturating_sub(since_ns),
        totals: WorkerTotals::of(page, (pid, state != WorkerState::Left), now_ns),
        batch: batch_of(main, task).filter(|_| taken_ns != 0),
        at_batch_ns: if taken_ns == 0 { 0 } else { now_ns.saturating_sub(taken_ns) },
        index,
        queued: control.tasks.waiting(),
        ready,
        warm,
    }
}

/// Returns the number of a task's batch in its epoch, which is the early one for a task from its first one on. Returns
/// None for a task of an epoch that has ended.
fn batch_of(main: &MainPage, task: u64) -> Option<u64> {
    match word(&main.early_task) {
        early if early != 0 && task >= early => Some(task - early),
        _ => task.checked_sub(word(&main.epoch_task)),
    }
}

fn index_of(page: &StatusPage) -> Option<String> {
    let mut bytes = [0; INDEX_BYTES];
    for (bytes, word) in bytes.as_chunks_mut().0.iter_mut().zip(&page.index) {
        *bytes = word.load(Ordering::Relaxed).to_le_bytes();
    }
    tree::brief(&bytes, page.index_len.load(Ordering::Relaxed))
}

/// The arena's file.
struct File<'a> {
    fd: BorrowedFd<'a>,
    len: u64,
}

impl File<'_> {
    fn bytes(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        let bytes = match usize::try_from(offset) {
            Ok(start) => sys::proc_fd::read(self.fd, start, len),
            Err(_) => Vec::new(),
        };
        if bytes.len() == len {
            return Ok(bytes);
        }
        Err(Error::corrupt(format!("the file of {} bytes does not have {len} bytes at offset {offset}", self.len)))
    }

    fn read<T: Shared>(&self, offset: u64) -> Result<T> {
        Ok(struct_of(&self.bytes(offset, size_of::<T>())?))
    }

    /// Reads a `T` until two successive reads have the same `key`, but at most [`PAGE_READS`] times. Returns the last
    /// `T` that it read.
    fn read_steady<T: Shared, K: PartialEq>(&self, offset: u64, key: impl Fn(&T) -> K) -> Result<T> {
        let mut last: T = self.read(offset)?;
        for _ in 1..PAGE_READS {
            let again: T = self.read(offset)?;
            let steady = key(&again) == key(&last);
            last = again;
            if steady {
                break;
            }
        }
        Ok(last)
    }

    /// Returns the number of entries that wait in the shared queue.
    fn waiting(&self, geometry: &Geometry) -> Result<u32> {
        let slots = self.bytes(geometry.queue(), geometry.queue_slots() as usize * size_of::<QueueSlot>())?;
        let slots = slots.chunks_exact(size_of::<QueueSlot>());
        Ok(slots.filter(|slot| is_waiting(word(&struct_of::<QueueSlot>(slot).state))).count() as u32)
    }

    /// Returns the number of entries in a completion ring, not counting snapshots.
    fn results(&self, geometry: &Geometry, worker: u32, ring: &RingControl) -> Result<u32> {
        let count = ring.waiting().min(geometry.ring_slots);
        if count == 0 {
            return Ok(0);
        }
        let len = size_of::<RingSlot>();
        let slots = self.bytes(geometry.result_slots(worker), geometry.ring_slots as usize * len)?;
        let head = ring.head.0.load(Ordering::Relaxed);
        let is_result = |place: &u32| {
            let at = (head.wrapping_add(*place) % geometry.ring_slots) as usize * len;
            let RingSlot(words) = struct_of(&slots[at..at + len]);
            !ResultEntry::from_words(&words.map(AtomicU64::into_inner)).is_ok_and(|it| it.kind.is_snapshot())
        };
        Ok((0..count).filter(is_result).count() as u32)
    }

    /// Adds the memory of a region to `usage`.
    fn add_region(&self, geometry: &Geometry, region: u32, usage: &mut Usage) -> Result<()> {
        let head: RegionHead = self.read(geometry.region_head(region))?;
        let blocks = head.blocks.load(Ordering::Relaxed).min(geometry.table_len);
        let (peak, warm_before) = (head.high_water.load(Ordering::Relaxed), usage.warm);
        for first in (0..blocks).step_by(TABLE_READ as usize) {
            let count = TABLE_READ.min(blocks - first) as usize;
            let offset = geometry.table(region) + u64::from(first) * size_of::<BlockEntry>() as u64;
            let bytes = self.bytes(offset, count * size_of::<BlockEntry>())?;
            bytes.chunks_exact(size_of::<BlockEntry>()).for_each(|row| usage.add_block(&struct_of(row)));
        }
        usage.add_peak(peak, warm_before);
        Ok(())
    }
}

/// Returns a struct of the arena's layout, copied from its bytes.
fn struct_of<T: Shared>(bytes: &[u8]) -> T {
    assert_eq!(bytes.len(), size_of::<T>());
    // SAFETY: the length is that of a `T`, and any bytes are a valid `T` ([`Shared`]).
    unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }
}
