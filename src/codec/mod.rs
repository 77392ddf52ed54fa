//! The codec: a batch that is a plain tree of Python values, tensors and arrays becomes bytes and memory
//! leaves, and comes back.
//!
//! [`crate::tree`] defines the bytes. What is not plain (subclasses, cycles, ...) is left to pickle as a
//! whole. A batch that comes back has the identities of its containers, tensors and arrays, and tensors that
//! shared an element share it again. The first pass writes as if nothing came twice; only where something
//! did, `aliases` resolves them.
//!
//! What needs no interpreter compiles without the feature `python`: the first pass (`draft`, `seen`), alias resolution, the
//! sides of shared memory (`leaves`).

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
pub(crate) mod pickle;
#[cfg(feature = "python")]
mod pinned;
#[cfg(feature = "python")]
pub(crate) mod prepare;
#[cfg(feature = "python")]
pub(crate) mod roundtrip;

use crate::config::BUFFER_KEPT;
use crate::error::{Error, Result};
use crate::interop::memory::Memory;

#[cfg(feature = "python")]
pub(crate) use decode::{decode, decode_indices, decode_pinned};
#[cfg(feature = "python")]
pub(crate) use encode::{encode, encode_indices};
pub use leaves::Outgoing;
#[cfg(feature = "python")]
pub(crate) use pickle::{pickle_of, pickle_sum};
#[cfg(feature = "python")]
pub(crate) use pinned::Pinned;

/// Frees a buffer that one large message has blown up.
pub fn shrink(buffer: &mut Vec<u8>) {
    if buffer.capacity() > BUFFER_KEPT {
        *buffer = Vec::new();
    }
}

/// Where an encoder puts what does not fit into the payload. Leaves are numbered from 0 in the order in which
/// they are taken.
pub trait Sink {
    /// Memory for a leaf of its own, page aligned: its number and where it lies.
    fn reserve(&mut self, len: usize) -> Result<(u32, *mut u8)>;

    /// Bytes that lie in memory which may travel as it is: the number of the leaf, and their offset in it.
    /// Asked only for leaves of at least [`INLINE_LIMIT`] bytes.
    fn adopt(&mut self, ptr: *const u8, len: usize) -> Option<(u32, u64)>;
}

/// Where a decoder finds the leaves.
pub trait Source {
    /// A leaf's memory.
    type Memory: Memory;

    /// Takes a leaf. A damaged payload may ask for one that is not there, or twice: that is an error.
    fn leaf(&mut self, index: u32) -> Result<Self::Memory>;
}

/// The offset of `len` bytes in a leaf, checked.
///
/// # Errors
/// [`Error::Corrupt`]: they reach beyond the leaf, or their address is no multiple of `align`.
#[inline]
pub fn within<M: Memory>(memory: &M, leaf: u32, offset: u64, len: usize, align: usize) -> Result<usize> {
    let offset = usize::try_from(offset).ok().filter(|offset| {
        offset.checked_add(len).is_some_and(|end| end <= memory.len())
            && (memory.ptr() as usize).wrapping_add(*offset).is_multiple_of(align)
    });
    let beyond = || format!("a view of {len} bytes reaches beyond leaf {leaf} of {} bytes", memory.len());
    offset.ok_or_else(|| Error::corrupt(beyond()))
}
