//! Limits, sizes and intervals of the core, with units and reasons. A constant that belongs to one algorithm or layout
//! is defined next to it. `python/mod.rs` exports those that the Python side needs.

use std::ops::RangeInclusive;
use std::time::Duration;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

// --- Workers and batches ---

/// Maximum number of workers of one iterator: their numbers fit into 16 bits.
pub const WORKERS_MAX: u32 = 1 << 16;
/// Maximum number of outstanding batches of one iterator: each ring has room for all of them.
pub const TASKS_MAX: u32 = 1 << 24;
/// Tasks by which a shared queue may run ahead of its oldest unanswered task: this bounds the scheduler's table.
pub const QUEUE_SPAN: usize = 1 << 10;
/// Maximum of that span, in tasks: it grows with the window from [`QUEUE_SPAN`] up to this number.
pub const QUEUE_SPAN_MAX: usize = 1 << 16;
/// Timeouts of this many seconds (30 years) or more count as none: clocks would overflow.
pub const TIMEOUT_MAX: f64 = 1e9;

// --- Traces ---

/// Slots of a worker's ring of trace events, enough for a few hundred batches. `next` empties the ring at least once
/// per [`TRACE_DRAIN`], and between two calls of `next` a worker makes no more than the outstanding batches.
pub const TRACE_SLOTS: u32 = 1 << 12;
/// Interval after which `next` empties the rings of a trace again.
pub const TRACE_DRAIN: Duration = Duration::from_millis(2);
/// Bytes of events that are written to the file at a time.
pub const TRACE_BUFFER: usize = 256 << 10;

// --- Positions ---

/// Batches by which a position can go back from the last answer: 8 that a wrapper prefetches, and the one that its
/// `next` is about to return.
pub const BACK_BATCHES: usize = 9;
/// Answers that are kept for such positions: these batches, and the errors between them.
pub const BACK_ANSWERS: usize = 1 << 10;

// --- Arena ---

/// Bytes of the smallest arena: below this a loader falls back to torch's iterator.
pub const ARENA_MIN: u64 = GIB;
/// Bytes of an arena on a small machine, if the system allows that many: untouched pages cost nothing.
pub const ARENA_USUAL: u64 = 64 * GIB;
/// Bytes of the largest arena: the allocator's size classes end there.
pub const ARENA_MAX: u64 = 1 << 40;
/// Bytes of the smallest region of a worker: less cannot hold a batch.
pub const REGION_MIN: u64 = MIB;
/// Bytes of data per entry of a block table, within the next two limits.
pub const BYTES_PER_BLOCK: u64 = 16 * KIB;
/// Entries of the smallest block table.
pub const TABLE_MIN: u64 = 1 << 10;
/// Entries of the largest block table: 32 MiB of address space.
pub const TABLE_MAX: u64 = 1 << 20;
/// Arenas that the pool keeps for the next epoch: for example train, validation and test.
pub const POOL_ARENAS: usize = 4;
/// The pool's idle pages take at most the machine's memory divided by this.
pub const POOL_SHARE: u64 = 16;
/// The time that an unused arena stays in the pool: longer than the usual pause between two epochs. Workers that have
/// no task for this time also return their idle pages.
pub const POOL_IDLE: Duration = Duration::from_secs(10);
/// Bytes of the stack of the thread that releases unused arenas: it runs no Python code.
pub const CARETAKER_STACK: usize = 128 << 10;

// --- Allocator ---

/// Bytes per reservation for small blocks: one system call serves many.
pub const SLAB: u64 = 64 * KIB;
/// Bytes of a message or index that is sent regardless of free memory, so that an error can be reported.
pub const SMALL_MESSAGE: u64 = SLAB;
/// Allocations between two checks of the low-water marks of idle blocks.
pub const TRIM_WINDOW: u32 = 64;
/// Batches after which such a check comes early, if they took at least [`TRIM_AFTER`]: then the cost of fresh pages is
/// small in comparison.
pub const TRIM_BATCHES: u32 = 8;
/// See [`TRIM_BATCHES`].
pub const TRIM_AFTER: Duration = Duration::from_secs(1);
/// Windows of [`TRIM_WINDOW`] allocations after which idle blocks lose their pages: a single window may be unusual.
pub const TRIM_PATIENCE: u8 = 2;
/// Bytes from which a block is large: its pages cost more than a wake-up.
pub const LARGE: u64 = MIB;
/// The longest time that a worker waits for a large block that the loop holds, per [`LARGE`] bytes of the block: a
/// fraction of the cost of fresh pages.
pub const RETURN_WAIT: Duration = Duration::from_micros(200);
/// Size classes by which a warm block may exceed the requested size (up to 75 % larger).
pub const REUSE_CLASSES: usize = 3;
/// With varying sizes, idle pages may exceed the recent peak by the peak divided by this.
pub const IDLE_SHARE: u64 = 4;
/// Number of recent batches, the largest of which determines the pages that an idle worker keeps.
pub const RECENT_BATCHES: u64 = 16;
/// Bytes of fresh pages between two checks of available memory: a check reads files of /proc.
pub const HEADROOM_CHECK: u64 = 8 * MIB;
/// Bytes that a reservation leaves to other processes: its own size, within these limits.
pub const HEADROOM_MARGIN: RangeInclusive<u64> = MIB..=32 * MIB;
/// The longest time that a reservation waits for other workers' reservations if the sum of all is too large.
pub const RESERVATION_WAIT: Duration = Duration::from_secs(2);

// --- Messages and copies ---

/// Bytes from which a leaf has its own block. Smaller leaves are part of the message and are copied at delivery.
pub const INLINE_LIMIT: usize = 16 << 10;
/// Bytes from which a string or bytes object that occurs repeatedly in a batch is sent only once.
pub const ONCE_FROM: usize = 1 << 10;
/// Maximum depth of nested containers; deeper batches are pickled.
pub const MAX_DEPTH: usize = 64;
/// Maximum number of dimensions of a tensor; tensors with more are pickled.
pub const MAX_DIMS: usize = 16;
/// Bytes from which a copy uses streaming stores: smaller data stay in the cache.
pub const STREAM_FROM: usize = 2 << 20;
/// Bytes from which a copy releases the GIL: below that, releasing it costs more.
pub const DETACH_FROM: usize = 256 << 10;
/// Bytes of the largest buffer that is kept for the next message.
pub const BUFFER_KEPT: usize = 4 << 20;
/// Maximum number of steps in the search for an element that tensors with overlapping extents share.
pub const OVERLAP_STEPS: u32 = 1 << 15;
/// Tensors that share no element are copied separately if one block for all would exceed their size by this factor.
pub const STORAGE_WASTE: usize = 2;

// --- Waiting in the main process ---

/// The longest single wait. A signal that arrives just before is handled after it.
pub const WAIT_SLICE: Duration = Duration::from_millis(250);
/// The longest single wait without a pidfd or doorbell to end it.
pub const BLIND_SLICE: Duration = Duration::from_millis(20);
/// The time for which a waiting thread yields the processor before it sleeps: a wake-up costs more than most small
/// batches.
pub const YIELD_FOR: Duration = Duration::from_micros(20);
/// Interval between two checks for dead workers by a `next` that never blocks.
pub const DEATH_CHECK: Duration = Duration::from_millis(100);
/// Interval between two checks, during a shutdown, for the exit of a worker without a pidfd.
pub const EXIT_CHECK: Duration = Duration::from_millis(2);
/// The longest wait for the exit of a worker whose tied result cannot be opened: its sockets close before its process
/// is gone.
pub const TIED_EXIT: Duration = Duration::from_millis(50);
/// Time that a `next` must work for the next call to time its sampler: a thousand times the cost of a clock read.
pub const LONG_NEXT: Duration = Duration::from_micros(50);
/// Descriptors up to which ppoll is used: it is faster for few, and needs no extra descriptor.
pub const POLL_MAX: usize = 32;
/// Events per epoll_wait; the next call returns the others.
pub const EPOLL_EVENTS: usize = 64;
/// Bytes of the pin thread's stack: as many as Python's threads have on most systems, because it runs user code.
pub const PIN_STACK: usize = 8 << 20;

// --- Stuck workers ---

/// Interval between two checks for stuck workers.
pub const STALL_CHECK: Duration = Duration::from_millis(100);
/// Longest interval between two of these checks beyond [`WAIT_SLICE`]. After a longer one the main process may have
/// been stopped, together with its workers.
pub const STALL_PAUSE: Duration = Duration::from_secs(1);
/// The longest wait for the stack dump of a worker that is killed afterwards.
pub const KILLED_STACK: Duration = Duration::from_millis(200);
/// The signal for a stack dump, counted from SIGRTMIN: programs use the first and last ones.
pub const STACK_SIGNAL: i32 = 13;
/// Interval between two reads of a stack dump that is being written.
pub const STACK_CHECK: Duration = Duration::from_millis(5);
/// Reads without growth after which a stack dump is complete.
pub const STACK_SETTLED: u32 = 20;
/// Bytes of a stack dump that are logged.
pub const STACK_SHOWN: usize = 64 << 10;
/// Nanoseconds between two checks that the worker's signal handler is still installed: each costs a system call.
pub const HANDLER_CHECK_NS: u64 = 50_000_000;

// --- Worker ---

/// The longest single sleep of an idle worker; then it trims its memory and handles signals.
pub const IDLE_SLICE: Duration = Duration::from_secs(1);
/// The time for which a worker that is ahead of the loop is idle before it returns all idle pages: several times the
/// cost of the fresh pages of a large batch.
pub const AHEAD: Duration = Duration::from_millis(20);
/// Bytes held by a worker's objects from which it calls Python's garbage collector, which does not see their size.
pub const COLLECT_FROM: u64 = 32 * MIB;
/// The same threshold in batches of the largest size so far; the higher of the two applies.
pub const COLLECT_BATCHES: u64 = 4;
/// Bytes that a worker's objects may hold after a collection; above this limit, its tensors use the heap.
pub const RETAINED_MAX: u64 = GIB;
/// Bytes from which an array that NumPy makes in a worker is allocated in the worker's region.
pub const ARRAY_MIN: usize = 64 << 10;
/// Bytes that such arrays may occupy together. Arrays that a dataset keeps for long count, too, and are better off in
/// ordinary memory.
pub const ARRAYS_FROM: u64 = 64 * MIB;
/// The same limit in batches of the largest recent size; the higher of the two applies.
pub const ARRAYS_BATCHES: u64 = 4;
/// The longest wait of a fork in a worker for the child's private copies of these arrays: the time of a memory copy,
/// unless the child is stopped.
pub const PRIVATE_WAIT: Duration = Duration::from_secs(10);
/// Interval between two checks, by a worker without a pidfd, that the main process still runs.
pub const PARENT_CHECK: Duration = Duration::from_millis(200);
/// The time that a worker has to finish its current item after the main process is gone.
pub const ORPHAN_GRACE: Duration = Duration::from_millis(300);
/// Bytes of the watchdog thread's stack: it runs no Python code.
pub const WATCHDOG_STACK: usize = 64 << 10;
/// Interval from a SIGTERM to the first check for other workers that received one, and between these checks.
pub const SIGTERM_CHECK: Duration = Duration::from_millis(100);
/// The time for which workers continue after a SIGTERM to the group, while the main process saves its checkpoint.
pub const SIGTERM_SERVE: Duration = Duration::from_secs(30);
/// The time for which the only worker of an iterator continues: it has no other worker to compare with.
pub const SIGTERM_ALONE: Duration = Duration::from_secs(2);

// --- Statistics and texts ---

/// Number of slowest batches that statistics keep, and of batches that blocked others for longest.
pub const SLOWEST: usize = 8;
/// Recent batches whose durations statistics keep, to predict the gain of other settings.
pub const RECENT_WORK: usize = 256;
/// Upper bounds, in microseconds, of the histogram buckets for waits of `next`; longer waits have a separate bucket.
pub const WAIT_BOUNDS_US: [u64; 18] = [
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000,
    5_000_000, 10_000_000, 30_000_000, 60_000_000,
];
/// Mean nanoseconds of a fetch from which the CPU time of every fetch is measured. That takes four system calls, about
/// 1.2 us.
pub const FETCH_MEASURED_FROM_NS: u64 = 400_000;
/// One in this many shorter fetches is measured.
pub const FETCH_SAMPLE: u64 = 8;
/// Maximum number of indices of a batch that a text shows.
pub const INDICES_SHOWN: usize = 16;
/// Maximum number of characters of a key that statistics show.
pub const KEY_SHOWN: usize = 60;
/// Maximum number of bytes of a key that a status page shows.
pub const KEY_BYTES_SHOWN: usize = 30;
/// Maximum number of reads of a status page that changes while it is read; then the last read counts.
pub const PAGE_READS: usize = 4;
/// Entries of a block table that `top` reads at a time.
pub const TABLE_READ: u32 = 1024;

// --- Workers on other machines ---

/// Bytes that either end of a connection reads ahead: shorter frames need no separate system call, and a waiting
/// consumer receives only such frames itself.
pub const LINK_BUFFER: usize = 16 << 10;
/// Bytes of the largest result that the worker's thread sends itself: waking another thread would take longer.
pub const LINK_AT_ONCE: u64 = 16 << 10;
/// Consecutive results that a consumer receives itself before the connection's thread goes off duty.
pub const LINK_STREAK: u32 = 8;
/// Interval between two checks, by a thread that is off duty, that the consumer still receives.
pub const LINK_OFF_DUTY: Duration = Duration::from_millis(2);
/// Interval between two checks of the socket by a worker's receiving thread while a batch is made: a death or shutdown
/// is noticed at most this much later.
pub const LINK_TICK: Duration = Duration::from_millis(20);
/// Maximum number of leaves of one batch: a longer table counts as damage.
pub const LINK_LEAVES: u32 = 1 << 20;
/// Tasks of a shared queue that a worker holds at a time: the next one travels while it makes a batch.
pub const LINK_CREDIT: usize = 2;
/// Shortest interval between two reports of a replay to the main process, in nanoseconds: `stall_timeout` may fire this
/// much too early.
pub const REPLAY_NOTICE_NS: u64 = 10_000_000;
/// The longest time without an acknowledgement before a connection counts as broken.
pub const LINK_SILENCE: Duration = Duration::from_secs(15);
/// The longest time that a received batch waits for memory before its worker is given up.
pub const LINK_MEMORY_WAIT: Duration = Duration::from_secs(10);
/// Interval between two attempts to get memory for a received batch.
pub const LINK_MEMORY_CHECK: Duration = Duration::from_millis(5);
/// Bytes of the stack of a connection's threads.
pub const LINK_STACK: usize = 256 << 10;
