//! The bindings: thin classes over the engine and the worker's port.

mod callbacks;
mod code;
mod engine;
#[cfg(feature = "failpoints")]
mod failpoints;
mod figures;
mod gate;
mod limits;
mod pin;
mod port;
mod profiler;
mod signals;

use pyo3::prelude::*;

// The code relies on the GIL: `PyEngine::finish`, `sys::deferred_signals`, the borrowed items of `codec::encode`. A free-threaded Python
// takes the GIL again when it loads a module that says so, and warns of it. Without this PyO3 would say the opposite.
#[pymodule(gil_used = true)]
mod _core {
    #[pymodule_export]
    use super::engine::{_trim_pool, PyDeath, PyEngine, begin_forks, descends, end_forks, engine_batches};
    #[pymodule_export]
    use super::figures::{
        Counts, Observed, ObservedWorker, PyMeter, SlowTask, Totals, WorkerTotals, figures, observe_arena,
    };
    #[pymodule_export]
    use super::limits::{cpu_quota, memory_limits};
    #[pymodule_export]
    use super::port::PyPort;
    #[pymodule_export]
    use super::profiler::{observed, set_reporting};
    #[pymodule_export]
    use super::signals::DeferredSignals;
    #[pymodule_export]
    use crate::codec::roundtrip::{_collate, _roundtrip};
    #[pymodule_export]
    use crate::interop::dlpack::buffer::{LeaseBuffer, heap_storage};
    #[pymodule_export]
    use crate::interop::fetcher::{StoppableIndices, TimedCollate, WorkerStopped};
    #[pymodule_export]
    use crate::interop::tensor::is_plain_leaf;

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        for (name, value) in super::code::ALL {
            module.add(*name, value)?;
        }
        #[cfg(feature = "failpoints")]
        module.add_function(wrap_pyfunction!(super::failpoints::_failpoint_calls, module)?)?;
        module.add("ARENA_MIN", crate::config::ARENA_MIN)?;
        module.add("INLINE_LIMIT", crate::config::INLINE_LIMIT)
    }
}
