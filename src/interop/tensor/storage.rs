//! Tensors that share one storage.

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::Bridge;
use crate::interop::memory::Memory;
use crate::tree::dtype::Dtype;
use crate::tree::layout::extent;

/// A `torch.UntypedStorage` over memory of ours. The memory is given back with the last tensor on it.
pub struct SharedStorage {
    storage: Py<PyAny>,
    /// Its bytes.
    len: usize,
    /// Where they lie; 0 for ordinary memory, which is aligned for every element.
    address: usize,
}

impl Bridge {
    /// A storage of `len` bytes of leased memory, the first of them at `offset`.
    ///
    /// # Errors
    /// ValueError when the bytes do not lie in the lease.
    pub fn storage<M: Memory>(
        &self,
        py: Python<'_>,
        lease: M,
        offset: usize,
        len: usize,
    ) -> PyResult<SharedStorage> {
        let address = (lease.ptr() as usize).wrapping_add(offset);
        let bytes = self.tensor(py, lease, offset, Dtype::UINT8, &[len as i64], &[1])?;
        SharedStorage::of(py, bytes.bind(py), len, address)
    }

    /// A storage that owns a copy of `bytes`.
    pub fn storage_copied(&self, py: Python<'_>, bytes: &[u8]) -> PyResult<SharedStorage> {
        let copied = self.tensor_copied(py, bytes, Dtype::UINT8, &[bytes.len() as i64], &[1])?;
        SharedStorage::of(py, copied.bind(py), bytes.len(), 0)
    }

    /// A tensor on a storage; it is no view. Sizes and strides count elements; the first one lies at
    /// `byte_offset`.
    ///
    /// # Errors
    /// ValueError when the tensor does not fit into the storage or torch has no such dtype.
    pub fn tensor_shared(
        &self,
        py: Python<'_>,
        storage: &SharedStorage,
        byte_offset: usize,
        dtype: Dtype,
        shape: &[i64],
        strides: &[i64],
    ) -> PyResult<Py<PyAny>> {
        let end = extent(shape, strides, dtype.itemsize()).and_then(|bytes| bytes.checked_add(byte_offset));
        if end.is_none_or(|end| end > storage.len)
            || !byte_offset.is_multiple_of(dtype.itemsize())
            || !storage.address.wrapping_add(byte_offset).is_multiple_of(dtype.align())
        {
            return Err(PyValueError::new_err("a tensor's sizes and strides do not fit its storage"));
        }
        let first = (byte_offset / dtype.itemsize()) as i64;
        self.tensor_on(py, &storage.storage, first, dtype, shape, strides)
    }

    /// A tensor without elements, `offset` elements behind the begin of an empty storage.
    pub fn tensor_empty(
        &self,
        py: Python<'_>,
        offset: i64,
        dtype: Dtype,
        shape: &[i64],
        strides: &[i64],
    ) -> PyResult<Py<PyAny>> {
        let nothing = self.tensor_copied(py, &[], Dtype::UINT8, &[0], &[1])?;
        let storage = nothing.call_method0(py, intern!(py, "untyped_storage"))?;
        self.tensor_on(py, &storage, offset, dtype, shape, strides)
    }

    fn tensor_on(
        &self,
        py: Python<'_>,
        storage: &Py<PyAny>,
        first: i64,
        dtype: Dtype,
        shape: &[i64],
        strides: &[i64],
    ) -> PyResult<Py<PyAny>> {
        let tensor = self.tensor_copied(py, &[], dtype, &[0], &[1])?;
        let (shape, strides) = (PyTuple::new(py, shape)?, PyTuple::new(py, strides)?);
        tensor.call_method1(py, intern!(py, "set_"), (storage, first, shape, strides))?;
        Ok(tensor)
    }
}

impl SharedStorage {
    /// The storage of a tensor of `len` bytes that begins with it.
    pub fn of(py: Python<'_>, bytes: &Bound<'_, PyAny>, len: usize, address: usize) -> PyResult<Self> {
        let storage = bytes.call_method0(intern!(py, "untyped_storage"))?.unbind();
        Ok(Self { storage, len, address })
    }
}
