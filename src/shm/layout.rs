//! The arena's layout: `#[repr(C)]` structs of atomics, and offsets, never pointers.
//!
//! ```text
//! Header | bitmap | queue | ControlPage of worker 0, 1, ... | RegionHead 0 ... n | block table 0 ... n | data of region 0 ... n
//! ```
//! The queue is there only if the engine's workers share one: [`QueueControl`] and its slots.
//! Worker `i` alone allocates in region `i < n`; region `n` belongs to the main process and carries index batches.
//! All shared words are atomics: reading what a broken worker wrote is defined, and its users check the meaning.

use crate::config::{AHEAD, BYTES_PER_BLOCK, REGION_MIN, TABLE_MAX, TABLE_MIN, TASKS_MAX, WORKERS_MAX};
use crate::error::{Error, Result};
use crate::numbered::numbered_enum;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// The first word of an arena.
pub const MAGIC: u64 = 0x726c_6f61_6465_7201;
/// The version of this layout, stored last, so that an incomplete arena is never used.
pub const VERSION: u32 = 6;
/// Bytes of a page: blocks begin on pages, and pages are reserved and released.
pub const PAGE: u64 = 4096;
/// Counters of the main process: see `metrics.rs`.
pub const COUNTS: usize = 14;
/// Bytes of an index batch that a worker shows on its status page.
pub const INDEX_BYTES: usize = 64;

/// A struct of the layout: atomics alone, so any bytes are a valid value.
///
/// # Safety
/// It is `repr(C)`, and every field is an atomic integer, an array of these, or such a struct.
#[cfg(not(loom))]
pub unsafe trait Shared {}

// SAFETY: atomics and such structs alone.
#[cfg(not(loom))]
unsafe impl Shared for Header {}
// SAFETY: as above.
#[cfg(not(loom))]
unsafe impl Shared for ControlPage {}
// SAFETY: as above.
#[cfg(not(loom))]
unsafe impl Shared for RegionHead {}
// SAFETY: as above.
#[cfg(not(loom))]
unsafe impl Shared for BlockEntry {}
// SAFETY: as above.
#[cfg(not(loom))]
unsafe impl Shared for QueueSlot {}
// SAFETY: as above.
#[cfg(not(loom))]
unsafe impl Shared for RingSlot {}

/// A value on a cache line of its own.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Line<T>(pub T);

/// The head of the arena.
#[repr(C)]
#[derive(Debug)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// Number of workers.
    pub workers: AtomicU32,
    /// Slots of each ring.
    pub ring_slots: AtomicU32,
    /// Entries of each block table.
    pub table_len: AtomicU32,
    /// [`VERSION`], stored last.
    pub version: AtomicU32,
    /// Bytes of data of each region.
    pub region_len: AtomicU64,
    /// 1 if the workers share a queue, else 0.
    pub shared_queue: AtomicU32,
    /// The main process's side of the doorbell.
    pub doorbell: Line<Sleeper>,
    /// Not 0 when the workers must leave.
    pub stop: Line<AtomicU32>,
    pub(crate) main: MainPage,
}

/// The main process's status: plain stores under exclusive access to the iterator, read only by `rustloader top`.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct MainPage {
    /// A [`MainState`].
    pub(crate) state: AtomicU32,
    pub(crate) pid: AtomicU32,
    /// Monotonic nanoseconds at which the state began; for both kinds of waiting, the start of that `next`.
    pub(crate) since_ns: AtomicU64,
    /// Monotonic nanoseconds at which the wait not yet in the counters began; valid in both kinds of waiting.
    pub(crate) wait_since_ns: AtomicU64,
    /// Monotonic nanoseconds at which the iterator was made.
    pub(crate) started_ns: AtomicU64,
    pub(crate) prefetch_factor: AtomicU32,
    /// Bits of [`IN_ORDER`], [`PERSISTENT`] and [`PINNING`].
    pub(crate) options: AtomicU32,
    /// The number of the epoch's first task.
    pub(crate) epoch_task: AtomicU64,
    /// Batches delivered before this epoch.
    pub(crate) epoch_batches: AtomicU64,
    /// The counters at the end of the last `next`; those of waiting, at the end of the last wait.
    pub(crate) counts: [AtomicU64; COUNTS],
}

/// Batches are delivered in order.
pub const IN_ORDER: u32 = 1;
/// The workers outlive the epoch.
pub const PERSISTENT: u32 = 2;
/// There is a pin thread.
pub const PINNING: u32 = 4;

impl MainPage {
    /// Zeroes the page: no iterator uses the arena.
    pub fn reset(&self) {
        for word in [&self.state, &self.pid, &self.prefetch_factor, &self.options] {
            word.store(0, Ordering::Relaxed);
        }
        let times =
            [&self.since_ns, &self.wait_since_ns, &self.started_ns, &self.epoch_task, &self.epoch_batches];
        times.into_iter().chain(&self.counts).for_each(|word| word.store(0, Ordering::Relaxed));
    }
}

numbered_enum! {
    /// What the main process is doing.
    pub enum MainState {
        /// No iterator uses the arena.
        Unused = 0 => "unused",
        /// Starting the workers, or beginning an epoch.
        Starting = 1 => "starting",
        /// In `next`, at work.
        Next = 2 => "next",
        /// In `next`, waiting for the first batch of an epoch.
        First = 3 => "first",
        /// In `next`, waiting for another batch.
        Waiting = 4 => "waiting",
        /// Between two `next` calls.
        Step = 5 => "step",
        /// Between two epochs.
        Between = 6 => "between",
    }
}

impl MainState {
    /// Decodes a state; an unknown number is `Unused`.
    pub fn from_u32(value: u32) -> Self {
        Self::of_number(value).unwrap_or(Self::Unused)
    }
}

/// A side that can sleep: see `doorbell.rs`.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Sleeper {
    /// Number of this side's processes that sleep or are about to. Each adds and subtracts itself; one that is killed in
    /// its sleep stays counted.
    pub asleep: AtomicU32,
    /// Counts the rings; the word that a worker's futex waits on.
    pub bell: AtomicU32,
}

/// The counters of one ring; see `ring.rs`.
#[repr(C)]
#[derive(Debug, Default)]
pub struct RingControl {
    /// Entries published so far, wrapping; written by the producer alone.
    pub tail: Line<AtomicU32>,
    /// Entries taken so far, wrapping; written by the consumer alone.
    pub head: Line<AtomicU32>,
}

/// Words of a ring's slot.
pub const SLOT_WORDS: usize = 8;

/// One entry of a ring.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct RingSlot(pub [AtomicU64; SLOT_WORDS]);

/// The head of the queue that workers share; see `queue.rs`.
#[repr(C)]
#[derive(Debug, Default)]
pub struct QueueControl {
    /// Where to look for the next entry: a hint, because a worker may end between taking an entry and moving it.
    pub head: Line<AtomicU64>,
    /// The side of the workers, all on one bell.
    pub sleeper: Line<Sleeper>,
}

/// One entry of the shared queue.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct QueueSlot {
    /// The entry's position and who holds it; see `queue.rs`.
    pub state: AtomicU64,
    /// The entry.
    pub entry: [AtomicU64; SLOT_WORDS],
}

/// A worker's status: plain stores by the worker alone, read by errors, stall reports and statistics.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct StatusPage {
    /// A `WorkerState`.
    pub(crate) state: AtomicU32,
    /// The worker's process id, once it has started.
    pub pid: AtomicU32,
    /// Monotonic nanoseconds at which the state began.
    pub(crate) since_ns: AtomicU64,
    /// The current or last task.
    pub(crate) task: AtomicU64,
    /// Tasks answered so far.
    pub(crate) tasks_done: AtomicU64,
    /// Nanoseconds spent in each state so far, by the number of the state.
    pub(crate) spent_ns: [AtomicU64; WorkerState::COUNT],
    /// Batches and errors sent so far.
    pub(crate) sent: AtomicU64,
    /// Leaves sent from where they lay, without a copy, and their bytes.
    pub(crate) adopted: AtomicU64,
    pub(crate) adopted_bytes: AtomicU64,
    /// Bytes of the largest recent batch and its message.
    pub(crate) largest: AtomicU64,
    /// Bytes that the worker is reserving, as announced to the headroom checks of others.
    pub(crate) promised: AtomicU64,
    /// Monotonic nanoseconds at which the current or last task was taken, or the last batch of a replay began.
    pub(crate) task_since_ns: AtomicU64,
    /// Device and inode of the worker's file for stack dumps.
    pub(crate) stack_device: AtomicU64,
    pub(crate) stack_inode: AtomicU64,
    /// A `StackFile`; stored after its device and inode.
    pub(crate) stack: AtomicU32,
    /// A [`Terminated`].
    pub(crate) terminated: AtomicU32,
    /// The first bytes of the index batch of `index_task`, encoded and zero-padded.
    pub(crate) index: [AtomicU64; INDEX_BYTES / 8],
    /// Bytes of that index batch; 0 for a pickle.
    pub(crate) index_len: AtomicU64,
    /// The task of `index` plus one, or 0 for none. Stored last.
    pub(crate) index_task: AtomicU64,
    /// CPU nanoseconds of the process when it left its first `Starting`; 0 before.
    pub start_cpu_ns: AtomicU64,
    /// Nanoseconds that its main thread had waited for a core by then; 0 if unknown. Stored first.
    pub start_queued_ns: AtomicU64,
    /// CPU nanoseconds of the process during the measured fetches.
    pub(crate) fetch_cpu_ns: AtomicU64,
    /// Nanoseconds of wall time of these fetches. Stored first.
    pub(crate) fetch_measured_ns: AtomicU64,
    /// The place of the current sample in the index batch of `task`, plus one; 0 if unknown.
    pub(crate) place: AtomicU64,
}

impl StatusPage {
    /// How long an idle worker waits usually: as long as its last batch took, or [`AHEAD`] if that is longer. On a busy machine both
    /// become longer.
    pub fn long_idle(&self) -> Duration {
        let [since, taken] = [&self.since_ns, &self.task_since_ns].map(|at| at.load(Ordering::Relaxed));
        AHEAD.max(Duration::from_nanos(since.saturating_sub(taken)))
    }

    /// The number of the state.
    pub fn state(&self) -> u32 {
        self.state.load(Ordering::Relaxed)
    }

    /// Zeroes the page: no process uses it.
    pub fn reset(&self) {
        for word in [&self.state, &self.pid, &self.stack, &self.terminated] {
            word.store(0, Ordering::Relaxed);
        }
        let words = [
            &self.since_ns,
            &self.task,
            &self.task_since_ns,
            &self.tasks_done,
            &self.sent,
            &self.adopted,
            &self.adopted_bytes,
            &self.largest,
            &self.promised,
            &self.index_task,
            &self.start_cpu_ns,
            &self.start_queued_ns,
            &self.fetch_cpu_ns,
            &self.fetch_measured_ns,
            &self.place,
        ];
        words.into_iter().chain(&self.spent_ns).for_each(|word| word.store(0, Ordering::Relaxed));
    }
}

numbered_enum! {
    /// What a worker knows of a SIGTERM that it survives: see `worker/terminate.rs`.
    pub enum Terminated {
        /// None received.
        No = 0 => "no",
        /// One received, as far as it knows by this worker alone.
        Alone = 1 => "alone",
        /// All workers received it.
        Group = 2 => "group",
    }
}

impl Terminated {
    /// The name of a number on a status page; an unknown number is `No`.
    pub fn name_of(value: u32) -> &'static str {
        Self::of_number(value).unwrap_or(Self::No).name()
    }
}

/// The file into which a worker dumps its stack when the main process signals it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StackFile {
    /// The worker has not created it yet.
    NotYet,
    /// The system, or Python's faulthandler, refused it.
    Refused,
    /// The user has a handler for the signal.
    SignalTaken,
    /// The number of the worker's descriptor.
    Descriptor(i32),
}

impl StackFile {
    /// The values numbered below the descriptors.
    const NUMBERED: [Self; 3] = [Self::NotYet, Self::Refused, Self::SignalTaken];

    /// Encodes it for the status page.
    pub fn to_u32(self) -> u32 {
        match self {
            Self::Descriptor(fd) => fd as u32 + Self::NUMBERED.len() as u32,
            other => Self::NUMBERED.iter().position(|it| *it == other).unwrap_or(0) as u32,
        }
    }

    /// Decodes any number of a status page.
    pub fn from_u32(value: u32) -> Self {
        match Self::NUMBERED.get(value as usize) {
            Some(numbered) => *numbered,
            None => Self::Descriptor((value - Self::NUMBERED.len() as u32) as i32),
        }
    }
}

numbered_enum! {
    /// What a worker is doing.
    pub enum WorkerState {
        /// Before its loop, in the first or a later epoch: seeding, `worker_init_fn`, `iter(dataset)`.
        Starting = 0 => "starting",
        /// Waiting for a task.
        Idle = 1 => "idle",
        /// In the dataset.
        Fetch = 2 => "fetch",
        /// In `collate_fn`.
        Collate = 3 => "collate",
        /// Encoding the batch into the arena.
        Pack = 4 => "pack",
        /// Publishing the result and ringing.
        Publish = 5 => "publish",
        /// Past its last use of the arena.
        Left = 6 => "left",
    }
}

impl WorkerState {
    /// Number of states.
    pub const COUNT: usize = Self::Left as usize + 1;

    /// Decodes a state; an unknown number is `Starting`.
    pub fn from_u32(value: u32) -> Self {
        Self::of_number(value).unwrap_or(Self::Starting)
    }
}

/// The control page of one worker; its rings' slots follow it.
#[repr(C)]
#[derive(Debug, Default)]
pub struct ControlPage {
    /// What the worker does.
    pub status: StatusPage,
    /// The worker's side of its task ring, rung by the main process.
    pub sleeper: Line<Sleeper>,
    /// The submission ring, main to worker.
    pub tasks: RingControl,
    /// The completion ring, worker to main.
    pub results: RingControl,
}

/// The head of one region.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct RegionHead {
    /// The return stack's first block plus one; 0 when it is empty.
    pub returned: AtomicU32,
    /// Entries of the block table in use; written by the owner alone.
    pub blocks: AtomicU32,
    /// Peak of the bytes with pages under this owner; written by the owner alone.
    pub(crate) high_water: AtomicU64,
}

/// One entry of a block table.
#[repr(C)]
#[derive(Debug, Default)]
pub struct BlockEntry {
    /// The bits of `block.rs`.
    pub state: AtomicU32,
    /// The next block on the return stack plus one, 0 at its end.
    pub next: AtomicU32,
    /// Offset of the block in its region's data, a multiple of [`PAGE`].
    pub offset: AtomicU64,
    /// Bytes up to the next block, with or without pages.
    pub capacity: AtomicU64,
    /// Bytes from the block's begin that have pages.
    pub warm: AtomicU64,
}

/// Requirements of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Number of workers, at least 1.
    pub workers: u32,
    /// Limit of outstanding tasks.
    pub outstanding: u32,
    /// Whether the workers share a queue.
    pub shared_queue: bool,
    /// Whether workers send snapshots beside their results.
    pub snapshots: bool,
}

/// The sizes of an arena, from which both sides compute every offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Number of workers, at least 1.
    pub workers: u32,
    /// Slots of each ring: a power of two.
    pub ring_slots: u32,
    /// Whether the workers share a queue, which has as many slots as a ring.
    pub shared_queue: bool,
    /// Entries of each block table.
    pub table_len: u32,
    /// Bytes of data of each region, a multiple of [`PAGE`].
    pub region_len: u64,
    /// Bytes of the whole arena.
    pub total: u64,
}

const fn round_up(value: u64, to: u64) -> u64 {
    value.div_ceil(to) * to
}

/// Slots of a ring for `outstanding` tasks and an epoch's control messages. Of a worker's snapshots one comes with each
/// result, two at the begin and at the end of an epoch, one for an error, and one at the begin of the next epoch.
const fn ring_slots_for(outstanding: u32, snapshots: bool) -> u32 {
    let results = outstanding + 4;
    (if snapshots { 2 * results } else { results }).next_power_of_two()
}

fn too_many(workers: u32, outstanding: u32, limit: String) -> Error {
    let (workers, prefetch_factor) = (u64::from(workers), u64::from(outstanding / workers));
    Error::TooMany { workers, prefetch_factor, limit }
}

impl Geometry {
    /// The geometry of an arena of at most `total` bytes; an error if that leaves less than 1 MiB of data per region.
    pub fn new(total: u64, needs: Needs) -> Result<Self> {
        let Needs { workers, outstanding, shared_queue, .. } = needs;
        let ring_slots = Self::ring_slots_of(needs)?;
        Self::lay_out(total, workers, ring_slots, shared_queue).ok_or_else(|| {
            let limit = format!(
                "they do not fit into the {total} bytes of address space that are there (RLIMIT_AS, `ulimit -v`)"
            );
            too_many(workers, outstanding, limit)
        })
    }

    /// `None` if less than 1 MiB of data per region remains.
    fn lay_out(total: u64, workers: u32, ring_slots: u32, shared_queue: bool) -> Option<Self> {
        let regions = u64::from(workers) + 1;
        let table_len = (total / regions / BYTES_PER_BLOCK).clamp(TABLE_MIN, TABLE_MAX) as u32;
        let geometry = Self { workers, ring_slots, shared_queue, table_len, region_len: 0, total };
        let region_len = total.saturating_sub(geometry.data_start()) / regions / PAGE * PAGE;
        (region_len >= REGION_MIN).then_some(Self { region_len, ..geometry })
    }

    /// Slots of each ring.
    pub fn ring_slots_of(needs: Needs) -> Result<u32> {
        let Needs { workers, outstanding, snapshots, .. } = needs;
        if workers == 0 {
            return Err(Error::usage("an arena for no workers"));
        }
        if workers > WORKERS_MAX || outstanding > TASKS_MAX {
            let limit =
                format!("the engine has room for {WORKERS_MAX} workers and {TASKS_MAX} batches under way");
            return Err(too_many(workers, outstanding, limit));
        }
        Ok(ring_slots_for(outstanding, snapshots))
    }

    /// The geometry of a file of `total` bytes, given its header; an error if the header cannot be valid.
    pub fn of_file(total: u64, workers: u32, ring_slots: u32, shared_queue: bool) -> Result<Self> {
        let possible = (1..=WORKERS_MAX).contains(&workers)
            && ring_slots.is_power_of_two()
            && (ring_slots_for(0, false)..=ring_slots_for(TASKS_MAX, true)).contains(&ring_slots);
        let geometry = possible.then(|| Self::lay_out(total, workers, ring_slots, shared_queue)).flatten();
        geometry.ok_or_else(|| {
            Error::corrupt(format!(
                "a file of {total} bytes whose header says {workers} workers and rings of {ring_slots} slots"
            ))
        })
    }

    /// One region per worker and the main process's.
    pub fn regions(&self) -> u32 {
        self.workers + 1
    }

    /// Batches of one worker that need warm pages at a time: those outstanding, the one in work, the one that the user
    /// holds, and a spare.
    pub fn batches_under_way(&self) -> u64 {
        u64::from(self.ring_slots / self.workers) + 3
    }

    /// The main process's region.
    pub fn main_region(&self) -> u32 {
        self.workers
    }

    /// Words of the bitmap of rings that hold results.
    pub fn bitmap_words(&self) -> u32 {
        self.workers.div_ceil(64)
    }

    /// Offset of the bitmap.
    pub fn bitmap(&self) -> u64 {
        round_up(size_of::<Header>() as u64, 64)
    }

    /// Slots of the shared queue: 0 without one.
    pub fn queue_slots(&self) -> u32 {
        if self.shared_queue { self.ring_slots } else { 0 }
    }

    /// Offset of the [`QueueControl`].
    pub fn queue_control(&self) -> u64 {
        round_up(self.bitmap() + u64::from(self.bitmap_words()) * 8, 64)
    }

    /// Offset of the shared queue's slots.
    pub fn queue(&self) -> u64 {
        let control = if self.shared_queue { size_of::<QueueControl>() as u64 } else { 0 };
        self.queue_control() + control
    }

    fn controls(&self) -> u64 {
        round_up(self.queue() + u64::from(self.queue_slots()) * size_of::<QueueSlot>() as u64, PAGE)
    }

    fn control_len(&self) -> u64 {
        round_up(
            size_of::<ControlPage>() as u64 + 2 * u64::from(self.ring_slots) * size_of::<RingSlot>() as u64,
            128,
        )
    }

    /// Offset of a worker's [`ControlPage`].
    pub fn control(&self, worker: u32) -> u64 {
        self.controls() + u64::from(worker) * self.control_len()
    }

    /// Offset of a worker's task slots.
    pub fn task_slots(&self, worker: u32) -> u64 {
        self.control(worker) + size_of::<ControlPage>() as u64
    }

    /// Offset of a worker's result slots.
    pub fn result_slots(&self, worker: u32) -> u64 {
        self.task_slots(worker) + u64::from(self.ring_slots) * size_of::<RingSlot>() as u64
    }

    fn region_heads(&self) -> u64 {
        self.controls() + u64::from(self.workers) * self.control_len()
    }

    /// Offset of a region's [`RegionHead`].
    pub fn region_head(&self, region: u32) -> u64 {
        self.region_heads() + u64::from(region) * size_of::<RegionHead>() as u64
    }

    fn tables(&self) -> u64 {
        round_up(self.region_head(self.regions()), PAGE)
    }

    /// Offset of a region's block table.
    pub fn table(&self, region: u32) -> u64 {
        self.tables() + u64::from(region) * u64::from(self.table_len) * size_of::<BlockEntry>() as u64
    }

    fn data_start(&self) -> u64 {
        round_up(self.table(self.regions()), PAGE)
    }

    /// Offset of a region's data.
    pub fn data(&self, region: u32) -> u64 {
        self.data_start() + u64::from(region) * self.region_len
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_overlap_and_are_aligned() {
        let sizes = [(1, 2, false), (1, 2, true), (3, 6, true), (64, 128, false), (1024, 4096, true)];
        for ((workers, outstanding, shared_queue), snapshots) in
            sizes.into_iter().flat_map(|sizes| [(sizes, false), (sizes, true)])
        {
            let needs = Needs { workers, outstanding, shared_queue, snapshots };
            let g = Geometry::new(64 << 30, needs).unwrap();
            assert!(g.ring_slots >= if snapshots { 2 * outstanding + 8 } else { outstanding + 4 });
            assert!(size_of::<Header>() as u64 <= g.bitmap());
            assert!(g.bitmap() + u64::from(g.bitmap_words()) * 8 <= g.queue_control());
            assert_eq!((g.queue_control() % 64, g.queue() % 64), (0, 0));
            let (control, slots) = (g.queue() - g.queue_control(), u64::from(g.queue_slots()));
            assert_eq!((control > 0, slots > 0), (shared_queue, shared_queue));
            assert!(
                !shared_queue
                    || control >= size_of::<QueueControl>() as u64 && slots > u64::from(outstanding)
            );
            assert!(g.queue() + slots * size_of::<QueueSlot>() as u64 <= g.control(0));
            assert_eq!(g.control(0) % 128, 0);
            assert_eq!(g.task_slots(0) % 64, 0);
            assert!(g.result_slots(0) + u64::from(g.ring_slots) * 64 <= g.control(1));
            assert_eq!(g.region_head(0) % 64, 0);
            assert!(g.region_head(g.regions()) <= g.table(0));
            assert!(g.table(g.regions()) <= g.data(0));
            assert_eq!(g.data(0) % PAGE, 0);
            assert!(g.data(g.regions()) <= g.total);
        }
    }

    #[test]
    fn a_file_has_the_geometry_that_it_was_made_with() {
        for (workers, outstanding) in [(1, 0), (1, 2), (3, 6), (64, 128), (2, TASKS_MAX)] {
            for (shared_queue, snapshots) in [(false, false), (true, false), (false, true), (true, true)] {
                let needs = Needs { workers, outstanding, shared_queue, snapshots };
                let made = Geometry::new(64 << 30, needs).unwrap();
                let read = Geometry::of_file(made.total, workers, made.ring_slots, shared_queue);
                assert_eq!(read.unwrap(), made);
            }
        }
        for (workers, ring_slots) in [(0, 8), (WORKERS_MAX + 1, 8), (2, 0), (2, 2), (2, 12), (2, 1 << 27)] {
            assert!(matches!(
                Geometry::of_file(64 << 30, workers, ring_slots, false),
                Err(Error::Corrupt { .. })
            ));
        }
        assert!(matches!(Geometry::of_file(1 << 20, 2, 8, true), Err(Error::Corrupt { .. })));
    }

    #[test]
    fn a_stack_file_is_read_as_it_was_written() {
        for file in [StackFile::NotYet, StackFile::Refused, StackFile::SignalTaken, StackFile::Descriptor(0)]
        {
            assert_eq!(StackFile::from_u32(file.to_u32()), file);
        }
        assert!(matches!(StackFile::from_u32(u32::MAX), StackFile::Descriptor(fd) if fd < 0));
    }

    #[test]
    fn too_small_is_an_error() {
        let needs =
            |workers, outstanding| Needs { workers, outstanding, shared_queue: false, snapshots: false };
        let refused =
            |total, workers, outstanding| Geometry::new(total, needs(workers, outstanding)).unwrap_err();
        assert!(matches!(refused(1 << 30, 0, 8), Error::Usage { .. }));
        for (total, workers, outstanding) in
            [(1 << 20, 4, 8), (1 << 40, 2, 1 << 25), (1 << 40, 1 << 17, 1 << 18)]
        {
            let text = refused(total, workers, outstanding).to_string();
            let names = format!("num_workers={workers} with prefetch_factor={} is", outstanding / workers);
            assert!(text.starts_with(&names), "{text}");
        }
        assert!(Geometry::new(1 << 30, needs(16, 64)).is_ok());
    }
}
