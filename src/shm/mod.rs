//! Shared memory: the arena with its rings, blocks and leases. See ARCHITECTURE.md for the way of a batch.
//!
//! # Which orders matter, and the models that run them
//!
//! Two processes, or two threads, hand something over at the places that a `// SYNC: name` marks, at both ends. Loom
//! (`tests/loom_*.rs`, `make test-loom`) runs these over the code itself:
//!
//! | SYNC | what goes wrong otherwise | model |
//! |---|---|---|
//! | entry-published, slot-taken | half an entry is read, or written over | `loom_ring`: three entries through two slots |
//! | ring-marked | a ring with results is not looked at | `loom_doorbell`: two workers, one reader |
//! | asleep-or-published, bell-rung | a wake-up is lost | `loom_doorbell`; one ringer stopped half-way |
//! | these together, and the stop flag | an answer, a task or the end is slept over | `loom_shutdown` |
//! | block-released, block-returned | a block is lost, given out twice, or reused while it is seen | `loom_block`: two holders, two droppers and the owner, reuse at once, a fork's mark |
//! | parked-or-released, block-held | pages of the next iterator's batch are taken away | `loom_block`: release against retire, recover and a new owner |
//!
//! Larger models would run no other orders:
//! * *Rings.* One producer, one consumer, and nothing but the two counters, which are equal up to a constant (all arithmetic
//!   wraps). Three entries through two slots go through each relation of `tail`, `head` and the cached copy that each side has:
//!   empty, in part, full, wrapped, stale.
//! * *Workers.* Each has its own rings; they meet in a word of the bitmap and in the main process's bell, which they
//!   change by read-modify-writes that commute. What two of them can do to each other, more can.
//! * *Blocks.* Each change of a state is one read-modify-write of one word, so any number of holders is a sequence of such
//!   steps, of which only the last one leads further. On the return stack a push can fail because of another push, or of the
//!   swap that takes all; the model has two pushers and the owner, who may send a block again at once.
//!
//! Not modelled is what one side stores once with Release and the other loads with Acquire, without an answer: arena-made,
//! block-made, stack-file, handed-over, fork-table, forks-counted, forks-handled, pool-emptied, and the flags closing, exiting,
//! finish-wanted and pin-stop. There is one order, and it is the pair's. pages-or-promise is asleep-or-published again, and a
//! wrong answer there would be a wrong guess at the machine's headroom. All other words that both sides touch stand alone
//! (the status pages, what is warm or promised): nothing is read because of them. The scheduler has one caller at a time, under a
//! lock: there are no orders in it.

#[cfg(not(loom))]
pub mod alloc;
#[cfg(not(loom))]
pub mod arena;
pub mod block;
pub mod doorbell;
#[cfg(not(loom))]
pub mod forks;
pub mod layout;
#[cfg(not(loom))]
pub mod lease;
#[cfg(not(loom))]
pub mod pool;
pub mod ring;
