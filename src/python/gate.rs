//! Exclusive access to an iterator, and its end when the iterator is shut down.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::config::WAIT_SLICE;
use crate::engine::Handle;
use crate::engine::gate::{Attempt, Gate};
use crate::interop::exit_guard::park_at_exit;

/// Waits for exclusive access without the GIL, until the iterator is shut down.
pub fn enter(py: Python<'_>, gate: &Gate, handle: &Handle) -> PyResult<()> {
    handle.check_ours()?;
    loop {
        match gate.try_enter() {
            Attempt::Entered => return Ok(()),
            Attempt::Reentered => {
                return Err(PyRuntimeError::new_err(
                    "this DataLoader iterator is already in use by this thread: next() was called again from \
                     inside itself, by a signal handler or by the sampler",
                ));
            }
            Attempt::Busy => {}
        }
        if handle.closing() {
            return Err(closed(py, handle));
        }
        py.detach(|| gate.wait(WAIT_SLICE));
        py.check_signals()?;
    }
}

/// Returns the error of a `next` whose iterator was shut down. While the interpreter exits, parks a daemon thread
/// instead, which would only print the error.
pub fn closed(py: Python<'_>, handle: &Handle) -> PyErr {
    park_at_exit(py, handle);
    PyRuntimeError::new_err("the DataLoader iterator has been shut down")
}
