//! An error that takes a batch's place and was raised in this process, for example while unpickling the batch.

use std::sync::{Mutex, MutexGuard};

use pyo3::exceptions::{PyBaseException, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use crate::sync::lock;

/// The error. It has the interface (the method `reraise`) of torch's `ExceptionWrapper`, which carries errors of
/// workers.
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
    /// Raises the error; a second call raises RuntimeError. Raising takes the error out of this object, because the
    /// error's traceback refers to the frame that holds the object.
    fn reraise(&self, py: Python<'_>) -> PyResult<()> {
        let error = self.error().take();
        Err(match error {
            Some(error) => PyErr::from_value(error.into_bound(py).into_any()),
            None => PyRuntimeError::new_err("the error of this batch has already been raised"),
        })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        // The lock is held only briefly, and only by threads that hold the GIL.
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
