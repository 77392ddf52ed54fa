//! The core of rustloader: a scheduler, a shared-memory arena and the engine that joins them.
//!
//! The layers, each of which knows only those below it:
//!
//! ```text
//! python (PyO3; the feature `python`)  ->  engine, worker  ->  scheduler, shm, wire  ->  error, id, sync
//!                                          engine, worker, shm  ->  sys (the only module with system calls)
//! ```
//! ARCHITECTURE.md tells the way of a batch through them.

pub mod error;
pub mod id;
pub mod scheduler;
pub mod shm;
pub mod sync;

#[cfg(not(loom))]
pub mod engine;
#[cfg(not(loom))]
pub mod sys;
#[cfg(not(loom))]
pub mod tree;
#[cfg(not(loom))]
pub mod wire;
#[cfg(not(loom))]
pub mod worker;

#[cfg(all(feature = "python", not(loom)))]
mod python;
