//! The module's functions about this process and its machine. `_core.pyi` documents them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pyo3::prelude::*;

use crate::interop::torch_symbols::has_callbacks;
use crate::seeds::{self, Place};
use crate::shm::arena::Arena;
use crate::shm::pool::{self, Owner};
use crate::shm::{caretaker, forks};
use crate::sys::cgroup::{self, Roots};
use crate::sys::{memory, pidfd};

/// Batches that engines of this process have delivered.
pub static BATCHES: AtomicU64 = AtomicU64::new(0);

/// True while a `rustloader.report` is active.
static REPORTING: AtomicBool = AtomicBool::new(false);

/// Counts the batches that the Rust engine has delivered in this process, all loaders together.
///
/// Batches of torch's own loop (``num_workers=0``, or a loader that fell back to it) do not count.
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

/// Returns true if a `rustloader.report` or a callback of torch is active. It is one call, so that `next` asks only
/// once.
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
    // The group belongs to this thread.
    py.detach(forks::begin_group);
}

#[pyfunction]
pub fn end_forks() {
    forks::end_group();
}

/// A loader's claim on arenas that wait for its next epoch. `_core.pyi` documents it.
#[pyclass(frozen, module = "rustloader._core")]
pub struct WarmPages(Option<Owner>);

#[pymethods]
impl WarmPages {
    #[new]
    fn new() -> Self {
        Self(Some(Owner::default()))
    }

    fn announce(&self, workers: &Bound<'_, PyAny>) {
        // A value that is not a number of workers is refused at the first epoch, as in torch.
        if let (Some(owner), Ok(workers)) = (&self.0, workers.extract()) {
            owner.announce(workers);
        }
    }
}

impl WarmPages {
    /// Claims the arena that an iterator of the loader has taken.
    pub fn begin(&self, arena: &Arena) {
        if let Some(owner) = &self.0 {
            owner.begin(arena);
        }
    }
}

impl Drop for WarmPages {
    fn drop(&mut self) {
        let owner = self.0.take();
        // Releasing pages takes milliseconds, so it happens without the GIL. If there is no interpreter, the process is
        // ending, which releases them.
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

/// Counts the system calls of each kind in this process, for tests. Arms the failpoints of the environment on first
/// use.
#[cfg(feature = "failpoints")]
#[pyfunction]
pub fn _failpoint_calls() -> std::collections::HashMap<&'static str, u64> {
    use crate::sys::failpoint;
    failpoint::kinds().iter().map(|kind| (*kind, failpoint::calls(kind))).collect()
}
