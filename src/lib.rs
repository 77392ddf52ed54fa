//! The core of rustloader: a scheduler, a shared-memory arena, and the engine that connects them.
//!
//! A module uses only modules on lines below its own. `tests/layers.rs` checks this table.
//!
//! ```text
//! python                   Python classes over the other modules (feature `python`)
//! codec                    conversion of batches to bytes and leaves, and back
//! interop                  tensors, arrays, DLPack, calls into Python
//! engine, observe, worker  the main process's end, an observer in another process, a worker's end
//! transport                tasks and batches over a connection to another machine
//! metrics, store, cache, trace  counters; objects that processes share; samples that are made once; events
//! scheduler, tree, wire    dispatch and delivery order; the bytes of a batch; the entries of the rings
//! sequences                batches by the lengths of the samples
//! shm                      the arena: rings, blocks, leases
//! copy, sys                memory copies; every system call
//! config, error, id, numbered, seeds, sync
//! ```
//! Only `python`, `codec` and `interop` use PyO3, behind the feature `python`. `src/engine/README.md` follows a batch
//! through the modules.

pub mod config;
#[cfg(not(loom))]
pub mod copy;
pub mod error;
pub mod id;
mod numbered;
pub mod scheduler;
pub mod seeds;
#[cfg(not(loom))]
pub mod sequences;
pub mod shm;
pub mod sync;

#[cfg(not(loom))]
pub mod cache;
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
pub mod store;
#[cfg(not(loom))]
pub mod sys;
#[cfg(not(loom))]
pub mod trace;
#[cfg(not(loom))]
pub mod transport;
#[cfg(not(loom))]
pub mod tree;
#[cfg(not(loom))]
pub mod wire;
#[cfg(not(loom))]
pub mod worker;

#[cfg(all(feature = "python", not(loom)))]
mod python;

#[cfg(test)]
#[path = "../tests/common/children.rs"]
pub(crate) mod children;
