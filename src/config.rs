//! Limits, sizes and intervals of the core, with units and reasons. A constant that belongs to one algorithm or layout
//! is defined next to it. `python/mod.rs` exports those that the Python side needs.

use std::ops::RangeInclusive;
use std::time::Duration;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

// --- Workers and batches ---

/// Maximum number of workers of one iterator: worker IDs fit into 16 bits.
pub const WORKERS_MAX: u32 = 1 << 16;
/// Maximum number of outstanding batches of one iterator. Each ring has room for all of them.
pub const TASKS_MAX: u32 = 1 << 24;
/// Minimum span of a shared queue: the number of tasks from the oldest unanswered one to the newest. The span bounds
/// the scheduler's table of tasks.
pub const QUEUE_SPAN: usize = 1 << 10;
/// Maximum span that a window can require: the span grows with the window from [`QUEUE_SPAN`] up to this number.
pub const QUEUE_SPAN_MAX: usize = 1 << 16;
/// A timeout of at least this many seconds (about 30 years) is treated as no timeout, because clocks would overflow.
pub const TIMEOUT_MAX: f64 = 1e9;

// --- Traces ---

/// Number of slots in a worker's ring of trace events, enough for a few hundred batches. A call of `next` empties the
/// ring if at least [`TRACE_DRAIN`] has passed since the last time. Between two calls, a worker makes at most its
/// outstanding batches.
pub const TRACE_SLOTS: u32 = 1 << 12;
/// The shortest interval between two times at which `next` empties the rings of a trace.
pub const TRACE_DRAIN: Duration = Duration::from_millis(2);
/// Bytes of trace events that are written to the file at a time.
pub const TRACE_BUFFER: usize = 256 << 10;
/// The interval at which a thread empties the rings of a trace and writes its events to the file. If the process is
/// killed, later events are lost.
pub const TRACE_FLUSH: Duration = Duration::from_millis(250);

// --- Positions ---

/// Maximum number of batches by which a position can be moved back from the last answer: 8 that a wrapper prefetches,
/// and the one that the wrapper's `next` is about to return.
pub const BACK_BATCHES: usize = 9;
/// Maximum number of answers that are kept for such positions: these batches, and the errors between them.
pub const BACK_ANSWERS: usize = 1 << 10;

// --- Arena ---

/// Bytes of the smallest arena. If the system does not allow this size, the loader falls back to torch's iterator.
pub const ARENA_MIN: u64 = GIB;
/// Bytes of an arena on a small machine, if the system allows this size: untouched pages cost nothing.
pub const ARENA_USUAL: u64 = 64 * GIB;
/// Bytes of the largest arena: the allocator's size classes must cover it.
pub const ARENA_MAX: u64 = 1 << 40;
/// Bytes of the smallest region of a worker. A smaller one could not hold a batch.
pub const REGION_MIN: u64 = MIB;
/// Bytes of a region per entry of its block table. The next two limits bound the number of entries.
pub const BYTES_PER_BLOCK: u64 = 16 * KIB;
/// Number of entries in the smallest block table.
pub const TABLE_MIN: u64 = 1 << 10;
/// Number of entries in the largest block table, which takes 32 MiB of address space.
pub const TABLE_MAX: u64 = 1 << 20;
/// Maximum number of arenas that the pool keeps for later iterators, such as those for training, validation and test.
pub const POOL_ARENAS: usize = 4;
/// Divisor of the sum of the machine's memory and swap. The pool's idle pages take at most the quotient.
pub const POOL_SHARE: u64 = 16;
/// The time that an unused arena stays in the pool: longer than the usual pause between two epochs. A worker that has
/// no task for this long also releases its idle pages.
pub const POOL_IDLE: Duration = Duration::from_secs(10);
/// Bytes of the stack of the thread that releases unused arenas. It is small because that thread runs no Python code.
pub const CARETAKER_STACK: usize = 128 << 10;

// --- Allocator ---

/// Bytes reserved at a time for small blocks, so that one system call serves many of them.
pub const SLAB: u64 = 64 * KIB;
/// Maximum size in bytes of a message or index batch that is sent regardless of free memory, so that an error can be
/// reported.
pub const SMALL_MESSAGE: u64 = SLAB;
/// Number of allocations between two checks of the low-water marks of idle blocks.
pub const TRIM_WINDOW: u32 = 64;
/// Number of batches after which such a check is made early if they took at least [`TRIM_AFTER`]: the cost of fresh
/// pages is small in comparison.
pub const TRIM_BATCHES: u32 = 8;
/// The time that [`TRIM_BATCHES`] batches must take for an early check.
pub const TRIM_AFTER: Duration = Duration::from_secs(1);
/// Number of consecutive windows of [`TRIM_WINDOW`] allocations after which blocks that stayed idle lose their pages. A
/// single window may be unusual.
pub const TRIM_PATIENCE: u8 = 2;
/// Minimum size in bytes of a large block, whose fresh pages cost more than a wake-up.
pub const LARGE: u64 = MIB;
/// The longest time that a worker waits for a large block that the training loop still holds, per [`LARGE`] bytes of
/// the block: a fraction of the cost of fresh pages. A worker that is ahead of the loop waits up to four times as long,
/// but at most [`AHEAD`].
pub const RETURN_WAIT: Duration = Duration::from_micros(200);
/// Number of size classes by which the class of a warm block may exceed that of the request. A block of the largest
/// such class has less than twice the requested size.
pub const REUSE_CLASSES: usize = 3;
/// Divisor of the recent peak of pages in use. If batch sizes vary, idle pages may raise the total above the peak by at
/// most the quotient.
pub const IDLE_SHARE: u64 = 4;
/// Number of batches in a period. The largest batch of the current and the previous period determines how many pages an
/// idle worker keeps.
pub const RECENT_BATCHES: u64 = 16;
/// Bytes of fresh pages between two checks of available memory. A check is slow because it reads files in /proc.
pub const HEADROOM_CHECK: u64 = 8 * MIB;
/// Lower and upper limits, in bytes, of the memory that a reservation must leave free for other processes. Within these
/// limits, the reservation must leave free as much as it takes.
pub const HEADROOM_MARGIN: RangeInclusive<u64> = MIB..=32 * MIB;
/// The longest time that a reservation waits for other workers' reservations to end if their sum is too large.
pub const RESERVATION_WAIT: Duration = Duration::from_secs(2);

// --- Messages and copies ---

/// Minimum size in bytes of a leaf that has a separate block. Smaller leaves are part of the message and are copied at
/// delivery.
pub const INLINE_LIMIT: usize = 16 << 10;
/// Minimum size in bytes of a string or bytes object that is sent only once, even if it occurs repeatedly in a batch.
pub const ONCE_FROM: usize = 1 << 10;
/// Maximum depth of nested containers; deeper batches are pickled.
pub const MAX_DEPTH: usize = 64;
/// Maximum number of dimensions of a tensor; tensors with more dimensions are pickled.
pub const MAX_DIMS: usize = 16;
/// Minimum size in bytes of a copy that uses streaming stores. Smaller copies stay in the cache.
pub const STREAM_FROM: usize = 2 << 20;
/// Minimum size in bytes of a copy that releases the GIL. For smaller copies, releasing it costs more than it gains.
pub const DETACH_FROM: usize = 256 << 10;
/// Bytes of the largest buffer that is kept for the next message.
pub const BUFFER_KEPT: usize = 4 << 20;
/// Maximum number of steps in a search for an element that is shared by tensors whose extents overlap.
pub const OVERLAP_STEPS: u32 = 1 << 15;
/// Factor that decides how tensors with overlapping extents but no shared element are copied. They are copied
/// separately if one block for all of them would be larger than this factor times the sum of their sizes.
pub const STORAGE_WASTE: usize = 2;

// --- Waiting in the main process ---

/// The longest single wait. A signal that arrives just before a wait begins is handled only after it.
pub const WAIT_SLICE: Duration = Duration::from_millis(250);
/// The longest single wait if there is no pidfd or no doorbell that could end it earlier.
pub const BLIND_SLICE: Duration = Duration::from_millis(20);
/// The time for which a waiting thread yields the processor before it sleeps: a wake-up costs more than most small
/// batches.
pub const YIELD_FOR: Duration = Duration::from_micros(20);
/// Interval between two checks for dead workers by a `next` that never blocks.
pub const DEATH_CHECK: Duration = Duration::from_millis(100);
/// Interval between two checks, during a shutdown, for the exit of a worker without a pidfd.
pub const EXIT_CHECK: Duration = Duration::from_millis(2);
/// The longest wait for the exit of a worker whose tied result cannot be opened: a worker's sockets close before its
/// process is gone.
pub const TIED_EXIT: Duration = Duration::from_millis(50);
/// Duration of the work in a `next` above which the following call measures its sampler: a thousand times the cost of a
/// clock read.
pub const LONG_NEXT: Duration = Duration::from_micros(50);
/// Maximum number of descriptors for which ppoll is used. Up to this number it is faster than epoll, and it needs no
/// extra descriptor.
pub const POLL_MAX: usize = 32;
/// Maximum number of events that one epoll_wait returns; the next call returns the others.
pub const EPOLL_EVENTS: usize = 64;
/// Bytes of the pin thread's stack: as large as a Python thread's on most systems, because the thread runs user code.
pub const PIN_STACK: usize = 8 << 20;

// --- Stuck workers ---

/// Interval between two checks for stuck workers.
pub const STALL_CHECK: Duration = Duration::from_millis(100);
/// The longest delay of such a check, beyond [`WAIT_SLICE`], that counts as normal. After a longer one, the watch over
/// each worker starts anew, because the workers may have been stopped together with the main process.
pub const STALL_PAUSE: Duration = Duration::from_secs(1);
/// The longest wait for the stack dump of a worker that is killed afterwards.
pub const KILLED_STACK: Duration = Duration::from_millis(200);
/// The signal that requests a stack dump, as an offset from SIGRTMIN. It is in the middle of the range, because
/// programs use the first and the last real-time signals.
pub const STACK_SIGNAL: i32 = 13;
/// Interval between two reads of a stack dump that is being written.
pub const STACK_CHECK: Duration = Duration::from_millis(5);
/// Number of consecutive reads without growth after which a stack dump counts as complete, if its signal handler has
/// returned.
pub const STACK_SETTLED: u32 = 20;
/// Maximum number of bytes of a stack dump that are logged.
pub const STACK_SHOWN: usize = 64 << 10;
/// Nanoseconds between two checks that the worker's signal handler is still installed. Each check costs a system call.
pub const HANDLER_CHECK_NS: u64 = 50_000_000;

// --- Worker ---

/// The longest single sleep of an idle worker. After each sleep, the worker trims its memory and handles signals.
pub const IDLE_SLICE: Duration = Duration::from_secs(1);
/// The minimum time for which a worker that is ahead of the training loop must be idle before it releases all its idle
/// pages: several times the cost of fresh pages for a large batch. If its last batch took longer, that time applies.
pub const AHEAD: Duration = Duration::from_millis(20);
/// Minimum number of bytes held by a worker's Python objects at which the worker calls Python's garbage collector. The
/// collector itself does not see the size of their memory.
pub const COLLECT_FROM: u64 = 32 * MIB;
/// The same threshold as a multiple of the largest batch so far; the higher of the two applies. After a collection, the
/// threshold is at least twice the bytes that are still held.
pub const COLLECT_BATCHES: u64 = 4;
/// Maximum number of bytes that a worker's objects may hold after a collection, if the threshold is not higher. If the
/// new tensor that caused the collection would exceed this limit, it is allocated on the heap.
pub const RETAINED_MAX: u64 = GIB;
/// Minimum size in bytes of an array that NumPy allocates in a worker's region.
pub const ARRAY_MIN: usize = 64 << 10;
/// Maximum total number of bytes of such arrays. Arrays that a dataset keeps for a long time also count; they are
/// better off in ordinary memory.
pub const ARRAYS_FROM: u64 = 64 * MIB;
/// The same limit as a multiple of the largest recent batch; the higher of the two applies.
pub const ARRAYS_BATCHES: u64 = 4;
/// The longest time that a fork in a worker waits for the child to make private copies of these arrays. The wait takes
/// as long as a memory copy, unless the child is stopped.
pub const PRIVATE_WAIT: Duration = Duration::from_secs(10);
/// Interval between two checks that the main process still runs, by a worker that has no pidfd for it.
pub const PARENT_CHECK: Duration = Duration::from_millis(200);
/// The time that a worker has to finish its current item after the main process is gone.
pub const ORPHAN_GRACE: Duration = Duration::from_millis(300);
/// Bytes of the watchdog thread's stack. It is small because that thread runs no Python code.
pub const WATCHDOG_STACK: usize = 64 << 10;
/// Interval between two checks for other workers that received a SIGTERM, and from a worker's SIGTERM to its first
/// check.
pub const SIGTERM_CHECK: Duration = Duration::from_millis(100);
/// The time for which workers continue after a SIGTERM to the process group, while the main process saves a checkpoint.
pub const SIGTERM_SERVE: Duration = Duration::from_secs(30);
/// The same time for the only worker of an iterator. Without other workers, it cannot tell whether the signal was sent
/// to the group.
pub const SIGTERM_ALONE: Duration = Duration::from_secs(2);

// --- Statistics and reports ---

/// Number of batches in each of two lists that statistics keep: the slowest ones, and those that blocked others for the
/// longest time.
pub const SLOWEST: usize = 8;
/// Number of recent batches whose durations statistics keep, to predict the gain from other settings.
pub const RECENT_WORK: usize = 256;
/// Upper bounds, in microseconds, of the histogram buckets for waits of `next`. Longer waits have a separate bucket.
pub const WAIT_BOUNDS_US: [u64; 18] = [
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000,
    5_000_000, 10_000_000, 30_000_000, 60_000_000,
];
/// Minimum mean duration of a fetch, in nanoseconds, at which the CPU time of every fetch is measured. A measurement
/// takes four system calls, about 1.2 us.
pub const FETCH_MEASURED_FROM_NS: u64 = 400_000;
/// If fetches are shorter, one in this many is measured.
pub const FETCH_SAMPLE: u64 = 8;
/// Maximum number of a batch's indices that a message shows.
pub const INDICES_SHOWN: usize = 16;
/// Maximum number of characters of a key that statistics show.
pub const KEY_SHOWN: usize = 60;
/// Maximum number of bytes of a key that a status page shows.
pub const KEY_BYTES_SHOWN: usize = 30;
/// Maximum number of reads of a status page that changes while it is read. After that, the last read counts.
pub const PAGE_READS: usize = 4;
/// Number of block table entries that `top` reads at a time.
pub const TABLE_READ: u32 = 1024;

// --- Workers on other machines ---

/// Bytes that either end of a connection reads ahead. Shorter frames need no separate system call, and they are the
/// only ones that a waiting consumer receives itself.
pub const LINK_BUFFER: usize = 16 << 10;
/// Bytes of the largest result that the worker's thread sends itself: waking another thread would take longer.
pub const LINK_AT_ONCE: u64 = 16 << 10;
/// Number of consecutive results that a consumer receives itself before the connection's thread goes off duty.
pub const LINK_STREAK: u32 = 8;
/// Interval between two checks, by a thread that is off duty, that the consumer still receives.
pub const LINK_OFF_DUTY: Duration = Duration::from_millis(2);
/// Interval between two checks of the socket by a worker's receiving thread while a batch is being made. A death or
/// shutdown is noticed after at most this time.
pub const LINK_TICK: Duration = Duration::from_millis(20);
/// Maximum number of leaves of one batch. A longer table is treated as damage.
pub const LINK_LEAVES: u32 = 1 << 20;
/// Maximum number of tasks of a shared queue that a worker on another machine holds at a time, so that the next task
/// travels while the worker makes a batch.
pub const LINK_CREDIT: usize = 2;
/// The shortest interval, in nanoseconds, between two reports of a replay's progress to the main process.
/// `stall_timeout` may fire this much too early.
pub const REPLAY_NOTICE_NS: u64 = 10_000_000;
/// The longest time without an acknowledgement before a connection counts as broken.
pub const LINK_SILENCE: Duration = Duration::from_secs(15);
/// The longest time that a received batch waits for memory before the connection to its worker is closed.
pub const LINK_MEMORY_WAIT: Duration = Duration::from_secs(10);
/// Interval between two attempts to get memory for a received batch.
pub const LINK_MEMORY_CHECK: Duration = Duration::from_millis(5);
/// Bytes of the stack of a connection's threads.
pub const LINK_STACK: usize = 256 << 10;
