//! Operations that signal handlers must not interrupt: taking a value, and forking workers.

use std::sync::Mutex;

use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::interop::exit_guard::call;
use crate::sync::lock;
use crate::sys::deferred_signals::{Deferred, defer};

/// Calls a function and appends its result to a list. No signal handler can run between the call and the append.
///
/// Python runs handlers between two bytecodes, and no bytecode is executed between the end of the call and the append.
/// The exception is Python code in the finalizer of an argument: if a handler raises there, Python prints the error and
/// continues. `_core.pyi` explains what this means for the caller.
#[pyfunction]
#[pyo3(signature = (into, function, /, *args))]
pub fn call_into<'py>(
    into: &Bound<'py, PyList>,
    function: &Bound<'py, PyAny>,
    args: Bound<'py, PyTuple>,
) -> PyResult<()> {
    into.append(call(function, args)?)
}

/// A context in which signals are deferred. Entering the context is a single call, and so is leaving it: Python may run
/// the handler of another signal between two calls, but no handler may run between the steps of entering or leaving.
#[pyclass(frozen, module = "rustloader._core")]
pub struct DeferredSignals {
    signals: Vec<i32>,
    /// `None` outside the context.
    deferred: Mutex<Option<Deferred>>,
}

#[pymethods]
impl DeferredSignals {
    #[new]
    fn new(signals: Vec<i32>) -> Self {
        Self { signals, deferred: Mutex::new(None) }
    }

    fn __enter__(&self) -> Vec<i32> {
        let deferred = defer(&self.signals);
        let blocked = deferred.blocked();
        *lock(&self.deferred) = Some(deferred);
        blocked
    }

    fn __exit__(&self, _kind: Py<PyAny>, _error: Py<PyAny>, _traceback: Py<PyAny>) {
        let deferred = lock(&self.deferred).take();
        if let Some(deferred) = deferred {
            deferred.release();
        }
    }
}
