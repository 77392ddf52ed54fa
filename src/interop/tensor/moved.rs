//! Calls of torch's functions that move a storage to other memory, and the memory that the storage had before.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::interop::moving::{Freed, Move, Reading};

/// The memory that a storage had before a move. An attribute of the storage refers to this object, so the memory is
/// freed with the storage.
#[pyclass(frozen, module = "rustloader._core")]
struct MovedMemory {
    _memory: Freed,
    /// The previous value of the attribute: the memory that the storage had before an earlier move.
    _older: Option<Py<PyAny>>,
}

/// Begins a [`Reading`], after waiting for moves by other threads. Other threads do not move a storage until the
/// reading is dropped.
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
    // For a storage without memory, such as a fake one, torch's function raises its own error below.
    let address = storage.call_method0(intern!(py, "data_ptr")).and_then(|it| it.extract()).unwrap_or(0_usize);
    let moving = Move::begin(address as *const u8, |time| py.detach(|| std::thread::sleep(time)));
    let mut all_args = vec![storage.clone()];
    all_args.extend(args.iter());
    let result = PyTuple::new(py, all_args).and_then(|all_args| function.call(all_args, kwargs));
    // Keep the memory even if a signal handler raised an exception after the move.
    if let Some(memory) = moving.end() {
        keep(storage, memory)?;
    }
    result
}

fn keep(storage: &Bound<'_, PyAny>, memory: Freed) -> PyResult<()> {
    let py = storage.py();
    let name = intern!(py, "_rustloader_memory");
    let older = storage.getattr_opt(name)?.map(Bound::unbind);
    // If the attribute cannot be set, leak the memory, because a view may still use it.
    let kept = Bound::new(py, MovedMemory { _memory: memory, _older: older })?;
    storage.setattr(name, &kept).inspect_err(|_| std::mem::forget(kept))
}
