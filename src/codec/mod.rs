//! The codec encodes a batch, a plain tree of Python values, tensors and arrays, as bytes and memory leaves, and
//! decodes it.
//!
//! [`crate::tree`] defines the bytes. Pickle handles any other batch (subclasses, cycles, ...) as a whole. Decoding
//! preserves the identities of containers, tensors and arrays, and the elements that tensors share. The first pass
//! (`draft`, `seen`) writes as if no object repeats; `aliases` resolves repetitions. Both compile without the feature
//! `python`, for their tests.

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

/// Frees a buffer that has become large because of a message.
pub fn shrink(buffer: &mut Vec<u8>) {
    if buffer.capacity() > BUFFER_KEPT {
        *buffer = Vec::new();
    }
}

/// The side that may change the bytes of a leaf after it is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// Neither side: only the batch refers to the array, and dropping the batch does not write to it.
    Sole,
    /// The worker, as in torch: a tensor that it keeps shares memory with the delivered one.
    Shared,
    /// The worker. But the delivered array must not change.
    Private,
}

/// The encoder's destination for large leaves, which are numbered from 0 in order.
pub trait Sink {
    /// Allocates a page-aligned leaf. Returns its number and its memory.
    fn reserve(&mut self, len: usize) -> Result<(u32, *mut u8)>;

    /// Returns true if the sink can adopt arrays to which only the batch refers.
    fn takes_arrays(&self) -> bool {
        false
    }

    /// Returns the leaf and the offset of bytes that can be sent without a copy. Called only for at least
    /// `INLINE_LIMIT` bytes.
    fn adopt(&mut self, ptr: *const u8, len: usize, hold: Hold) -> Option<(u32, u64)>;
}

/// The decoder's source of leaves.
pub trait Source {
    type Memory: Memory;

    /// Takes a leaf. Returns an error if the leaf does not exist or was already taken, because the payload may be
    /// damaged.
    fn leaf(&mut self, index: u32) -> Result<Self::Memory>;
}

/// Checks that `len` bytes at `offset` are inside the leaf and aligned. Returns [`Error::Corrupt`] if not.
#[inline]
pub fn within<M: Memory>(memory: &M, leaf: u32, offset: u64, len: usize, align: usize) -> Result<usize> {
    let offset = usize::try_from(offset).ok().filter(|offset| {
        offset.checked_add(len).is_some_and(|end| end <= memory.len())
            && (memory.ptr() as usize).wrapping_add(*offset).is_multiple_of(align)
    });
    let beyond = || format!("a view of {len} bytes reaches beyond leaf {leaf} of {} bytes", memory.len());
    offset.ok_or_else(|| Error::corrupt(beyond()))
}
