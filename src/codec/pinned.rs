//! Decoding into pinned memory: the batch is built over memory that is filled afterwards, without the GIL.

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
    /// A Python function: number of bytes -> a pinned `uint8` tensor of as many.
    allocate: Bound<'py, PyAny>,
    /// Whether tuples become lists, as older versions of torch's function make them.
    tuples_become_lists: bool,
    /// What all small tensors share, and how much of it is in use.
    slab: Option<(PinnedMemory, usize)>,
    /// Bytes that the slab needs.
    slab_len: usize,
    copies: Copies<M>,
}

/// A storage and where it lies.
struct PinnedMemory {
    storage: SharedStorage,
    ptr: *mut u8,
}

impl<'py, M: Memory> Pinned<'py, M> {
    /// For one payload. None for one that torch's function has to see, see [`small_bytes`].
    ///
    /// # Errors
    /// [`Error::Corrupt`] for a damaged payload.
    pub fn new(
        payload: &[u8],
        allocate: Bound<'py, PyAny>,
        tuples_become_lists: bool,
    ) -> Result<Option<Self>, Error> {
        let slab_len = small_bytes(payload, tuples_become_lists)?;
        let copies = Copies::new();
        Ok(slab_len.map(|slab_len| Self { allocate, tuples_become_lists, slab: None, slab_len, copies }))
    }

    /// The type of the list or tuple that is delivered.
    pub fn group(&self, group: Group) -> Group {
        if group == Group::Tuple && self.tuples_become_lists { Group::List } else { group }
    }

    /// The copies, once the batch has been built.
    pub fn into_copies(self) -> Copies<M> {
        self.copies
    }

    fn memory(&self, len: usize) -> PyResult<PinnedMemory> {
        let py = self.allocate.py();
        let bytes = call(&self.allocate, PyTuple::new(py, [len])?)?;
        let ptr = call(&bytes.getattr(intern!(py, "data_ptr"))?, PyTuple::empty(py))?.extract::<usize>()?;
        let storage = SharedStorage::of(py, &bytes, len, ptr)?;
        Ok(PinnedMemory { storage, ptr: ptr as *mut u8 })
    }

    /// A place for a small tensor, filled at once: its storage and its offset there.
    pub fn small(&mut self, bytes: &[u8]) -> PyResult<(&SharedStorage, usize)> {
        if self.slab.is_none() {
            self.slab = Some((self.memory(self.slab_len)?, 0));
        }
        let Some((memory, used)) = &mut self.slab else { unreachable!("it has just been made") };
        let at = *used;
        *used += bytes.len().next_multiple_of(ALIGN);
        if *used > self.slab_len {
            return Err(Error::corrupt("a batch whose small tensors have grown").into());
        }
        // SAFETY: the slab has `slab_len` bytes, which reach beyond these, and nobody else has it yet.
        unsafe { memory.ptr.add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok((&memory.storage, at))
    }

    /// A storage of its own that will hold `len` bytes of a lease.
    pub fn large(&mut self, from: M, offset: usize, len: usize) -> PyResult<SharedStorage> {
        let PinnedMemory { storage, ptr } = self.memory(len)?;
        // SAFETY: the decoder has checked the range in the lease; the storage is new, and part of the batch.
        unsafe { self.copies.push(from, offset, len, ptr) };
        Ok(storage)
    }
}
