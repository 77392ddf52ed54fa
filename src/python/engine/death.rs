//! A worker's death as one Python object.

use pyo3::prelude::*;

use crate::engine::DeathReport;
use crate::sys::pidfd::{ExitStatus, signal_name};

/// All that the engine knows of a worker's death.
#[pyclass(frozen, get_all, name = "Death", module = "rustloader._core")]
pub struct PyDeath {
    worker_id: u32,
    pid: i32,
    /// As multiprocessing has it: negative for a signal. None where the kernel does not tell.
    exitcode: Option<i32>,
    /// The C library's words for the signal.
    signal: Option<String>,
    index: Option<Py<PyAny>>,
    oldest: bool,
}

impl PyDeath {
    pub(super) fn new(py: Python<'_>, death: &DeathReport<'_, Py<PyAny>>) -> Self {
        let (exitcode, signal) = match death.status {
            None => (None, None),
            Some(ExitStatus::Code(code)) => (Some(code), None),
            Some(ExitStatus::Signal(signal)) => (Some(-signal), Some(signal_name(signal))),
        };
        let DeathReport { worker: worker_id, pid, oldest, .. } = *death;
        Self { worker_id, pid, exitcode, signal, index: death.index.map(|index| index.clone_ref(py)), oldest }
    }
}
