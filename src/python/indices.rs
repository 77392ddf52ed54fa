//! Index batches whose iteration looks at the stop flag.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyIterator;

use crate::worker::port::Port;

pyo3::create_exception!(
    rustloader._core,
    WorkerStopped,
    pyo3::exceptions::PyBaseException,
    "Ends a fetch between two samples when the loader shuts down."
);

/// Stands for an index batch inside torch's own fetcher, which only iterates over it and asks for its length.
#[pyclass(frozen, module = "rustloader._core")]
pub struct StoppableIndices {
    port: Arc<Port>,
    index: Py<PyAny>,
}

impl StoppableIndices {
    /// Over any iterable.
    pub fn new(port: Arc<Port>, index: Py<PyAny>) -> Self {
        Self { port, index }
    }
}

#[pymethods]
impl StoppableIndices {
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.index.bind(py).len()
    }

    fn __iter__(&self, py: Python<'_>) -> PyResult<StoppableIterator> {
        Ok(StoppableIterator { port: self.port.clone(), items: self.index.bind(py).try_iter()?.unbind() })
    }
}

/// The iterator of `StoppableIndices`.
#[pyclass(frozen, module = "rustloader._core")]
pub struct StoppableIterator {
    port: Arc<Port>,
    items: Py<PyIterator>,
}

#[pymethods]
impl StoppableIterator {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        if self.port.stopping() {
            return Err(WorkerStopped::new_err(()));
        }
        self.items.bind(py).clone().next().transpose().map(|item| item.map(Bound::unbind))
    }
}
