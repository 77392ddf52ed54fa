//! The reading side: validates a payload and passes its values to a builder.

use std::num::NonZeroU32;

use super::dtype::Dtype;
use super::layout::{Dims, extent};
use super::{FORM_DIMS, FORM_OUTSIDE, FORM_SHARED, FORM_STRIDES, Group, Kind, tag};
use crate::config::{MAX_DEPTH, MAX_DIMS};
use crate::error::{Error, Result};

/// A value that is not a container.
#[derive(Debug)]
pub enum Atom<'a> {
    /// `None`.
    None,
    /// A bool.
    Bool(bool),
    /// An int.
    Int(i64),
    /// A float.
    Float(f64),
    /// A complex number.
    Complex(f64, f64),
    /// A string.
    Str(&'a str),
    /// A bytes object.
    Bytes(&'a [u8]),
    /// A bytes object in a memory leaf. The builder must check that the leaf has these bytes.
    BytesOutside {
        /// Number of bytes.
        len: usize,
        /// The index of the memory leaf.
        leaf: u32,
        /// Offset of the first byte in the leaf.
        offset: u64,
    },
    /// A list or tuple of ints of 8 bytes each.
    Ints(Group, &'a [[u8; 8]]),
    /// A tensor or an array.
    Leaf(&'a Leaf<'a>),
    /// The object that [`Build::keep`] kept under this number. The builder must check that the object exists.
    Back(usize),
}

/// A tensor or an array. Its sizes and strides have been checked against each other and, if its bytes are inline,
/// against the payload's length.
#[derive(Debug)]
pub struct Leaf<'a> {
    /// The type of the decoded object.
    pub kind: Kind,
    /// The element type.
    pub dtype: Dtype,
    /// The sizes.
    pub shape: Dims,
    /// The strides, in elements. None of them is negative.
    pub strides: Dims,
    /// Number of bytes from the first element to the last, inclusive.
    pub extent: usize,
    /// The location of these bytes.
    pub place: Place<'a>,
}

/// The location of the bytes of a leaf or a storage.
#[derive(Debug)]
pub enum Place<'a> {
    /// In the payload: exactly the bytes of the leaf's extent.
    Inline(&'a [u8]),
    /// In a memory leaf. The builder must check that the memory leaf contains the whole extent.
    Outside {
        /// The index of the memory leaf.
        leaf: u32,
        /// Offset of the first element, in bytes.
        offset: u64,
    },
    /// In a storage. The builder must check that the storage contains the leaf's whole extent.
    Shared {
        /// The index of the storage, from 0 in the order of the calls of [`Build::storage`].
        storage: usize,
        /// Offset of the first element, in bytes.
        offset: u64,
    },
    /// Nowhere: the leaf has no elements.
    Empty {
        /// The leaf's offset in its storage, in elements.
        offset: i64,
    },
}

/// Memory that several tensors share.
#[derive(Debug)]
pub struct Storage<'a> {
    /// Number of bytes.
    pub len: usize,
    /// Inline or outside.
    pub place: Place<'a>,
}

/// The builder of [`walk`]. It has a stack of values: an atom pushes a value, and the end of a container replaces the
/// container's items with one value.
pub trait Build {
    /// The builder's error. For a damaged payload, it is converted from [`Error::Corrupt`].
    type Error: From<Error>;

    /// Pushes a value.
    fn atom(&mut self, atom: Atom<'_>) -> std::result::Result<(), Self::Error>;

    /// Replaces the last `count` values (2 x `count` for a dict: key, value, key, ...) with a container.
    fn close(&mut self, group: Group, count: usize) -> std::result::Result<(), Self::Error>;

    /// Keeps the last value under the number `index`, for [`Atom::Back`]. `index` is less than the payload's length in
    /// bytes.
    fn keep(&mut self, index: usize) -> std::result::Result<(), Self::Error>;

    /// Takes the next storage, which precedes all tensors in it.
    fn storage(&mut self, storage: &Storage<'_>) -> std::result::Result<(), Self::Error>;
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

#[expect(clippy::large_enum_variant, reason = "one lives at a time, on the stack of `walk`")]
enum Token<'a> {
    Atom(Atom<'a>),
    Leaf(Leaf<'a>),
    Open(Group, usize),
    Mark,
    Storage(Storage<'a>),
}

/// A mark's number plus 1.
type Mark = NonZeroU32;

/// A container that is not complete yet.
#[derive(Clone, Copy, Default)]
struct Open {
    group: Group,
    /// The mark before it.
    mark: Option<Mark>,
    count: usize,
    /// Number of values that have not been read yet.
    missing: usize,
}

/// Number of nesting levels that are kept in the small array; most batches need no more.
const NEAR: usize = 4;

/// The containers around the current value. The array for deeper levels is initialized only when it is needed.
#[derive(Default)]
struct Stack {
    near: [Open; NEAR],
    far: Option<[Open; MAX_DEPTH - NEAR]>,
    depth: usize,
}

impl Stack {
    /// Opens a container. Returns `None` if it would exceed [`MAX_DEPTH`].
    #[inline]
    fn push(&mut self, container: Open) -> Option<()> {
        let slot = match self.depth.checked_sub(NEAR) {
            None => &mut self.near[self.depth],
            Some(at) => self.far.get_or_insert([Open::default(); MAX_DEPTH - NEAR]).get_mut(at)?,
        };
        *slot = container;
        self.depth += 1;
        Some(())
    }

    /// Returns the innermost container.
    #[inline]
    fn last_mut(&mut self) -> Option<&mut Open> {
        let last = self.depth.checked_sub(1)?;
        match last.checked_sub(NEAR) {
            None => self.near.get_mut(last),
            Some(at) => self.far.as_mut()?.get_mut(at),
        }
    }
}

/// Passes the parts of a payload, which must be a single value, to `build`. Never panics, whatever the bytes are.
/// Allocates memory only for an error.
pub fn walk<B: Build>(payload: &[u8], build: &mut B) -> std::result::Result<(), B::Error> {
    let mut reader = Reader { bytes: payload, at: 0 };
    let mut open = Stack::default();
    let (mut marks, mut mark) = (0, None::<Mark>);
    loop {
        match reader.token()? {
            Token::Atom(atom) => build.atom(atom)?,
            Token::Leaf(leaf) => build.atom(Atom::Leaf(&leaf))?,
            Token::Open(group, 0) => build.close(group, 0)?,
            Token::Open(group, count) => {
                let values = if group == Group::Dict { count * 2 } else { count };
                let container = Open { group, mark: mark.take(), count, missing: values };
                open.push(container).ok_or_else(|| reader.corrupt("containers are nested too deeply"))?;
                continue;
            }
            Token::Mark if mark.is_none() => {
                marks += 1;
                mark = Mark::new(marks);
                continue;
            }
            Token::Storage(storage) if mark.is_none() => {
                build.storage(&storage)?;
                continue;
            }
            Token::Mark | Token::Storage(_) => return Err(reader.corrupt("a mark is not followed by a value").into()),
        }
        if let Some(mark) = mark.take() {
            build.keep(mark.get() as usize - 1)?;
        }
        while let Some(Open { group, mark, count, missing }) = open.last_mut() {
            *missing -= 1;
            if *missing > 0 {
                break;
            }
            build.close(*group, *count)?;
            if let Some(mark) = *mark {
                build.keep(mark.get() as usize - 1)?;
            }
            open.depth -= 1;
        }
        if open.depth == 0 {
            break;
        }
    }
    if reader.at == payload.len() { Ok(()) } else { Err(reader.corrupt("there are bytes after the batch").into()) }
}

/// Returns the string of a payload that is a single string; `None` for any other payload.
#[inline]
pub fn text(payload: &[u8]) -> Option<&str> {
    if payload.first() != Some(&tag::STR) {
        return None;
    }
    let mut reader = Reader { bytes: payload, at: 1 };
    let len = reader.count(1).ok()?;
    let bytes = reader.take(len).ok()?;
    if reader.at == payload.len() { std::str::from_utf8(bytes).ok() } else { None }
}

impl<'a> Reader<'a> {
    #[cold]
    fn corrupt(&self, what: &str) -> Error {
        Error::corrupt(format!("a batch's payload of {} bytes, at byte {}: {what}", self.bytes.len(), self.at))
    }

    #[inline]
    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        match self.bytes[self.at..].get(..len) {
            Some(bytes) => {
                self.at += len;
                Ok(bytes)
            }
            None => Err(self.corrupt("it ends too early")),
        }
    }

    #[inline]
    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        match self.bytes[self.at..].first_chunk() {
            Some(&bytes) => {
                self.at += N;
                Ok(bytes)
            }
            None => Err(self.corrupt("it ends too early")),
        }
    }

    #[inline]
    fn byte(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    fn float(&mut self) -> Result<f64> {
        Ok(f64::from_le_bytes(self.array()?))
    }

    #[inline]
    fn varint(&mut self) -> Result<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let low = u64::from(byte & 0x7f);
            if shift == 63 && low > 1 {
                break;
            }
            value |= low << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(self.corrupt("a number is too long"))
    }

    /// Reads a count of items, each of which takes at least `each` bytes. Returns an error if the remaining bytes
    /// cannot hold that many.
    fn count(&mut self, each: usize) -> Result<usize> {
        let count = self.varint()?;
        let room = (self.bytes.len() - self.at) / each;
        match usize::try_from(count) {
            Ok(count) if count <= room => Ok(count),
            _ => Err(self.corrupt("a count exceeds the payload")),
        }
    }

    fn dims(&mut self, len: usize) -> Result<Dims> {
        let mut dims = Dims::EMPTY;
        if len > 0 {
            dims = Dims::zeros(len).ok_or_else(|| self.corrupt("too many dimensions"))?;
            for value in dims.as_mut_slice() {
                *value = i64::try_from(self.varint()?).map_err(|_| self.corrupt("a size or stride is out of range"))?;
            }
        }
        Ok(dims)
    }

    fn leaf(&mut self, kind: Kind) -> Result<Leaf<'a>> {
        let dtype = Dtype::from_code(self.byte()?).filter(|dtype| match kind {
            Kind::Tensor => dtype.dl().is_some(),
            Kind::Array | Kind::ReadOnlyArray => dtype.numpy_name().is_some(),
        });
        let dtype = dtype.ok_or_else(|| self.corrupt("an unknown element type"))?;
        let form = self.byte()?;
        let len = usize::from(form & FORM_DIMS);
        if len > MAX_DIMS || (kind != Kind::Tensor && form & FORM_SHARED != 0) {
            return Err(self.corrupt("an unknown form of leaf"));
        }
        let shape = self.dims(len)?;
        let strides = match form & FORM_STRIDES {
            0 => Dims::contiguous(&shape).ok_or_else(|| self.corrupt("a shape is too large"))?,
            _ => self.dims(len)?,
        };
        let extent = extent(&shape, &strides, dtype.itemsize()).filter(|&bytes| isize::try_from(bytes).is_ok());
        let extent = extent.ok_or_else(|| self.corrupt("a shape is too large"))?;
        let place = match form & (FORM_SHARED | FORM_OUTSIDE) {
            FORM_SHARED => Place::Shared { storage: self.number()?, offset: self.varint()? },
            0 | FORM_OUTSIDE => self.place(form, extent)?,
            _ if extent > 0 => return Err(self.corrupt("an unknown form of leaf")),
            _ => {
                let offset = i64::try_from(self.varint()?);
                Place::Empty { offset: offset.map_err(|_| self.corrupt("a number is too large"))? }
            }
        };
        Ok(Leaf { kind, dtype, shape, strides, extent, place })
    }

    #[inline]
    fn place(&mut self, form: u8, len: usize) -> Result<Place<'a>> {
        Ok(match form & FORM_OUTSIDE {
            0 => Place::Inline(self.take(len)?),
            _ => Place::Outside { leaf: u32::from_le_bytes(self.array()?), offset: u64::from_le_bytes(self.array()?) },
        })
    }

    fn storage(&mut self) -> Result<Storage<'a>> {
        let form = self.byte()?;
        if form & !FORM_OUTSIDE != 0 {
            return Err(self.corrupt("an unknown form of storage"));
        }
        let len = self.number()?;
        if len > isize::MAX as usize {
            return Err(self.corrupt("a storage is too large"));
        }
        Ok(Storage { len, place: self.place(form, len)? })
    }

    fn number(&mut self) -> Result<usize> {
        usize::try_from(self.varint()?).map_err(|_| self.corrupt("a number is too large"))
    }

    #[inline]
    fn token(&mut self) -> Result<Token<'a>> {
        let atom = match self.byte()? {
            tag::NONE => Atom::None,
            tag::FALSE => Atom::Bool(false),
            tag::TRUE => Atom::Bool(true),
            tag::INT => Atom::Int(i64::from_le_bytes(self.array()?)),
            tag::FLOAT => Atom::Float(self.float()?),
            tag::COMPLEX => Atom::Complex(self.float()?, self.float()?),
            tag::STR => {
                let len = self.count(1)?;
                let text = std::str::from_utf8(self.take(len)?);
                Atom::Str(text.map_err(|_| self.corrupt("a string is not UTF-8"))?)
            }
            tag::BYTES => {
                let len = self.count(1)?;
                Atom::Bytes(self.take(len)?)
            }
            tag::BYTES_OUTSIDE => Atom::BytesOutside {
                len: self.number()?,
                leaf: u32::from_le_bytes(self.array()?),
                offset: u64::from_le_bytes(self.array()?),
            },
            tag::INTS => {
                let group = match self.byte()? {
                    tag::LIST => Group::List,
                    tag::TUPLE => Group::Tuple,
                    _ => return Err(self.corrupt("an unknown group of ints")),
                };
                let count = self.count(8)?;
                Atom::Ints(group, self.take(count * 8)?.as_chunks().0)
            }
            tag::LIST => return Ok(Token::Open(Group::List, self.count(1)?)),
            tag::TUPLE => return Ok(Token::Open(Group::Tuple, self.count(1)?)),
            tag::DICT => return Ok(Token::Open(Group::Dict, self.count(2)?)),
            tag::TENSOR => return Ok(Token::Leaf(self.leaf(Kind::Tensor)?)),
            tag::ARRAY => return Ok(Token::Leaf(self.leaf(Kind::Array)?)),
            tag::READ_ONLY_ARRAY => return Ok(Token::Leaf(self.leaf(Kind::ReadOnlyArray)?)),
            tag::BACK => Atom::Back(self.number()?),
            tag::MARK => return Ok(Token::Mark),
            tag::STORAGE => return Ok(Token::Storage(self.storage()?)),
            _ => return Err(self.corrupt("an unknown tag")),
        };
        Ok(Token::Atom(atom))
    }
}
