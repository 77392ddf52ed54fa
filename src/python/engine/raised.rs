//! An error in a batch's place that this process has raised: when the batch was unpickled, for example.

use std::sync::{Mutex, MutexGuard};

use pyo3::exceptions::{PyBaseException, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use crate::sync::lock;

/// Has the method of torch's `ExceptionWrapper`, which carries the errors of workers.
#[pyclass(frozen, name = "RaisedError", module = "rustloader._core")]
pub(super) struct Raised(Mutex<Option<Py<PyBaseException>>>);

impl Raised {
    pub(super) fn new(py: Python<'_>, error: PyErr) -> Self {
        Self(Mutex::new(Some(error.into_value(py))))
    }

    fn error(&self) -> MutexGuard<'_, Option<Py<PyBaseException>>> {
        lock(&self.0)
    }
}

#[pymethods]
impl Raised {
    /// Raises the error once. It does not stay here: its traceback refers to the frame that holds this object.
    fn reraise(&self, py: Python<'_>) -> PyResult<()> {
        let error = self.error().take();
        Err(match error {
            Some(error) => PyErr::from_value(error.into_bound(py).into_any()),
            None => PyRuntimeError::new_err("the error of this batch was raised before"),
        })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        // The lock is held only with the GIL, and for a moment.
        match self.0.try_lock() {
            Ok(error) => visit.call(&*error),
            Err(_) => Ok(()),
        }
    }

    fn __clear__(&self) {
        let error = self.error().take();
        drop(error);
    }
}
