//! Stand-ins for the index batch and the collate function that are passed to torch's fetcher.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::prelude::*;
use pyo3::types::{PyInt, PyIterator};

use crate::shm::layout::WorkerState;
use crate::worker::port::Port;
use crate::worker::stopwatch::Stopwatch;

pyo3::create_exception!(
    rustloader._core,
    WorkerStopped,
    pyo3::exceptions::PyBaseException,
    "Ends a fetch between two samples when the loader shuts down."
);

/// The index that a trace records for a sample whose index is not an int, or does not fit into a u64.
const NO_INDEX: u64 = u64::MAX;

/// An index batch whose iteration raises `WorkerStopped` when the loader shuts down. torch's fetcher only iterates over
/// it and takes its length.
#[pyclass(frozen, module = "rustloader._core")]
pub struct StoppableIndices {
    pub port: Arc<Port>,
    pub index: Py<PyAny>,
    /// True if the status page shows the position of each index that the iteration reaches.
    pub shows_places: bool,
    /// True if a trace records the time from each index to the next one as the time of a sample.
    pub traces: bool,
}

#[pymethods]
impl StoppableIndices {
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.index.bind(py).len()
    }

    fn __iter__(&self, py: Python<'_>) -> PyResult<StoppableIterator> {
        let items = self.index.bind(py).try_iter()?.unbind();
        let place = self.shows_places.then(AtomicU64::default);
        Ok(StoppableIterator { port: self.port.clone(), items, place, traces: self.traces })
    }
}

/// The iterator of `StoppableIndices`.
#[pyclass(frozen, module = "rustloader._core")]
pub struct StoppableIterator {
    port: Arc<Port>,
    items: Py<PyIterator>,
    /// Position of the next index in the batch. `None` if the status page does not show positions.
    place: Option<AtomicU64>,
    traces: bool,
}

#[pymethods]
impl StoppableIterator {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        check_stop(&self.port)?;
        let item = self.items.bind(py).clone().next().transpose()?;
        if self.traces && self.port.traces_samples() {
            let number = |item: &Bound<'_, PyAny>| item.cast_exact::<PyInt>().ok()?.extract().ok();
            self.port.trace_sample(item.as_ref().map(|item| number(item).unwrap_or(NO_INDEX)));
        }
        if let (Some(place), true) = (&self.place, item.is_some()) {
            let now = place.load(Ordering::Relaxed);
            place.store(now + 1, Ordering::Relaxed);
            show_activity(py, &self.port, || self.port.at_sample(now));
        }
        Ok(item.map(Bound::unbind))
    }
}

/// Returns `WorkerStopped` if the loader is shutting down.
pub fn check_stop(port: &Port) -> PyResult<()> {
    if port.stopping() { Err(WorkerStopped::new_err(())) } else { Ok(()) }
}

/// Calls `show`, which updates the worker's status page. Releases the GIL during the call if `show` sends a message to
/// another machine.
pub fn show_activity<R: Send>(py: Python<'_>, port: &Port, show: impl FnOnce() -> R + Send) -> R {
    if port.remote().is_some() { py.detach(show) } else { show() }
}

/// A wrapper that measures the time of a collate function. While the function runs, the status page shows that the
/// worker is collating.
#[pyclass(frozen, module = "rustloader._core")]
pub struct TimedCollate {
    pub port: Arc<Port>,
    pub stopwatch: Arc<Stopwatch>,
    pub collate_fn: Py<PyAny>,
}

#[pymethods]
impl TimedCollate {
    fn __call__(&self, py: Python<'_>, batch: Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        show_activity(py, &self.port, || self.stopwatch.end_fetch(&self.port, WorkerState::Collate));
        let collated = self.collate_fn.bind(py).call1((batch,));
        self.stopwatch.end_collate(&self.port);
        collated.map(Bound::unbind)
    }

    fn __getattr__(&self, py: Python<'_>, name: &str) -> PyResult<Py<PyAny>> {
        self.collate_fn.bind(py).getattr(name).map(Bound::unbind)
    }
}
