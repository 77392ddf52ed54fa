//! The encoding of a batch: a tree of plain values and leaves (tensors, arrays), in pre-order.
//!
//! ```text
//! value  := tag:u8 body
//! None, False, True  -            Int    i64              Float  f64          Complex f64 f64
//! Str    varint, UTF-8            Bytes  varint, bytes    Ints   group:u8 varint, i64 ...
//! List, Tuple        varint, that many values             Dict   varint, that many (key, value)
//! BytesOutside       varint, place (the bytes are in a memory leaf)
//! Tensor, Array, ReadOnlyArray
//!                    dtype:u8 form:u8 size:varint ... [stride:varint ...] place
//! form   := number of dimensions (bits 0-4) | strides follow (bit 5) | data is in a memory leaf (bit 6) or in a
//!           storage (bit 7); both bits: no elements, but an offset
//! place  := bit 6: leaf:u32 offset:u64; bit 7: storage:varint offset:varint; both: offset:varint in elements;
//!           neither: the bytes themselves
//!
//! Before a value:
//! Mark     -                      Back can refer to the value; marks are numbered from 0
//! Storage  form:u8 length:varint  memory that tensors share, numbered from 0; a place follows
//! Instead of a value:
//! Back     mark:varint            the object with that mark, which must be complete
//! ```
//! Numbers are little-endian; strides are in elements, and omitted for contiguous tensors and arrays; offsets are in
//! bytes unless stated otherwise. The bytes may be damaged: [`walk`] checks every tag, count, length, size and stride
//! before using it.

mod brief;
pub mod dtype;
mod gather;
pub mod layout;
pub mod overlap;
mod reader;
mod writer;

pub use brief::brief;
pub use reader::{Atom, Build, Leaf, Place, Storage, text, walk};
pub use writer::{Placeholder, Writer};

/// The type of a container in the tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Group {
    /// A list.
    #[default]
    List,
    /// A tuple.
    Tuple,
    /// A dict, whose items are pairs of a key and a value.
    Dict,
}

/// The type of a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A `torch.Tensor`.
    Tensor,
    /// A `numpy.ndarray`.
    Array,
    /// A `numpy.ndarray` that cannot be written to.
    ReadOnlyArray,
}

mod tag {
    pub const NONE: u8 = 0;
    pub const FALSE: u8 = 1;
    pub const TRUE: u8 = 2;
    pub const INT: u8 = 3;
    pub const FLOAT: u8 = 4;
    pub const COMPLEX: u8 = 5;
    pub const STR: u8 = 6;
    pub const BYTES: u8 = 7;
    pub const LIST: u8 = 8;
    pub const TUPLE: u8 = 9;
    pub const DICT: u8 = 10;
    pub const INTS: u8 = 11;
    pub const TENSOR: u8 = 12;
    pub const ARRAY: u8 = 13;
    pub const BACK: u8 = 14;
    pub const MARK: u8 = 15;
    pub const STORAGE: u8 = 16;
    pub const BYTES_OUTSIDE: u8 = 17;
    pub const READ_ONLY_ARRAY: u8 = 18;
}

const FORM_DIMS: u8 = 0x1f;
const FORM_STRIDES: u8 = 0x20;
const FORM_OUTSIDE: u8 = 0x40;
const FORM_SHARED: u8 = 0x80;

#[cfg(test)]
mod tests;
