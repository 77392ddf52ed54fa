//! The core of rustloader: a scheduler, a shared-memory arena and the engine that joins them.
//!
//! The layers, each of which knows only those below it:
//!
//! ```text
//! python (PyO3; the feature `python`)  ->  engine, worker  ->  metrics, scheduler, shm, wire  ->  error, id, sync
//! python  ->  observe (an arena of another process)  ->  metrics, shm, tree, sys
//!                                          engine, worker, metrics, shm  ->  sys (the only module with system calls)
//! python  ->  tree (the bytes of a batch)  ->  copy (memory copies), error
//! ```
//! ARCHITECTURE.md tells the way of a batch through them.

pub mod config;
#[cfg(not(loom))]
pub mod copy;
pub mod error;
pub mod id;
pub mod scheduler;
pub mod shm;
pub mod sync;

#[cfg(not(loom))]
pub mod engine;
#[cfg(not(loom))]
pub mod metrics;
#[cfg(not(loom))]
pub mod observe;
#[cfg(not(loom))]
pub mod sys;
#[cfg(not(loom))]
pub mod tree;
#[cfg(not(loom))]
pub mod wire;
#[cfg(not(loom))]
pub mod worker;

#[cfg(all(feature = "python", not(loom)))]
mod codec;
#[cfg(all(feature = "python", not(loom)))]
mod interop;
#[cfg(all(feature = "python", not(loom)))]
mod python;
