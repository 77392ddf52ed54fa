//! Shared memory: the arena with its rings, blocks and leases. ARCHITECTURE.md describes a batch's path.
//!
//! # Which orders matter, and the models that run them
//!
//! A `// SYNC: name` marks both ends of each place where two processes or threads synchronize. Loom (`tests/loom_*.rs`,
//! `make test-loom`) runs these models on the code itself:
//!
//! | SYNC | without it | model |
//! |---|---|---|
//! | entry-published, slot-taken | an entry is read half-written, or overwritten | `loom_ring`: three entries through two slots |
//! | entry-queued, entry-claimed | a claimed entry is half-written, or overwritten while it is read | `loom_queue`: two workers, a slot used twice |
//! | ring-marked | a ring with results is missed | `loom_doorbell`: two workers, one reader |
//! | asleep-or-published, bell-rung | a wake-up is lost | `loom_doorbell`; one ringer stopped half-way |
//! | these together, and the stop flag | a side sleeps through a result, a task or the end | `loom_shutdown` |
//! | block-released, block-returned | a block is lost, allocated twice, or reused while it is read | `loom_block`: two holders, two droppers and the owner, immediate reuse, a fork's mark |
//! | parked-or-released, block-held | pages of the next iterator's batch are released | `loom_block`: release against retire, recover and a new owner |
//!
//! Larger models would add no other orders:
//! * *Rings.* One producer and one consumer share only the two counters, and all arithmetic wraps. Three entries
//!   through two slots cover each relation of `tail`, `head` and their cached copies: empty, partial, full, wrapped,
//!   stale.
//! * *The shared queue.* Each of its slots changes by compare-and-swaps, of which one wins: two workers, or a worker
//!   and a withdrawal, cover any number. A worker that is killed has either done its swap or not. Loom runs the loads
//!   of a thread in their order, so no model can break entry-claimed, which keeps the load of an entry before its swap.
//! * *Workers.* Each has its own rings. They share a word of the bitmap and the main process's bell, which they change
//!   by read-modify-writes that commute, so two workers cover any number.
//! * *Blocks.* Each change of a state is one read-modify-write of one word, so any number of holders is a sequence of
//!   such steps, of which only the last has a consequence. A push onto the return stack can fail because of another
//!   push or of the swap that takes all; the model has two pushers and the owner, which may reuse a block immediately.
//!
//! Not modelled are single Release stores that one Acquire load reads and that nothing answers, because such a pair
//! orders itself: arena-made, block-made, stack-file, handed-over, fork-table, forks-counted, forks-handled,
//! pool-emptied, caretaker-left, and the flags closing, exiting, finish-wanted and pin-stop. pages-or-promise has the
//! shape of asleep-or-published; an error there would only misjudge the machine's headroom. No other read depends on
//! the remaining shared words (status pages, warm and promised bytes). The scheduler runs under a lock.

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
