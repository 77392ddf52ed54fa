//! The codec, which encodes a batch (a plain tree of Python values, tensors and arrays) as bytes and leaves, and
//! decodes it again.
//!
//! [`crate::tree`] defines the bytes. A batch that is not a plain tree (with subclasses, cycles, ...) is pickled, and
//! the codec encodes the pickle with its out-of-band tensors and arrays. A container, a leaf, or a long string or bytes
//! object that occurs twice in a batch is decoded to one object, and tensors that share memory share it after decoding,
//! too.
//!
//! The first pass of encoding (`draft`, `seen`) writes as if no object were repeated; the second pass (`aliases`)
//! resolves the repetitions. Both passes compile without the feature `python`, so that they can be tested without it.

pub mod aliases;
pub mod draft;
mod leaves;
pub mod pinning;
pub mod seen;
#[cfg(test)]
mod tests;

#[cfg(feature = "python")]
mod decode;
#[cfg(feature = "python")]
mod encode;
#[cfg(feature = "python")]
pub mod gathered;
#[cfg(feature = "python")]
pub mod pickle;
#[cfg(feature = "python")]
mod pinned;
#[cfg(feature = "python")]
pub mod prepare;
#[cfg(feature = "python")]
pub mod roundtrip;
#[cfg(feature = "python")]
pub mod rows;
#[cfg(feature = "python")]
pub mod samples;
#[cfg(feature = "python")]
mod shapes;

use crate::config::BUFFER_KEPT;
use crate::error::{Error, Result};
use crate::interop::memory::Memory;

#[cfg(feature = "python")]
pub use decode::{decode, decode_indices, decode_pinned};
#[cfg(feature = "python")]
pub use encode::{encode, encode_indices};
pub use leaves::Outgoing;
#[cfg(feature = "python")]
pub use pickle::{pickle_of, pickle_sum};
#[cfg(feature = "python")]
pub use pinned::Pinned;
#[cfg(feature = "python")]
pub use shapes::Shapes;

/// Frees a reusable buffer if a large message has grown it beyond [`BUFFER_KEPT`].
pub fn shrink(buffer: &mut Vec<u8>) {
    if buffer.capacity() > BUFFER_KEPT {
        *buffer = Vec::new();
    }
}

/// Whether the worker may still change the bytes of a leaf after the leaf is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// No: only the batch refers to the array, and dropping the batch does not write to the array.
    Sole,
    /// Yes, as in torch: a tensor that the worker keeps shares memory with the delivered tensor.
    Shared,
    /// Yes, but the delivered array must not change, so it must be a copy.
    Private,
}

/// The encoder's destination for large leaves, which are indexed from 0 in the order in which the sink gets them.
///
/// # Safety
/// The `len` bytes of memory that `reserve` returns can be written as long as the sink lives, and nothing else uses them.
pub unsafe trait Sink {
    /// Allocates a leaf of `len` bytes, aligned for every dtype. Returns its index and its memory.
    fn reserve(&mut self, len: usize) -> Result<(u32, *mut u8)>;

    /// Returns true if the sink can adopt arrays to which only the batch refers.
    fn takes_arrays(&self) -> bool {
        false
    }

    /// Returns true if decoding must restore what a pickle restores: a tensor's Python attributes, and whether an array
    /// can be written to. If false, both are lost, as they are between torch's workers and the main process.
    fn keeps_state(&self) -> bool {
        false
    }

    /// Adopts the `len` bytes at `ptr` if they can be sent without a copy. Returns the index of the leaf that contains
    /// them, and their offset in that leaf; `None` if they must be copied. Called only for at least `INLINE_LIMIT`
    /// bytes.
    ///
    /// # Safety
    /// The batch keeps the bytes alive.
    unsafe fn adopt(&mut self, ptr: *const u8, len: usize, hold: Hold) -> Option<(u32, u64)>;
}

/// The decoder's source of leaves.
pub trait Source {
    type Memory: Memory;

    /// Takes the leaf with this index. The index comes from a payload that may be damaged: returns an error if there is
    /// no such leaf, or it was already taken.
    fn leaf(&mut self, index: u32) -> Result<Self::Memory>;
}

/// Checks that the `len` bytes at `offset` are inside the leaf, and that their address is a multiple of `align`.
/// Returns the offset, or [`Error::Corrupt`] if the check fails.
#[inline]
pub fn within<M: Memory>(memory: &M, leaf: u32, offset: u64, len: usize, align: usize) -> Result<usize> {
    let offset = usize::try_from(offset).ok().filter(|offset| {
        offset.checked_add(len).is_some_and(|end| end <= memory.len())
            && (memory.ptr() as usize).wrapping_add(*offset).is_multiple_of(align)
    });
    let text = || format!("a view of {len} bytes is misaligned or exceeds leaf {leaf} of {} bytes", memory.len());
    offset.ok_or_else(|| Error::corrupt(text()))
}
