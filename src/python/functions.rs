//! Functions of `_core` that concern this process and its machine. `_core.pyi` documents them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pyo3::prelude::*;

use crate::interop::torch_symbols::has_callbacks;
use crate::seeds::{self, Place};
use crate::shm::arena::Arena;
use crate::shm::pool::{self, Owner};
use crate::shm::{caretaker, forks};
use crate::sys::cgroup::{self, Roots};
use crate::sys::{map, memory, pidfd};

/// Number of batches that this process's engines have delivered.
pub static BATCHES: AtomicU64 = AtomicU64::new(0);

/// True while a `rustloader.report` is active.
static REPORTING: AtomicBool = AtomicBool::new(false);

/// Returns the number of batches that the Rust engine has delivered in this process, across all loaders.
///
/// Batches of torch's own loop (``num_workers=0``, or a loader that fell back to it) are not counted.
///
/// Returns:
///   The number of batches.
///
/// Examples:
///   >>> before = rustloader.engine_batches()
///   >>> batches = list(rustloader.DataLoader(range(8), batch_size=4, num_workers=2))
///   >>> rustloader.engine_batches() - before
///   2
#[pyfunction]
pub fn engine_batches() -> u64 {
    BATCHES.load(Ordering::Relaxed)
}

/// Returns true if a `rustloader.report` or a callback of torch is active. A single function checks both, so that
/// `next` makes only one call.
#[pyfunction]
pub fn observed() -> bool {
    REPORTING.load(Ordering::Relaxed) || has_callbacks()
}

#[pyfunction]
pub fn set_reporting(reporting: bool) {
    REPORTING.store(reporting, Ordering::Relaxed);
}

#[pyfunction]
pub fn memory_limits(py: Python<'_>) -> Vec<(bool, u64, u64)> {
    let limits = py.detach(|| memory::limits(&Roots::default()));
    limits.iter().map(|limit| (limit.is_cgroup, limit.size, limit.bytes)).collect()
}

#[pyfunction]
pub fn address_space_left() -> Option<u64> {
    map::address_space_left()
}

#[pyfunction]
pub fn cpu_quota(py: Python<'_>) -> Option<f64> {
    py.detach(|| cgroup::cpu_quota(&Roots::default()))
}

#[pyfunction]
pub fn descends(pid: i64) -> bool {
    i32::try_from(pid).is_ok_and(pidfd::descends)
}

#[pyfunction]
pub fn seed_words(base_seed: u64, place: u64, ordinal: u64, worker: u64, epoch: u64) -> [u64; 4] {
    seeds::words(base_seed, Place { place, ordinal, worker, epoch })
}

#[pyfunction]
pub fn begin_forks(py: Python<'_>) {
    // `begin_group` may wait for another thread, so it runs without the GIL. The group belongs to the calling thread,
    // on which `detach` runs the function.
    py.detach(forks::begin_group);
}

#[pyfunction]
pub fn end_forks() {
    forks::end_group();
}

/// A loader's claim on the arenas that the pool keeps for its next epoch. `_core.pyi` documents it.
#[pyclass(frozen, module = "rustloader._core")]
pub struct WarmPages(Option<Owner>);

#[pymethods]
impl WarmPages {
    #[new]
    fn new() -> Self {
        Self(Some(Owner::default()))
    }

    fn announce(&self, workers: &Bound<'_, PyAny>) {
        // An invalid number of workers is ignored here: as in torch, the error is raised when the first epoch begins.
        if let (Some(owner), Ok(workers)) = (&self.0, workers.extract()) {
            owner.announce(workers);
        }
    }
}

impl WarmPages {
    /// Makes the loader the owner of an arena that one of its iterators has taken.
    pub fn begin(&self, arena: &Arena) {
        if let Some(owner) = &self.0 {
            owner.begin(arena);
        }
    }
}

impl Drop for WarmPages {
    fn drop(&mut self) {
        let owner = self.0.take();
        // Releasing pages takes milliseconds, so it happens without the GIL. Without an interpreter, the process is
        // about to exit, which releases the pages anyway.
        let _ = Python::try_attach(|py| py.detach(|| drop(owner)));
    }
}

#[pyfunction]
pub fn tend_pages(py: Python<'_>) {
    py.detach(caretaker::restart);
}

#[pyfunction]
pub fn _trim_pool(py: Python<'_>) -> usize {
    py.detach(pool::clear)
}

/// Returns the number of system calls of each kind that this process has made, for tests. The first use of any
/// failpoint arms those that the environment names.
#[cfg(feature = "failpoints")]
#[pyfunction]
pub fn _failpoint_calls() -> std::collections::HashMap<&'static str, u64> {
    use crate::sys::failpoint;
    failpoint::kinds().iter().map(|kind| (*kind, failpoint::calls(kind))).collect()
}
