//! Calls of torch that exchange the memory of a storage, and the memory that the storage had before.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::interop::moving::{Freed, Move, Reading};

/// The memory that a storage had before a move. Python frees it with the storage.
#[pyclass(frozen, module = "rustloader._core")]
struct MovedMemory {
    _memory: Freed,
    /// The memory of an earlier move, which the storage kept until now.
    _older: Option<Py<PyAny>>,
}

/// Keeps other threads from moving storages: they wait until the value is dropped.
pub fn reading(py: Python<'_>) -> Reading {
    Reading::begin(|time| py.detach(|| std::thread::sleep(time)))
}

#[pyfunction]
#[pyo3(signature = (function, storage, *args, **kwargs))]
pub fn move_storage<'py>(
    function: &Bound<'py, PyAny>,
    storage: &Bound<'py, PyAny>,
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = storage.py();
    // A storage without memory, such as a fake one, gets torch's own error below.
    let address = storage.call_method0(intern!(py, "data_ptr")).and_then(|it| it.extract()).unwrap_or(0_usize);
    let moving = Move::begin(address as *const u8, |time| py.detach(|| std::thread::sleep(time)));
    let mut call = vec![storage.clone()];
    call.extend(args.iter());
    let result = PyTuple::new(py, call).and_then(|call| function.call(call, kwargs));
    // Keep the memory even if a signal handler raised after the move.
    if let Some(memory) = moving.end() {
        keep(storage, memory)?;
    }
    result
}

fn keep(storage: &Bound<'_, PyAny>, memory: Freed) -> PyResult<()> {
    let py = storage.py();
    let name = intern!(py, "_rustloader_memory");
    let older = storage.getattr_opt(name)?.map(Bound::unbind);
    // Memory that cannot be kept leaks, because a view may still use it.
    let kept = Bound::new(py, MovedMemory { _memory: memory, _older: older })?;
    storage.setattr(name, &kept).inspect_err(|_| std::mem::forget(kept))
}
