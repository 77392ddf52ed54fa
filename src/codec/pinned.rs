//! Decoding into pinned memory. The batch is built first; the memory of its large tensors is filled afterwards, without
//! the GIL.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::pinning::{ALIGN, Copies, small_bytes};
use crate::error::Error;
use crate::interop::exit_guard::call;
use crate::interop::memory::Memory;
use crate::interop::tensor::SharedStorage;
use crate::tree::Group;

/// Pinned memory for the tensors of one batch.
pub struct Pinned<'py, M> {
    /// A Python function that takes a number of bytes and returns a pinned `uint8` tensor of that size.
    allocate: Bound<'py, PyAny>,
    /// True if tuples become lists, as in older versions of torch.
    tuples_become_lists: bool,
    /// The slab (the common memory of all small tensors) and the number of its bytes in use; `None` before the first
    /// small tensor.
    slab: Option<(PinnedMemory, usize)>,
    /// Size of the slab in bytes.
    slab_len: usize,
    pub copies: Copies<M>,
}

/// A storage and its address.
struct PinnedMemory {
    storage: SharedStorage,
    ptr: *mut u8,
}

impl<'py, M: Memory> Pinned<'py, M> {
    /// Creates the pinned memory for one payload; `None` if torch's function must pin the batch (see [`small_bytes`]).
    /// Allocates nothing yet.
    pub fn new(payload: &[u8], allocate: Bound<'py, PyAny>, tuples_become_lists: bool) -> Result<Option<Self>, Error> {
        let slab_len = small_bytes(payload, tuples_become_lists)?;
        let copies = Copies::new();
        Ok(slab_len.map(|slab_len| Self { allocate, tuples_become_lists, slab: None, slab_len, copies }))
    }

    /// Returns the type of container that is delivered for `group`.
    pub fn group(&self, group: Group) -> Group {
        if group == Group::Tuple && self.tuples_become_lists { Group::List } else { group }
    }

    fn memory(&self, len: usize) -> PyResult<PinnedMemory> {
        let py = self.allocate.py();
        let bytes = call(&self.allocate, PyTuple::new(py, [len])?)?;
        let ptr = call(&bytes.getattr(intern!(py, "data_ptr"))?, PyTuple::empty(py))?.extract::<usize>()?;
        let storage = SharedStorage::of(py, &bytes, len, ptr)?;
        Ok(PinnedMemory { storage, ptr: ptr as *mut u8 })
    }

    /// Copies a small tensor into the slab. Returns the slab's storage and the tensor's offset in it, in bytes.
    pub fn small(&mut self, bytes: &[u8]) -> PyResult<(&SharedStorage, usize)> {
        if self.slab.is_none() {
            self.slab = Some((self.memory(self.slab_len)?, 0));
        }
        let Some((memory, used)) = &mut self.slab else { unreachable!("it has just been created") };
        let at = *used;
        *used += bytes.len().next_multiple_of(ALIGN);
        if *used > self.slab_len {
            return Err(Error::corrupt("the small tensors of a batch have grown since the first scan").into());
        }
        // SAFETY: the target is inside the `slab_len` bytes of the slab, and nothing else uses it yet.
        unsafe { memory.ptr.add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok((&memory.storage, at))
    }

    /// Allocates a storage for `len` bytes of a lease. [`Copies::run`] fills it.
    pub fn large(&mut self, from: M, offset: usize, len: usize) -> PyResult<SharedStorage> {
        let PinnedMemory { storage, ptr } = self.memory(len)?;
        // SAFETY: the decoder has checked the range in the lease; the storage is new, and part of the batch.
        unsafe { self.copies.push(from, offset, len, ptr) };
        Ok(storage)
    }
}
