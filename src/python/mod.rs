//! The bindings: thin classes over the engine and the worker's port. Only this folder names pyo3.

mod code;
mod engine;
mod errors;
#[cfg(feature = "failpoints")]
mod failpoints;
mod indices;
mod leaves;
mod meter;
mod observe;
mod pin;
mod port;
mod profiler;
mod runtime;
mod signals;
mod turn;

use pyo3::prelude::*;

// The code relies on the GIL: `PyEngine::finish`, `sys::hold`, the borrowed items of `codec::encode`. A free-threaded Python
// takes the GIL again when it loads a module that says so, and warns of it. Without this PyO3 would say the opposite.
#[pymodule(gil_used = true)]
mod _core {
    #[pymodule_export]
    use super::engine::{_trim_pool, PyDeath, PyEngine, begin_forks, descends, end_forks, engine_batches};
    #[pymodule_export]
    use super::indices::{StoppableIndices, WorkerStopped};
    #[pymodule_export]
    use super::meter::{PyMeter, figures};
    #[pymodule_export]
    use super::observe::observe_arena;
    #[pymodule_export]
    use super::port::{PyPort, TimedCollate};
    #[pymodule_export]
    use super::profiler::{observed, set_reporting};
    #[pymodule_export]
    use super::signals::HeldSignals;
    #[pymodule_export]
    use crate::codec::roundtrip::{_collate, _roundtrip};
    #[pymodule_export]
    use crate::interop::dlpack::{LeaseBuffer, heap_storage};
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
        module.add("INLINE_LIMIT", crate::codec::INLINE_LIMIT)
    }
}
