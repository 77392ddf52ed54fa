//! The core of rustloader: a scheduler, a shared-memory arena and the engine that joins them.
//!
//! The layers. A module uses only what stands in the lines below its own; `tests/layers.rs` checks it against this table.
//!
//! ```text
//! python                   Python classes over the rest (feature `python`)
//! codec                    batches become bytes and leaves, and come back
//! interop                  tensors, arrays, DLPack, calls of Python
//! engine, observe, worker  main's end, a worker's end, an observer in another process
//! metrics                  counters
//! scheduler, tree, wire    who does what next; the bytes of a batch; the entries of the rings
//! shm                      the arena: rings, blocks, leases
//! copy, sys                memory copies; every system call
//! config, error, id, numbered, sync
//! ```
//! Only `python`, `codec` and `interop` use PyO3, behind the feature `python`. ARCHITECTURE.md describes the way of a batch.

pub mod config;
#[cfg(not(loom))]
pub mod copy;
pub mod error;
pub mod id;
mod numbered;
pub mod scheduler;
pub mod shm;
pub mod sync;

#[cfg(all(any(test, feature = "python"), not(loom)))]
#[cfg_attr(not(feature = "python"), allow(dead_code, unused_imports, reason = "only their tests use them"))]
mod codec;
#[cfg(not(loom))]
pub mod engine;
#[cfg(all(any(test, feature = "python"), not(loom)))]
#[cfg_attr(not(feature = "python"), allow(dead_code, unused_imports, reason = "only their tests use them"))]
mod interop;
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
mod python;
