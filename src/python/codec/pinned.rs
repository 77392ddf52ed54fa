//! Decoding into pinned memory: the batch is built over memory that is filled afterwards, without the GIL.

use pyo3::intern;
use pyo3::prelude::*;

use crate::error::Error;
use crate::python::dlpack::Lease;
use crate::python::tensor::SharedStorage;
use crate::shm::copy::{STREAM_FROM, copy};
use crate::tree::{Atom, Build, Group, Kind, Place, Storage, walk};

/// Small tensors lie one behind the other in one storage, each at a multiple of this, as torch's allocators align.
const ALIGN: usize = 64;

/// Pinned memory for the tensors of one batch.
pub struct Pinned<'py, L> {
    /// A function of Python's: a pinned `uint8` tensor of so many bytes.
    allocate: Bound<'py, PyAny>,
    /// Whether tuples become lists, as torch's function did before 2.9 or so.
    tuples_become_lists: bool,
    /// What all small tensors share, and how much of it is in use.
    slab: Option<(Memory, usize)>,
    /// Bytes that the slab needs.
    slab_len: usize,
    copies: Vec<Copy<L>>,
}

/// A storage and where it lies.
struct Memory {
    storage: SharedStorage,
    ptr: *mut u8,
}

/// Bytes that have to be copied before the batch is handed out.
pub struct Copy<L> {
    from: L,
    offset: usize,
    len: usize,
    to: *mut u8,
}

// SAFETY: the target is memory of a tensor that nobody else has yet and that outlives the copy (`Copies::run`); the lease
// is `Send`.
unsafe impl<L: Lease> Send for Copy<L> {}

/// The copies of one batch.
pub struct Copies<L>(Vec<Copy<L>>);

impl<L: Lease> Copies<L> {
    /// Does them, and gives the leases back. To be called without the GIL, while the batch is held.
    pub fn run(self) {
        for Copy { from, offset, len, to } in self.0 {
            // SAFETY: the decoder has checked the range in the lease and has made memory of `len` bytes at `to`.
            unsafe { copy(from.ptr().add(offset), to, len, len >= STREAM_FROM) };
        }
    }
}

impl<'py, L: Lease> Pinned<'py, L> {
    /// For one payload.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for a damaged payload.
    pub fn new(
        payload: &[u8],
        allocate: Bound<'py, PyAny>,
        tuples_become_lists: bool,
    ) -> Result<Self, Error> {
        let mut slab = SlabLen(0);
        walk(payload, &mut slab)?;
        Ok(Self { allocate, tuples_become_lists, slab: None, slab_len: slab.0, copies: Vec::new() })
    }

    /// The type of the list or tuple that is delivered.
    pub fn group(&self, group: Group) -> Group {
        if group == Group::Tuple && self.tuples_become_lists { Group::List } else { group }
    }

    /// The copies, once the batch has been built.
    pub fn into_copies(self) -> Copies<L> {
        Copies(self.copies)
    }

    fn memory(&self, len: usize) -> PyResult<Memory> {
        let py = self.allocate.py();
        let bytes = self.allocate.call1((len,))?;
        let ptr = bytes.call_method0(intern!(py, "data_ptr"))?.extract::<usize>()?;
        let storage = SharedStorage::of(py, &bytes, len, ptr)?;
        Ok(Memory { storage, ptr: ptr as *mut u8 })
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
    pub fn large(&mut self, from: L, offset: usize, len: usize) -> PyResult<SharedStorage> {
        let Memory { storage, ptr } = self.memory(len)?;
        self.copies.push(Copy { from, offset, len, to: ptr });
        Ok(storage)
    }

    /// A storage of its own that holds these bytes.
    pub fn filled(&self, bytes: &[u8]) -> PyResult<SharedStorage> {
        let Memory { storage, ptr } = self.memory(bytes.len())?;
        // SAFETY: just as many bytes were allocated, and nobody else has them yet.
        unsafe { ptr.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(storage)
    }
}

/// Counts what the small tensors of a payload need.
struct SlabLen(usize);

impl Build for SlabLen {
    type Error = Error;

    fn atom(&mut self, atom: Atom<'_>) -> Result<(), Error> {
        if let Atom::Leaf(leaf) = atom
            && leaf.kind == Kind::Tensor
            && let Place::Inline(bytes) = leaf.place
        {
            self.0 += bytes.len().next_multiple_of(ALIGN);
        }
        Ok(())
    }

    fn close(&mut self, _: Group, _: usize) -> Result<(), Error> {
        Ok(())
    }

    fn keep(&mut self, _: usize) -> Result<(), Error> {
        Ok(())
    }

    fn storage(&mut self, _: &Storage<'_>) -> Result<(), Error> {
        Ok(())
    }
}
