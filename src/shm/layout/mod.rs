//! The arena's layout: `#[repr(C)]` structs of atomics, which refer to each other by offsets, never by pointers.
//!
//! ```text
//! Header | bitmap | queue | ControlPage of worker 0, 1, ... | RegionHead 0 ... n | block table 0 ... n |
//! TraceHead of worker 0, 1, ... | data of region 0 ... n
//! ```
//! The queue, a [`QueueControl`] and its slots, exists only if the workers share one. With `n` workers, only worker `i`
//! allocates in region `i`; region `n` belongs to the main process and carries index batches. All shared words are
//! atomics, so it is well-defined to read words while a broken worker writes them. Readers check the values.

mod geometry;

use std::time::Duration;

pub use self::geometry::{Geometry, Needs};
use crate::config::AHEAD;
use crate::numbered::numbered_enum;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// The first word of an arena.
pub const MAGIC: u64 = 0x726c_6f61_6465_7201;
/// The version of this layout. It is stored last, so that an incomplete arena is never used.
pub const VERSION: u32 = 8;
/// Bytes per page. Blocks start at page boundaries; memory is reserved and released in whole pages.
pub const PAGE: u64 = 4096;
/// Number of counters of the main process; see `metrics.rs`.
pub const COUNTS: usize = 14;
/// Maximum number of bytes of an index batch that a worker shows on its status page.
pub const INDEX_BYTES: usize = 64;
/// Maximum number of bytes of the loader's name that the main process's page shows.
pub const NAME_BYTES: usize = 64;

/// A struct of the layout. It consists only of atomics, so any bytes are a valid value.
///
/// # Safety
/// The type is `repr(C)`, and every field is an atomic integer, an array of these, or another `Shared` type.
#[cfg(not(loom))]
pub unsafe trait Shared {}

// SAFETY: all fields are atomics or other `Shared` types.
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

/// A value on its own cache line.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Line<T>(pub T);

/// The header of the arena.
#[repr(C)]
#[derive(Debug)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// Number of workers.
    pub workers: AtomicU32,
    /// Number of slots of each ring.
    pub ring_slots: AtomicU32,
    /// Number of entries of each block table.
    pub table_len: AtomicU32,
    /// [`VERSION`], stored last.
    pub version: AtomicU32,
    /// Bytes of data of each region.
    pub region_len: AtomicU64,
    /// 1 if the workers share a queue, else 0.
    pub shared_queue: AtomicU32,
    /// The main process's sleeper. The doorbell wakes it.
    pub doorbell: Line<Sleeper>,
    /// Nonzero if the workers must leave.
    pub stop: Line<AtomicU32>,
    /// Selects the events that workers record for a trace: 0 for none, 1 for those of batches, 2 for those of batches
    /// and samples.
    pub trace: Line<AtomicU32>,
    pub(crate) main: MainPage,
}

/// The main process's status. It is written with relaxed stores under exclusive access to the iterator.
/// `rustloader top` reads it in another process.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct MainPage {
    /// A [`MainState`].
    pub(crate) state: AtomicU32,
    pub(crate) pid: AtomicU32,
    /// CLOCK_MONOTONIC time, in nanoseconds, at which the state began; in the three states of `next`, at which the call
    /// of `next` began.
    pub(crate) since_ns: AtomicU64,
    /// CLOCK_MONOTONIC time, in nanoseconds, of the start of the current wait, which the counters do not include yet.
    /// Valid only in the two waiting states.
    pub(crate) wait_since_ns: AtomicU64,
    /// CLOCK_MONOTONIC time, in nanoseconds, at which the iterator was created.
    pub(crate) started_ns: AtomicU64,
    pub(crate) prefetch_factor: AtomicU32,
    /// A combination of the bits [`IN_ORDER`], [`PERSISTENT`], [`PINNING`] and [`REMOTE`].
    pub(crate) options: AtomicU32,
    /// The number of the epoch's first task.
    pub(crate) epoch_task: AtomicU64,
    /// The number of the first task of the early epoch, or 0 without one.
    pub(crate) early_task: AtomicU64,
    /// Number of batches delivered before this epoch.
    pub(crate) epoch_batches: AtomicU64,
    /// The counters as of the end of the last wait or `next`, and that of steps as of the end of the last step.
    pub(crate) counts: [AtomicU64; COUNTS],
    /// The first bytes of the loader's name, zero-padded.
    pub(crate) name: [AtomicU64; NAME_BYTES / 8],
}

/// Option bit: batches are delivered in order.
pub const IN_ORDER: u32 = 1;
/// Option bit: the workers outlive the epoch.
pub const PERSISTENT: u32 = 2;
/// Option bit: there is a pin thread.
pub const PINNING: u32 = 4;
/// Option bit: the workers run on other machines.
pub const REMOTE: u32 = 8;

impl MainPage {
    /// Zeroes the page. Call it only while no iterator uses the arena.
    pub fn reset(&self) {
        for word in [&self.state, &self.pid, &self.prefetch_factor, &self.options] {
            word.store(0, Ordering::Relaxed);
        }
        let times = [&self.since_ns, &self.wait_since_ns, &self.started_ns];
        let epochs = [&self.epoch_task, &self.early_task, &self.epoch_batches];
        let words = times.into_iter().chain(epochs).chain(&self.counts).chain(&self.name);
        words.for_each(|word| word.store(0, Ordering::Relaxed));
    }

    /// Stores a loader's name, cut at a character boundary to at most [`NAME_BYTES`] bytes.
    pub fn set_name(&self, name: &str) {
        let end = (0..=name.len().min(NAME_BYTES)).rfind(|&end| name.is_char_boundary(end)).unwrap_or(0);
        let mut bytes = [0; NAME_BYTES];
        bytes[..end].copy_from_slice(&name.as_bytes()[..end]);
        for (word, bytes) in self.name.iter().zip(bytes.as_chunks().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
    }

    /// Returns the loader's name, or the start of a long name.
    pub fn name(&self) -> String {
        let bytes = self.name.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes());
        let bytes: Vec<u8> = bytes.take_while(|&byte| byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

numbered_enum! {
    /// The activity of the main process.
    pub enum MainState {
        /// No iterator uses the arena.
        Unused = 0 => "unused",
        /// Starting the workers or an epoch.
        Starting = 1 => "starting",
        /// In `next`, not waiting.
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

/// The state of a side that can sleep: see `doorbell.rs`.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Sleeper {
    /// Number of this side's threads that sleep or are about to sleep. Each thread adds 1 before it sleeps and
    /// subtracts 1 afterwards. A thread whose process is killed while it sleeps stays counted.
    pub asleep: AtomicU32,
    /// Number of times that the bell was rung, wrapping. Workers wait on this word with a futex.
    pub bell: AtomicU32,
}

/// The counters of one ring; see `ring.rs`.
#[repr(C)]
#[derive(Debug, Default)]
pub struct RingControl {
    /// Number of entries published so far, wrapping; written only by the producer.
    pub tail: Line<AtomicU32>,
    /// Number of entries taken so far, wrapping; written only by the consumer.
    pub head: Line<AtomicU32>,
}

impl RingControl {
    /// Returns the number of entries that wait in the ring.
    pub fn waiting(&self) -> u32 {
        let (tail, head) = (self.tail.0.load(Ordering::Relaxed), self.head.0.load(Ordering::Relaxed));
        let count = tail.wrapping_sub(head);
        // The two loads are not one atomic step, so the head may seem to be ahead of the tail.
        if count > u32::MAX / 2 { 0 } else { count }
    }
}

/// Number of words in a slot of a ring.
pub const SLOT_WORDS: usize = 8;

/// One slot of a ring.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct RingSlot(pub [AtomicU64; SLOT_WORDS]);

/// The head of the queue that workers share; see `queue.rs`.
#[repr(C)]
#[derive(Debug, Default)]
pub struct QueueControl {
    /// Position at which the search for the next entry starts. It is only a hint, because a worker may die between
    /// claiming an entry and moving the head.
    pub head: Line<AtomicU64>,
    /// The workers' sleeper. All workers wait on its bell.
    pub sleeper: Line<Sleeper>,
}

/// One slot of the shared queue.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct QueueSlot {
    /// The entry's position and its holder; see `queue.rs`.
    pub state: AtomicU64,
    /// The entry.
    pub entry: [AtomicU64; SLOT_WORDS],
}

/// A worker's status. Only the worker writes it, or its link if it runs on another machine. Error messages, stall
/// reports and statistics read it.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct StatusPage {
    /// A `WorkerState`.
    pub(crate) state: AtomicU32,
    /// The worker's process ID, once it has started.
    pub pid: AtomicU32,
    /// CLOCK_MONOTONIC time, in nanoseconds, at which the state began.
    pub(crate) since_ns: AtomicU64,
    /// The number of the current or last task.
    pub(crate) task: AtomicU64,
    /// Number of tasks and resume messages answered so far.
    pub(crate) tasks_done: AtomicU64,
    /// Nanoseconds spent in each state so far, indexed by the number of the state.
    pub(crate) spent_ns: [AtomicU64; WorkerState::COUNT],
    /// Number of batches and errors sent so far.
    pub(crate) sent: AtomicU64,
    /// Number of leaves that were sent in place, without a copy.
    pub(crate) adopted: AtomicU64,
    /// Number of bytes of the leaves that `adopted` counts.
    pub(crate) adopted_bytes: AtomicU64,
    /// Number of bytes of the largest recent batch, including its message.
    pub(crate) largest: AtomicU64,
    /// Number of bytes that the worker is reserving. The headroom checks of other workers subtract them.
    pub(crate) promised: AtomicU64,
    /// CLOCK_MONOTONIC time, in nanoseconds, at which the current or last task was taken, or at which the last batch of
    /// a replay began.
    pub(crate) task_since_ns: AtomicU64,
    /// Device of the worker's file for stack dumps; its inode follows.
    pub(crate) stack_device: AtomicU64,
    pub(crate) stack_inode: AtomicU64,
    /// A `StackFile`; stored after the device and inode of the file.
    pub(crate) stack: AtomicU32,
    /// A [`Terminated`].
    pub(crate) terminated: AtomicU32,
    /// The first bytes of the encoded index batch of `index_task`, zero-padded.
    pub(crate) index: [AtomicU64; INDEX_BYTES / 8],
    /// Length in bytes of that encoded index batch; 0 if it was sent as a pickle.
    pub(crate) index_len: AtomicU64,
    /// The number of the task to which `index` belongs, plus one; 0 for none. Stored after `index` and `index_len`.
    pub(crate) index_task: AtomicU64,
    /// CPU time of the process, in nanoseconds, when it first left `Starting`; 0 before.
    pub start_cpu_ns: AtomicU64,
    /// Nanoseconds for which the worker's main thread had waited for a core when `start_cpu_ns` was measured; 0 if
    /// unknown. Stored before `start_cpu_ns`.
    pub start_queued_ns: AtomicU64,
    /// CPU time of the process, in nanoseconds, during the measured fetches.
    pub(crate) fetch_cpu_ns: AtomicU64,
    /// Wall time of these fetches, in nanoseconds. Stored before `fetch_cpu_ns`.
    pub(crate) fetch_measured_ns: AtomicU64,
    /// The position of the current sample in the index batch of `task`, plus one; 0 if unknown; or [`NOT_BEGUN`].
    pub(crate) place: AtomicU64,
}

/// `StatusPage::place` of a worker that has not begun `task`, because it is still starting an epoch or replaying
/// earlier batches.
pub(crate) const NOT_BEGUN: u64 = u64::MAX;

impl StatusPage {
    /// Returns true if the worker has begun `task` and not finished it. If the worker has died, the task may then be
    /// the cause.
    pub fn has_begun(&self) -> bool {
        let has_no_task = [WorkerState::Starting, WorkerState::Idle].map(|state| state as u32).contains(&self.state());
        !has_no_task
            && self.task_since_ns.load(Ordering::Relaxed) != 0
            && self.place.load(Ordering::Relaxed) != NOT_BEGUN
    }

    /// Returns the longest idle time that is normal for this worker: the time that its last batch took, but at least
    /// [`AHEAD`]. On a busy machine both batches and waits become longer.
    pub fn long_idle(&self) -> Duration {
        let [since, taken] = [&self.since_ns, &self.task_since_ns].map(|at| at.load(Ordering::Relaxed));
        AHEAD.max(Duration::from_nanos(since.saturating_sub(taken)))
    }

    /// Returns the number of the state.
    pub fn state(&self) -> u32 {
        self.state.load(Ordering::Relaxed)
    }

    /// Zeroes the page. Call it only while no process uses it.
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
    /// Whether a SIGTERM has reached this worker, and whether it has reached all workers; see `worker/terminate.rs`.
    pub enum Terminated {
        /// This worker has not received one.
        No = 0 => "no",
        /// This worker has received one, and does not know whether others have.
        Alone = 1 => "alone",
        /// All workers have received one.
        Group = 2 => "group",
    }
}

impl Terminated {
    /// Returns the name of a value from a status page; an unknown value counts as `No`.
    pub fn name_of(value: u32) -> &'static str {
        Self::of_number(value).unwrap_or(Self::No).name()
    }
}

/// The file into which a worker dumps its stack when the main process signals it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StackFile {
    /// The worker has not created the file yet.
    NotYet,
    /// The system refused to create the file, or Python's faulthandler refused to use it.
    Refused,
    /// The program has its own handler for the signal.
    SignalTaken,
    /// The worker's descriptor of the file.
    Descriptor(i32),
}

impl StackFile {
    /// The values without a descriptor. Their encodings are smaller than those of descriptors.
    const NUMBERED: [Self; 3] = [Self::NotYet, Self::Refused, Self::SignalTaken];

    /// Encodes the value for the status page.
    pub fn to_u32(self) -> u32 {
        match self {
            Self::Descriptor(fd) => fd as u32 + Self::NUMBERED.len() as u32,
            other => Self::NUMBERED.iter().position(|it| *it == other).unwrap_or(0) as u32,
        }
    }

    /// Decodes a value from a status page. Every number is a valid encoding.
    pub fn from_u32(value: u32) -> Self {
        match Self::NUMBERED.get(value as usize) {
            Some(numbered) => *numbered,
            None => Self::Descriptor((value - Self::NUMBERED.len() as u32) as i32),
        }
    }
}

numbered_enum! {
    /// The activity of a worker.
    pub enum WorkerState {
        /// Before the loop over an epoch's tasks: seeding, `worker_init_fn`, `iter(dataset)`.
        Starting = 0 => "starting",
        /// Waiting for a task.
        Idle = 1 => "idle",
        /// In the dataset.
        Fetch = 2 => "fetch",
        /// In `collate_fn`.
        Collate = 3 => "collate",
        /// Encoding the batch into the arena.
        Pack = 4 => "pack",
        /// Publishing the result and ringing the main process's bell.
        Publish = 5 => "publish",
        /// No longer using the arena.
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
    /// The activity of the worker, its task and its counters.
    pub status: StatusPage,
    /// The worker's sleeper, whose bell the main process rings.
    pub sleeper: Line<Sleeper>,
    /// The submission ring, from the main process to the worker.
    pub tasks: RingControl,
    /// The completion ring, from the worker to the main process.
    pub results: RingControl,
}

/// The head of a worker's ring of trace events; its slots follow it. Its counters continue from trace to trace and from
/// process to process: nothing resets them.
#[repr(C)]
#[derive(Debug, Default)]
pub struct TraceHead {
    /// The ring, from the worker to the main process.
    pub ring: RingControl,
    /// Number of events that were lost because the ring was full; written only by the worker.
    pub lost: Line<AtomicU64>,
}

/// The head of one region.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct RegionHead {
    /// The ID of the first block on the return stack, plus one; 0 if the stack is empty.
    pub returned: AtomicU32,
    /// Number of entries of the block table that are in use, with or without a block; written only by the owner.
    pub blocks: AtomicU32,
    /// Peak number of bytes with pages since the current owner started; written only by the owner.
    pub(crate) high_water: AtomicU64,
}

/// One entry of a block table.
#[repr(C)]
#[derive(Debug, Default)]
pub struct BlockEntry {
    /// The state: the bits that `block.rs` defines.
    pub state: AtomicU32,
    /// The ID of the next block on the return stack, plus one; 0 at the end of the stack.
    pub next: AtomicU32,
    /// Offset of the block in its region's data, a multiple of [`PAGE`].
    pub offset: AtomicU64,
    /// Number of bytes up to the next block, with or without pages; 0 for an entry without a block.
    pub capacity: AtomicU64,
    /// Number of bytes with pages, counted from the block's start.
    pub warm: AtomicU64,
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn a_stack_file_is_read_as_it_was_written() {
        for file in [StackFile::NotYet, StackFile::Refused, StackFile::SignalTaken, StackFile::Descriptor(0)] {
            assert_eq!(StackFile::from_u32(file.to_u32()), file);
        }
        assert!(matches!(StackFile::from_u32(u32::MAX), StackFile::Descriptor(fd) if fd < 0));
    }

    #[test]
    fn a_name_is_cut_between_two_characters() {
        let page = MainPage::default();
        let long = format!("{}\u{e9}\u{e9}", "a".repeat(63));
        for (name, shown) in [("train", "train"), (long.as_str(), &long[..63]), ("b", "b"), ("", "")] {
            page.set_name(name);
            assert_eq!(page.name(), shown);
        }
        page.set_name("train");
        page.reset();
        assert_eq!(page.name(), "");
    }
}
