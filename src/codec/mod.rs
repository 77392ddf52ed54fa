//! The codec: a batch that is a plain tree of Python values, tensors and arrays becomes bytes and memory
//! leaves, and comes back.
//!
//! [`crate::tree`] defines the bytes. What is not plain (subclasses, cycles, ...) is left to pickle as a
//! whole. A batch that comes back has the identities of its containers, tensors and arrays, and tensors that
//! shared an element share it again. The first pass writes as if nothing came twice; only where something
//! did, `aliases` resolves them.

mod aliases;
mod decode;
mod encode;
mod pinned;
pub mod roundtrip;
mod seen;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::config::{BUFFER_KEPT, INLINE_LIMIT};
use crate::error::Error;
use crate::interop::dlpack::Lease;
use crate::wire;

pub use decode::{decode, decode_indices, decode_pinned};
pub use encode::{encode, encode_indices};
pub use pinned::{Copies, Pinned};

/// Gives back a buffer that one large message has blown up.
pub fn shrink(buffer: &mut Vec<u8>) {
    if buffer.capacity() > BUFFER_KEPT {
        *buffer = Vec::new();
    }
}

/// The checksum of a pickle that travels in a leaf: a message's own one covers its payload alone.
pub fn pickle_sum(pickle: &Bound<'_, PyBytes>) -> i64 {
    let bytes = pickle.as_bytes();
    if bytes.len() < INLINE_LIMIT {
        return 0;
    }
    pickle.py().detach(|| wire::checksum(bytes)) as i64
}

/// A pickle and what travels beside it, out of a decoded payload; the checksum is checked.
pub fn pickle_of<'py>(decoded: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyList>)> {
    let (pickle, objects, sum): (Bound<'py, PyBytes>, Bound<'py, PyList>, i64) = decoded.extract()?;
    if pickle_sum(&pickle) != sum {
        return Err(Error::corrupt("the checksum of a pickled batch does not fit").into());
    }
    Ok((pickle, objects))
}

/// Where an encoder puts what does not fit into the payload. Leaves are numbered from 0 in the order in which
/// they are had.
pub trait Sink {
    /// Memory for a leaf of its own, page aligned: its number and where it lies.
    fn reserve(&mut self, len: usize) -> Result<(u32, *mut u8), Error>;

    /// Bytes that lie in memory which may travel as it is: the number of the leaf, and their offset in it.
    /// Asked only for leaves of at least [`INLINE_LIMIT`] bytes.
    fn adopt(&mut self, ptr: *const u8, len: usize) -> Option<(u32, u64)>;
}

/// Where a decoder finds the leaves.
pub trait Source {
    /// The hold on a leaf.
    type Lease: Lease;

    /// Takes a leaf. A damaged payload may ask for one that is not there, or twice: that is an error.
    fn leaf(&mut self, index: u32) -> Result<Self::Lease, Error>;
}
