//! Shared memory: the arena with its rings, blocks and leases. `src/engine/README.md` follows a batch through them.
//!
//! # Memory orderings and the models that check them
//!
//! Wherever two processes or threads synchronize, a comment `// SYNC: name` marks both ends. Loom (`tests/loom_*.rs`,
//! `make test-loom`) runs these models on the actual code:
//!
//! | SYNC | without it | model |
//! |---|---|---|
//! | entry-published, slot-taken | a half-written entry is read, or an unread entry is overwritten | `loom_ring`: three entries through two slots |
//! | entry-queued, entry-claimed | a half-written entry is claimed, or an entry is overwritten while it is read | `loom_queue`: two workers, a slot used twice |
//! | head-moved | a worker reports intact memory as damaged | `loom_queue`: two workers |
//! | ring-marked | the reader misses a ring with results | `loom_doorbell`: two workers, one reader |
//! | asleep-or-published, bell-rung | a wake-up is lost | `loom_doorbell`, also with a ringer that stops halfway |
//! | all of the above, and the stop flag | a side sleeps through a result, a task or the shutdown | `loom_shutdown` |
//! | block-released, block-returned | a block is lost, allocated twice, or reused while it is read | `loom_block`: two holders, two threads that return blocks, an owner that reuses them at once, a fork's mark |
//! | parked-or-released, block-held | pages that the next iterator uses are released | `loom_block`: a release that races with retire, recover and a new owner |
//!
//! Larger models would exercise no orderings beyond these:
//! * *Rings.* One producer and one consumer share only two counters, and all arithmetic on them wraps. Three entries
//!   through two slots cover each relation of `tail`, `head` and their cached copies: empty, partial, full, wrapped,
//!   stale.
//! * *The shared queue.* Workers and withdrawals compete for an entry by compare-and-swap, and only one of them
//!   succeeds. So two workers, or a worker and a withdrawal, stand for any number. A worker that is killed has either
//!   completed its swap or not. Loom executes a thread's loads in program order, so `loom_queue` cannot show that
//!   entry-claimed is needed, which keeps the load of an entry before the swap that claims it.
//! * *Workers.* Each worker has its own rings. Workers share only a word of the bitmap and the main process's bell, and
//!   change these by read-modify-writes that commute, so two workers stand for any number.
//! * *Blocks.* Each release is one read-modify-write of the block's state. So the releases of any number of holders
//!   form a sequence, of which only the last frees the block. A push onto the return stack may have to be retried
//!   because of another push, or because of the swap that takes the whole stack; the model has two pushers and the
//!   owner, which may reuse a block immediately.
//!
//! A Release store that is read by Acquire loads and causes no store in reply has no model, because it needs no further
//! ordering. Pairs of this kind are arena-made, block-made, stack-file, handed-over, fork-table, forks-counted,
//! forks-handled, pool-emptied, caretaker-left, arrays-watched, arrays-private, start-time, time-spent, fetch-measured,
//! row-published, link-ended, left-to-thread, and the flags closing, exiting, finish-wanted and pin-stop.
//!
//! pages-or-promise and off-duty have no model: they have the same shape as asleep-or-published. An error in
//! pages-or-promise would only cause a wrong estimate of the machine's headroom, and an error in off-duty would only
//! delay a result. Nothing relies on the order of the other shared words, such as warm bytes. The scheduler runs under
//! a lock.

#[cfg(not(loom))]
pub mod alloc;
#[cfg(not(loom))]
pub mod arena;
pub mod block;
#[cfg(not(loom))]
pub mod caretaker;
pub mod doorbell;
#[cfg(not(loom))]
pub mod forks;
pub mod layout;
#[cfg(not(loom))]
pub mod lease;
#[cfg(not(loom))]
pub mod pool;
pub mod queue;
pub mod ring;
