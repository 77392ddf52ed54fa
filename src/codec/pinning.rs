//! The part of pinned decoding that needs no Python: the scan of a payload, and the copies.

use crate::config::STREAM_FROM;
use crate::copy::copy;
use crate::error::Error;
use crate::interop::memory::Memory;
use crate::tree::{Atom, Build, Group, Kind, Place, Storage, walk};

/// Alignment, in bytes, of small tensors in their common storage, as in torch's allocators.
pub const ALIGN: usize = 64;

/// A pending copy from a leased block, which is performed before the batch is delivered.
#[derive(Debug)]
struct LeasedCopy<M> {
    from: M,
    offset: usize,
    len: usize,
    to: *mut u8,
}

// SAFETY: the target is the memory of a tensor that no other thread uses yet and that outlives the copy
// (`Copies::run`); the lease is `Send`.
unsafe impl<M: Memory> Send for LeasedCopy<M> {}

/// The copies that fill the large tensors of one batch.
#[derive(Debug)]
pub struct Copies<M>(Vec<LeasedCopy<M>>);

impl<M: Memory> Copies<M> {
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Adds a copy of the `len` bytes at `offset` in a lease to `to`.
    ///
    /// # Safety
    /// The lease has these bytes. `to` points to `len` writable bytes, which stay valid and which nothing else uses
    /// until [`Self::run`] has returned.
    pub unsafe fn push(&mut self, from: M, offset: usize, len: usize, to: *mut u8) {
        self.0.push(LeasedCopy { from, offset, len, to });
    }

    /// Performs the copies and releases the leases. Call it without the GIL, while the batch lives.
    pub fn run(self) {
        for LeasedCopy { from, offset, len, to } in self.0 {
            // SAFETY: the caller of `push` guarantees both ranges.
            unsafe { copy(from.ptr().add(offset), to, len, len >= STREAM_FROM) };
        }
    }
}

/// Returns the number of bytes that the small tensors of a payload need in pinned memory. Returns `None` if torch's
/// function must pin the batch:
/// - an object is repeated: torch's function copies it each time;
/// - tensors share memory;
/// - pinning would change a key of a dict: torch's function leaves keys unchanged.
pub fn small_bytes(payload: &[u8], tuples_become_lists: bool) -> Result<Option<usize>, Error> {
    let mut scan = Scan { tuples_become_lists, ..Scan::default() };
    walk(payload, &mut scan)?;
    Ok((!scan.needs_torch).then_some(scan.slab_len))
}

/// The properties of a payload that matter for pinning.
#[derive(Default)]
struct Scan {
    tuples_become_lists: bool,
    slab_len: usize,
    /// True if torch's function must pin the batch, see [`small_bytes`].
    needs_torch: bool,
    /// For each value on the stack, true if pinning changes it.
    changes: Vec<bool>,
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
        self.needs_torch |= group == Group::Dict && inside.iter().step_by(2).any(|&key| key);
        let changes = inside.iter().any(|&it| it) || group == Group::Tuple && self.tuples_become_lists;
        self.changes.truncate(start);
        self.changes.push(changes);
        Ok(())
    }

    fn keep(&mut self, _: usize) -> Result<(), Error> {
        self.needs_torch = true;
        Ok(())
    }

    fn storage(&mut self, _: &Storage<'_>) -> Result<(), Error> {
        self.needs_torch = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interop::memory::Heap;
    use crate::tree::Writer;
    use crate::tree::dtype::Dtype;
    use crate::tree::layout::{Style, TransferPlan};

    fn tensor(writer: &mut Writer<'_>, bytes: &[u8]) {
        let shape = [bytes.len() as i64];
        let plan = TransferPlan::new(&shape, &[1], 1, Style::Tensor).unwrap();
        // SAFETY: the view covers exactly these bytes.
        unsafe { writer.inline(Kind::Tensor, Dtype::UINT8, &shape, &plan, bytes.as_ptr()) };
    }

    fn scanned(lists: bool, write: impl FnOnce(&mut Writer<'_>)) -> Option<usize> {
        let mut payload = Vec::new();
        write(&mut Writer::new(&mut payload));
        small_bytes(&payload, lists).unwrap()
    }

    #[test]
    fn small_tensors_are_placed_one_after_the_other() {
        let sum = scanned(false, |writer| {
            writer.open(Group::List, 4);
            tensor(writer, &[1; 64]);
            tensor(writer, &[1; 65]);
            tensor(writer, &[]);
            writer.int(5);
        });
        assert_eq!(sum, Some(64 + 128));
        assert_eq!(scanned(false, |writer| writer.int(5)), Some(0));
    }

    #[test]
    fn torchs_function_pins_marked_objects_and_keys_that_pinning_changes() {
        let keyed = |writer: &mut Writer<'_>| {
            writer.open(Group::Dict, 1);
            writer.open_ints(Group::Tuple, 1);
            writer.next_int(5);
            writer.int(6);
        };
        assert_eq!((scanned(false, keyed), scanned(true, keyed)), (Some(0), None));
        let tensor_key = scanned(false, |writer| {
            writer.open(Group::Dict, 1);
            tensor(writer, &[1]);
            writer.none();
        });
        let marked = scanned(false, |writer| {
            writer.mark();
            writer.open(Group::List, 0);
        });
        assert_eq!((tensor_key, marked), (None, None));
        assert!(small_bytes(&[255], false).is_err());
    }

    #[test]
    fn copies_fill_their_targets() {
        let (from, mut to) = (Heap::new(100).unwrap(), [0u8; 8]);
        // SAFETY: the heap has 100 bytes; the target has 5 from its second byte on, and lives until the end of the
        // test.
        let copies = unsafe {
            from.ptr().write_bytes(7, 100);
            let mut copies = Copies::new();
            copies.push(from, 95, 5, to.as_mut_ptr().add(1));
            copies
        };
        copies.run();
        assert_eq!(to, [0, 7, 7, 7, 7, 7, 0, 0]);
    }
}
