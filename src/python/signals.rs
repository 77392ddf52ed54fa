//! Deferring signals while workers are forked.

use std::sync::Mutex;

use pyo3::prelude::*;

use crate::sync::lock;
use crate::sys::deferred_signals::{Deferred, defer};
use crate::sys::signal::Mask;

/// A context in which signals are deferred. Entering and leaving are one call each: Python may run a handler of another signal
/// after each call, which must not come between the steps.
#[pyclass(frozen, module = "rustloader._core")]
pub struct DeferredSignals {
    signals: Vec<i32>,
    /// While entered: the deferred signals, and this thread's earlier mask.
    entered: Mutex<Option<(Deferred, Mask)>>,
}

impl DeferredSignals {
    fn exchange(&self, entered: Option<(Deferred, Mask)>) -> Option<(Deferred, Mask)> {
        std::mem::replace(&mut *lock(&self.entered), entered)
    }
}

#[pymethods]
impl DeferredSignals {
    #[new]
    fn new(signals: Vec<i32>) -> Self {
        Self { signals, entered: Mutex::new(None) }
    }

    fn __enter__(&self) -> Vec<i32> {
        let deferred = defer(&self.signals);
        let before = Mask::block(&self.signals);
        self.exchange(Some((deferred, before)));
        self.signals.iter().copied().filter(|signal| !before.has(*signal)).collect()
    }

    fn __exit__(&self, _kind: Py<PyAny>, _error: Py<PyAny>, _traceback: Py<PyAny>) {
        if let Some((deferred, before)) = self.exchange(None) {
            before.restore();
            deferred.release();
        }
    }
}
