//! Waiting for exclusive access to an iterator, and the error of a call whose iterator was shut down.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::config::WAIT_SLICE;
use crate::engine::Handle;
use crate::engine::gate::{Attempt, Gate};
use crate::interop::exit_guard::park_at_exit;

/// Waits without the GIL until this thread has exclusive access. Fails if the iterator is shut down meanwhile, if this
/// thread already has access, or if a signal handler raises.
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

/// Returns the error of a `next` whose iterator was shut down. If the interpreter is exiting, parks the thread instead
/// unless it is the main thread: a daemon thread would only print the error.
pub fn closed(py: Python<'_>, handle: &Handle) -> PyErr {
    park_at_exit(py, handle);
    PyRuntimeError::new_err("the DataLoader iterator has been shut down")
}
