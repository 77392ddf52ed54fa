//! Shared memory: the arena with its rings, blocks and leases. ARCHITECTURE.md follows a batch through them.
//!
//! # Which orders matter, and the models that run them
//!
//! Wherever two processes or threads synchronize, a comment `// SYNC: name` marks both ends. Loom (`tests/loom_*.rs`,
//! `make test-loom`) runs the following models on the actual code:
//!
//! | SYNC | without it | model |
//! |---|---|---|
//! | entry-published, slot-taken | an entry is read half-written, or overwritten | `loom_ring`: three entries through two slots |
//! | entry-queued, entry-claimed | a claimed entry is half-written, or overwritten during the read | `loom_queue`: two workers, a slot used twice |
//! | ring-marked | the reader misses a ring with results | `loom_doorbell`: two workers, one reader |
//! | asleep-or-published, bell-rung | a wake-up is lost | `loom_doorbell`; one ringer stopped half-way |
//! | these together, and the stop flag | a side sleeps through a result, a task or the shutdown | `loom_shutdown` |
//! | block-released, block-returned | a block is lost, allocated twice, or reused while it is read | `loom_block`: two holders, two droppers and the owner, immediate reuse, a fork's mark |
//! | parked-or-released, block-held | pages of the next iterator's batch are released | `loom_block`: release against retire, recover and a new owner |
//!
//! Larger models would add no orders that these models lack:
//! * *Rings.* One producer and one consumer share only two counters, and all arithmetic on them wraps. Three entries
//!   through two slots cover each relation of `tail`, `head` and their cached copies: empty, partial, full, wrapped,
//!   stale.
//! * *The shared queue.* Each of its slots changes by compare-and-swaps, of which only one succeeds: two workers, or a
//!   worker and a withdrawal, cover any number. A worker that is killed has either completed its swap or not. Loom
//!   executes a thread's loads in program order, so no model can show the need for entry-claimed, which keeps the load
//!   of an entry before the swap that claims it.
//! * *Workers.* Each worker has its own rings. Workers share only a word of the bitmap and the main process's bell, and
//!   change these by read-modify-writes that commute, so two workers cover any number.
//! * *Blocks.* Each change of a block's state is one read-modify-write of one word, so the releases of any number of
//!   holders form a sequence of such steps, of which only the last has an effect. A push onto the return stack may have
//!   to be retried because of another push, or because of the swap that takes the whole stack; the model has two
//!   pushers and the owner, which may reuse a block immediately.
//!
//! There are no models of a single Release store that is read by one Acquire load and causes no store in reply, because
//! such a pair needs no further order. These are arena-made, block-made, stack-file, handed-over, fork-table,
//! forks-counted, forks-handled, pool-emptied, caretaker-left, and the flags closing, exiting, finish-wanted and
//! pin-stop. pages-or-promise has the same shape as asleep-or-published; an error there would only cause a wrong
//! estimate of the machine's headroom. No other access relies on the order of the remaining shared words (status pages,
//! warm and promised bytes). The scheduler runs under a lock.

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
