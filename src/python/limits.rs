//! What this process may use, as the kernel shows it.

use pyo3::prelude::*;

use crate::sys::cgroup::{self, Roots};
use crate::sys::memory;

/// The limits on memory, the machine's first: for each whether it is a cgroup's, its size and what is left of it, in bytes.
#[pyfunction]
pub fn memory_limits(py: Python<'_>) -> Vec<(bool, u64, u64)> {
    let limits = py.detach(|| memory::limits(&Roots::default()));
    limits.iter().map(|limit| (limit.is_cgroup, limit.size, limit.bytes)).collect()
}

/// The cores' worth of CPU time that the cgroups of this process grant; `None` without a quota.
#[pyfunction]
pub fn cpu_quota(py: Python<'_>) -> Option<f64> {
    py.detach(|| cgroup::cpu_quota(&Roots::default()))
}
