//! Shared memory: the arena with its rings, blocks and leases. See ARCHITECTURE.md for the way of a batch.
//!
//! The models in `tests/loom_*.rs` run over [`ring`], [`doorbell`] and [`block`]: those three hold every place where
//! two processes touch the same word; all else here is private to one of them.

#[cfg(not(loom))]
pub mod alloc;
#[cfg(not(loom))]
pub mod arena;
pub mod block;
#[cfg(not(loom))]
pub mod copy;
pub mod doorbell;
#[cfg(not(loom))]
pub mod forks;
pub mod layout;
#[cfg(not(loom))]
pub mod lease;
#[cfg(not(loom))]
pub mod pool;
pub mod ring;
