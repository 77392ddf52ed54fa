//! Python objects owned by threads that do not hold the GIL.

use pyo3::prelude::*;

use super::exit_guard::release;
use crate::sys::fork;

/// A Python object that a thread without the GIL may drop.
///
/// Without the GIL, PyO3 queues a drop under a lock, and a fork may copy that lock while it is held. So the drop of
/// this type takes the GIL instead. In a forked child the object leaks, because freeing pinned memory takes locks of
/// its allocator, which have the same problem.
#[derive(Debug)]
pub struct DetachedObject {
    object: Option<Py<PyAny>>,
    generation: u64,
}

impl DetachedObject {
    pub fn new(object: Py<PyAny>) -> Self {
        Self { object: Some(object), generation: fork::generation() }
    }

    pub fn take(mut self) -> Option<Py<PyAny>> {
        self.object.take()
    }

    pub fn bind<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        self.object.as_ref().map_or_else(|| py.None(), |object| object.clone_ref(py)).into_bound(py)
    }
}

impl Drop for DetachedObject {
    fn drop(&mut self) {
        if self.generation == fork::generation() {
            Python::try_attach(|py| self.object.take().map(|object| release(py, object)));
        }
        std::mem::forget(self.object.take());
    }
}

/// Runs `body` with the GIL, and returns its result. If the interpreter is shutting down, fails without running `body`.
pub fn attached<R>(body: impl FnOnce(Python<'_>) -> Result<R, String>) -> Result<R, String> {
    Python::try_attach(body).unwrap_or_else(|| Err("the interpreter is shutting down".to_owned()))
}
