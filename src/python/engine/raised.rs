//! An error in a batch's place that this process has raised: when the batch was unpickled, for example.

use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// Has the method of torch's `ExceptionWrapper`, which carries the errors of workers.
#[pyclass(frozen, name = "RaisedError", module = "rustloader._core")]
pub(super) struct Raised(Mutex<Option<PyErr>>);

impl Raised {
    pub(super) fn new(error: PyErr) -> Self {
        Self(Mutex::new(Some(error)))
    }
}

#[pymethods]
impl Raised {
    /// Raises the error once. It does not stay here: its traceback refers to the frame that holds this object.
    fn reraise(&self) -> PyResult<()> {
        let error = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        Err(error.unwrap_or_else(|| PyRuntimeError::new_err("the error of this batch was raised before")))
    }
}
