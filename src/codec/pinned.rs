//! Decoding into pinned memory: the batch is built over memory that is filled afterwards, without the GIL.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::config::STREAM_FROM;
use crate::copy::copy;
use crate::error::Error;
use crate::interop::dlpack::Lease;
use crate::interop::exit_guard::call;
use crate::interop::tensor::SharedStorage;
use crate::tree::{Atom, Build, Group, Kind, Place, Storage, walk};

/// Small tensors lie one behind the other in one storage, each at a multiple of this, as torch's allocators align.
const ALIGN: usize = 64;

/// Pinned memory for the tensors of one batch.
pub struct Pinned<'py, L> {
    /// A function of Python's: a pinned `uint8` tensor of so many bytes.
    allocate: Bound<'py, PyAny>,
    /// Whether tuples become lists, as older versions of torch's function make them.
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
    /// For one payload. None for one that torch's function has to see: it copies what came twice twice, and leaves the
    /// keys of dicts alone.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for a damaged payload.
    pub fn new(
        payload: &[u8],
        allocate: Bound<'py, PyAny>,
        tuples_become_lists: bool,
    ) -> Result<Option<Self>, Error> {
        let mut scan = Scan { tuples_become_lists, ..Scan::default() };
        walk(payload, &mut scan)?;
        let slab_len = scan.slab_len;
        let pinned = Self { allocate, tuples_become_lists, slab: None, slab_len, copies: Vec::new() };
        Ok(scan.simple().then_some(pinned))
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
        let bytes = call(&self.allocate, PyTuple::new(py, [len])?)?;
        let ptr = call(&bytes.getattr(intern!(py, "data_ptr"))?, PyTuple::empty(py))?.extract::<usize>()?;
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
}

/// What has to be known of a payload beforehand.
#[derive(Default)]
struct Scan {
    tuples_become_lists: bool,
    /// Bytes that the small tensors need.
    slab_len: usize,
    /// Something came twice, or lies in the key of a dict and would change there.
    odd: bool,
    /// For each value of the stack, whether pinning changes it.
    changes: Vec<bool>,
}

impl Scan {
    fn simple(&self) -> bool {
        !self.odd
    }
}

impl Build for Scan {
    type Error = Error;

    fn atom(&mut self, atom: Atom<'_>) -> Result<(), Error> {
        self.changes.push(match atom {
            Atom::Leaf(leaf) if leaf.kind == Kind::Tensor => {
                if let Place::Inline(bytes) = leaf.place {
                    self.slab_len += bytes.len().next_multiple_of(ALIGN);
                }
                true
            }
            Atom::Ints(Group::Tuple, _) => self.tuples_become_lists,
            _ => false,
        });
        Ok(())
    }

    fn close(&mut self, group: Group, count: usize) -> Result<(), Error> {
        let values = if group == Group::Dict { count * 2 } else { count };
        let start = self.changes.len().checked_sub(values);
        let start = start.ok_or_else(|| Error::corrupt("an unbalanced batch"))?;
        let inside = &self.changes[start..];
        self.odd |= group == Group::Dict && inside.iter().step_by(2).any(|&key| key);
        let changes = inside.iter().any(|&it| it) || group == Group::Tuple && self.tuples_become_lists;
        self.changes.truncate(start);
        self.changes.push(changes);
        Ok(())
    }

    fn keep(&mut self, _: usize) -> Result<(), Error> {
        self.odd = true;
        Ok(())
    }

    fn storage(&mut self, _: &Storage<'_>) -> Result<(), Error> {
        self.odd = true;
        Ok(())
    }
}
