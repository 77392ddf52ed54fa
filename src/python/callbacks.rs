//! The Python functions that an engine calls. `_core.pyi` has their types.

use pyo3::prelude::*;

/// What `Engine` is constructed with.
pub struct Callbacks {
    /// `loads(payload, objects)`: unpickles a result.
    pub loads: Py<PyAny>,
    /// `dump_index(index)`: pickles an index batch that is no plain tree.
    pub dump_index: Py<PyAny>,
    /// `is_interrupt(error)`: whether a signal handler has raised the error.
    pub is_interrupt: Py<PyAny>,
    /// `warn_stall(worker, pid, starting, seconds, state, index, stack, why_not)`: names a stuck worker in the log.
    pub warn_stall: Py<PyAny>,
}
