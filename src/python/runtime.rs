//! What the bindings look up once a process.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// Python objects that every batch needs.
pub struct Runtime {
    /// `_pack.loads(payload, objects)`.
    pub loads: Py<PyAny>,
    /// `_pack.dump_index(index)`.
    pub dump_index: Py<PyAny>,
    /// `_pack.load_index(payload)`.
    pub load_index: Py<PyAny>,
    /// `interrupts.is_interrupt(error)`.
    pub is_interrupt: Py<PyAny>,
    /// `_stall.tell(worker, pid, starting, seconds, state, index, stack, why_not)`.
    pub tell_stall: Py<PyAny>,
}

static RUNTIME: PyOnceLock<Arc<Runtime>> = PyOnceLock::new();

impl Runtime {
    /// The process's runtime, made on first use.
    pub fn get(py: Python<'_>) -> PyResult<Arc<Self>> {
        let made = RUNTIME.get_or_try_init(py, || {
            let pack = py.import("rustloader.workers.serialize")?;
            let function = |name: &str| pack.getattr(name).map(Bound::unbind);
            PyResult::Ok(Arc::new(Self {
                loads: function("loads")?,
                dump_index: function("dump_index")?,
                load_index: function("load_index")?,
                is_interrupt: py.import("rustloader.iterator.interrupts")?.getattr("is_interrupt")?.unbind(),
                tell_stall: py.import("rustloader.workers.stalls")?.getattr("tell")?.unbind(),
            }))
        })?;
        Ok(made.clone())
    }
}
