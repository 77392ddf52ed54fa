//! What an iterator of another process does, as a dict.

use std::os::fd::BorrowedFd;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::metrics::Count;
use crate::observe::{self, Observed, ObservedWorker};
use crate::shm::layout::WorkerState;

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// What the arena behind a descriptor shows of its iterator; `None` while no iterator has it. The descriptor need only be open for
/// reading.
#[pyfunction]
#[pyo3(name = "inspect_arena")]
pub fn observe_arena(py: Python<'_>, fd: i32) -> PyResult<Option<Bound<'_, PyDict>>> {
    if fd < 0 {
        return Err(PyValueError::new_err(format!("{fd} is no descriptor")));
    }
    // SAFETY: the caller keeps the descriptor open for the call; of one that is not, the reads fail.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let observed = py.detach(|| observe::observe(fd))?;
    observed.map(|observed| dict_of(py, &observed)).transpose()
}

fn dict_of<'py>(py: Python<'py>, observed: &Observed) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("now", seconds(observed.now_ns))?;
    dict.set_item("pid", observed.pid)?;
    dict.set_item("state", observed.state.name())?;
    dict.set_item("seconds_in_state", seconds(observed.in_state_ns))?;
    dict.set_item("started", seconds(observed.now_ns.saturating_sub(observed.age_ns)))?;
    dict.set_item("stopping", observed.stopping)?;
    dict.set_item("prefetch_factor", observed.prefetch_factor)?;
    dict.set_item("in_order", observed.in_order)?;
    dict.set_item("persistent", observed.persistent)?;
    dict.set_item("pinning", observed.pinning)?;
    dict.set_item("epoch_batches", observed.epoch_batches)?;
    let counts = PyDict::new(py);
    for (count, name) in Count::ALL {
        counts.set_item(name, observed.counts[count as usize])?;
    }
    dict.set_item("counts", counts)?;
    let workers = observed.workers.iter().map(|worker| worker_dict(py, worker));
    dict.set_item("workers", PyList::new(py, workers.collect::<PyResult<Vec<_>>>()?)?)?;
    dict.set_item("leased", observed.usage.leased)?;
    dict.set_item("warm", observed.usage.warm)?;
    dict.set_item("high_water", observed.usage.high_water)?;
    dict.set_item("blocks", observed.usage.blocks)?;
    Ok(dict)
}

fn worker_dict<'py>(py: Python<'py>, worker: &ObservedWorker) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("pid", worker.totals.pid)?;
    dict.set_item("state", worker.state.name())?;
    dict.set_item("seconds_in_state", seconds(worker.in_state_ns))?;
    dict.set_item("tasks", worker.totals.tasks)?;
    dict.set_item("start_cpu", seconds(worker.totals.start_cpu_ns))?;
    dict.set_item("start_queued", seconds(worker.totals.start_queued_ns))?;
    dict.set_item("batch", worker.batch)?;
    dict.set_item("seconds_at_batch", seconds(worker.at_batch_ns))?;
    dict.set_item("index", worker.index.as_deref())?;
    dict.set_item("queued", worker.queued)?;
    dict.set_item("ready", worker.ready)?;
    dict.set_item("warm", worker.warm)?;
    let spent = PyDict::new(py);
    for (number, &ns) in worker.totals.spent_ns.iter().enumerate() {
        spent.set_item(WorkerState::from_u32(number as u32).name(), seconds(ns))?;
    }
    dict.set_item("seconds", spent)?;
    Ok(dict)
}
