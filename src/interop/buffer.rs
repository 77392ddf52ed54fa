//! Leased memory as a Python object with the buffer protocol.

use std::ffi::c_int;
use std::sync::{Arc, Mutex};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::memory::{Heap, Memory};
use super::tensor::bridge::Bridge;
use super::view::Form;

/// Leased memory that exports a writable buffer: an out-of-band buffer of a pickle, or the base of a NumPy array. The
/// object keeps the lease as long as it lives, even without an export, because NumPy keeps only a reference to the
/// object.
#[pyclass(frozen, module = "rustloader._core")]
pub struct LeaseBuffer {
    shared: SharedLease,
}

/// A share in a lease. The buffer and its storages each have one.
struct SharedLease {
    /// Keeps the memory alive. The mutex is never locked; it only makes the lease `Sync`.
    _lease: Arc<Mutex<dyn Memory>>,
    memory: *mut u8,
    len: usize,
}

// SAFETY: `memory` belongs to the lease, which is `Send` and inside a mutex.
unsafe impl Send for SharedLease {}
// SAFETY: as above; the shared pointer never changes.
unsafe impl Sync for SharedLease {}

// SAFETY: the lease holds the memory.
unsafe impl Memory for SharedLease {
    fn ptr(&self) -> *mut u8 {
        self.memory
    }

    fn len(&self) -> usize {
        self.len
    }
}

impl LeaseBuffer {
    pub fn new<M: Memory>(lease: M) -> Self {
        let (memory, len) = (lease.ptr(), lease.len());
        Self { shared: SharedLease { _lease: Arc::new(Mutex::new(lease)), memory, len } }
    }
}

#[pymethods]
impl LeaseBuffer {
    pub fn storage(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let SharedLease { _lease: lease, memory, len } = &self.shared;
        let lease = SharedLease { _lease: lease.clone(), memory: *memory, len: *len };
        let tensor = Bridge::get(py)?.tensor(py, lease, 0, Form::bytes(&[*len as i64]))?;
        Ok(tensor.bind(py).call_method0("untyped_storage")?.unbind())
    }

    fn __len__(&self) -> usize {
        self.shared.len
    }

    /// # Safety
    /// `view` must be null or point to a structure to fill. Python calls this.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no buffer structure was given"));
        }
        let SharedLease { memory, len, .. } = slf.get().shared;
        // SAFETY: the structure is Python's; the memory is valid while `slf` lives, and the export keeps `slf` alive.
        match unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), memory.cast(), len as isize, 0, flags) } {
            0 => Ok(()),
            _ => Err(PyErr::fetch(slf.py())),
        }
    }
}

#[pyfunction]
pub fn heap_storage(py: Python<'_>, nbytes: usize) -> PyResult<Py<PyAny>> {
    LeaseBuffer::new(Heap::new(nbytes)?).storage(py)
}
