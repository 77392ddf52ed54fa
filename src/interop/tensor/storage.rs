//! Tensors that share one storage.

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::bridge::{Bridge, Made};
use crate::interop::memory::Memory;
use crate::interop::view::Form;

/// A `torch.UntypedStorage` over memory of this crate. The memory is released with the last tensor on the storage.
pub struct SharedStorage {
    storage: Py<PyAny>,
    len: usize,
    /// The address of the first byte; 0 for ordinary memory, which is aligned for every dtype.
    address: usize,
}

impl Bridge {
    /// Creates a storage over `len` bytes of leased memory, from byte `offset` on. Raises ValueError if the memory is
    /// too small.
    pub fn storage<M: Memory>(&self, py: Python<'_>, lease: M, offset: usize, len: usize) -> PyResult<SharedStorage> {
        let address = (lease.ptr() as usize).wrapping_add(offset);
        let bytes = self.tensor(py, lease, offset, Form::bytes(&[len as i64]))?;
        SharedStorage::of(py, bytes.bind(py), len, address)
    }

    /// Creates a storage that owns a copy of `bytes`.
    pub fn storage_copied(&self, py: Python<'_>, bytes: &[u8]) -> PyResult<SharedStorage> {
        let copied = self.tensor_copied(py, bytes, Form::bytes(&[bytes.len() as i64]))?;
        SharedStorage::of(py, copied.bind(py), bytes.len(), 0)
    }

    /// Creates a tensor on a storage, with its first element at byte `offset`. The tensor is not a view. Raises
    /// ValueError if the form does not fit the storage, or if torch has no such dtype.
    pub fn tensor_shared(&self, py: Python<'_>, storage: &SharedStorage, offset: usize, form: Form<'_>) -> Made {
        let dtype = form.dtype;
        let end = form.extent().and_then(|bytes| bytes.checked_add(offset));
        if end.is_none_or(|end| end > storage.len)
            || !offset.is_multiple_of(dtype.itemsize())
            || !storage.address.wrapping_add(offset).is_multiple_of(dtype.align())
        {
            return Err(PyValueError::new_err("a tensor's sizes and strides do not fit its storage"));
        }
        self.tensor_on(py, &storage.storage, (offset / dtype.itemsize()) as i64, form)
    }

    /// Creates a tensor without elements on an empty storage, with a storage offset of `offset` elements.
    pub fn tensor_empty(&self, py: Python<'_>, offset: i64, form: Form<'_>) -> Made {
        let nothing = self.tensor_copied(py, &[], Form::bytes(&[0]))?;
        let storage = nothing.call_method0(py, intern!(py, "untyped_storage"))?;
        self.tensor_on(py, &storage, offset, form)
    }

    fn tensor_on(&self, py: Python<'_>, storage: &Py<PyAny>, first: i64, form: Form<'_>) -> Made {
        let tensor = self.tensor_copied(py, &[], Form::empty(form.dtype))?;
        let (shape, strides) = (PyTuple::new(py, form.shape)?, PyTuple::new(py, form.strides)?);
        tensor.call_method1(py, intern!(py, "set_"), (storage, first, shape, strides))?;
        Ok(tensor)
    }
}

impl SharedStorage {
    /// Returns the storage of a tensor of `len` bytes, which must start at the first byte of its storage.
    pub fn of(py: Python<'_>, bytes: &Bound<'_, PyAny>, len: usize, address: usize) -> PyResult<Self> {
        let storage = bytes.call_method0(intern!(py, "untyped_storage"))?.unbind();
        Ok(Self { storage, len, address })
    }
}
