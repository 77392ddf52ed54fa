//! The Python bindings: thin classes and functions over the Rust core.

mod cache;
mod code;
mod engine;
mod figures;
mod functions;
mod gate;
mod port;
mod remote;
mod sequences;
mod sharing;
mod signals;
mod sizes;
mod trace;

use pyo3::prelude::*;

// The code relies on the GIL, for example in `PyEngine::finish`, in `sys::deferred_signals`, and for the items that
// `codec::encode` borrows. With `gil_used`, a free-threaded Python enables the GIL and prints a warning when it loads
// the module.
#[pymodule(gil_used = true)]
mod _core {
    #[pymodule_export]
    use super::{
        cache::{PyBatch, PyCache, rename_to_new},
        engine::{PyDeath, PyEngine, PyPosition, PyProgress, PySnapshot},
        figures::{Observed, ObservedWorker, PyMeter, SlowTask, Totals, WorkerTotals, figures, inspect_arena},
        functions::{
            _trim_pool, WarmPages, address_space_left, begin_forks, cpu_quota, descends, end_forks, engine_batches,
            memory_limits, observed, seed_words, set_reporting, tend_pages,
        },
        port::PyPort,
        remote::PyLink,
        sequences::{SequencePlan, int_tensor},
        sharing::{ShareBuilder, SharedData, SharedItems, SharedIterator, SharedPairs, SharedStore},
        signals::{DeferredSignals, call_into},
        trace::PyTraceSink,
    };
    #[pymodule_export]
    use crate::codec::roundtrip::{_collate, _roundtrip, copy_of};
    #[pymodule_export]
    use crate::interop::{
        array_tensor::ArrayTensor,
        buffer::{LeaseBuffer, heap_storage},
        fetcher::{StoppableIndices, TimedCollate, WorkerStopped},
        gather::gather_in_torch,
        index_stream::IndexStream,
        tensor::{bridge::is_plain_leaf, moved::move_storage},
    };

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        for (name, value) in super::code::ALL {
            module.add(*name, value)?;
        }
        #[cfg(feature = "failpoints")]
        module.add_function(wrap_pyfunction!(super::functions::_failpoint_calls, module)?)?;
        module.add("TRACE_KINDS", crate::trace::Kind::names())?;
        module.add("TRACE_MAIN", crate::trace::MAIN)?;
        module.add("TRACE_PINNER", crate::trace::PINNER)?;
        module.add("ARENA_MIN", crate::config::ARENA_MIN)?;
        module.add("CACHE_HEADER", crate::cache::HEADER)?;
        module.add("CACHE_VERSION", crate::cache::VERSION)?;
        module.add("BACK_BATCHES", crate::config::BACK_BATCHES)?;
        let bounds = crate::config::WAIT_BOUNDS_US.map(|us| us as f64 / 1e6);
        module.add("WAIT_BOUNDS", pyo3::types::PyTuple::new(module.py(), bounds)?)?;
        module.add("INLINE_LIMIT", crate::config::INLINE_LIMIT)
    }
}
