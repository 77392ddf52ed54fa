//! The writing side: appends the parts of a tree to a payload.

use super::dtype::Dtype;
use super::layout::{Dims, TransferPlan};
use super::{FORM_OUTSIDE, FORM_SHARED, FORM_STRIDES, Group, Kind, tag};

/// A writer that appends values to a payload.
pub struct Writer<'a> {
    out: &'a mut Vec<u8>,
}

/// The position in a payload at which [`Writer::fill`] writes a leaf's index and offset once they are known.
#[derive(Clone, Copy, Debug)]
pub struct Placeholder(usize);

impl Placeholder {
    /// Returns the placeholder's position in the output.
    pub fn at(self) -> usize {
        self.0
    }

    /// Creates a placeholder whose bytes were moved to `at`.
    pub fn moved(at: usize) -> Self {
        Self(at)
    }
}

impl<'a> Writer<'a> {
    /// Creates a writer that appends to `out`.
    pub fn new(out: &'a mut Vec<u8>) -> Self {
        Self { out }
    }

    /// Returns the length of the output, including bytes that precede the payload.
    pub fn len(&self) -> usize {
        self.out.len()
    }

    /// Returns true if the output is empty.
    pub fn is_empty(&self) -> bool {
        self.out.is_empty()
    }

    /// Truncates the output to `len` bytes, as [`Self::len`] counts them.
    pub fn truncate(&mut self, len: usize) {
        self.out.truncate(len);
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.out.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.out.push(value as u8);
    }

    /// Writes `None`.
    pub fn none(&mut self) {
        self.out.push(tag::NONE);
    }

    /// Writes a bool.
    pub fn bool(&mut self, value: bool) {
        self.out.push(if value { tag::TRUE } else { tag::FALSE });
    }

    /// Writes an int.
    pub fn int(&mut self, value: i64) {
        self.out.push(tag::INT);
        self.out.extend_from_slice(&value.to_le_bytes());
    }

    /// Writes a float.
    pub fn float(&mut self, value: f64) {
        self.out.push(tag::FLOAT);
        self.out.extend_from_slice(&value.to_le_bytes());
    }

    /// Writes a complex number.
    pub fn complex(&mut self, re: f64, im: f64) {
        self.out.push(tag::COMPLEX);
        self.out.extend_from_slice(&re.to_le_bytes());
        self.out.extend_from_slice(&im.to_le_bytes());
    }

    /// Writes a string.
    pub fn str(&mut self, value: &str) {
        self.out.push(tag::STR);
        self.varint(value.len() as u64);
        self.out.extend_from_slice(value.as_bytes());
    }

    /// Writes a bytes object.
    pub fn bytes(&mut self, value: &[u8]) {
        self.out.push(tag::BYTES);
        self.varint(value.len() as u64);
        self.out.extend_from_slice(value);
    }

    /// Writes a bytes object whose `len` bytes are in a memory leaf. [`Self::fill`] sets the location.
    pub fn bytes_outside(&mut self, len: usize) -> Placeholder {
        self.out.push(tag::BYTES_OUTSIDE);
        self.varint(len as u64);
        self.placeholder()
    }

    /// Begins a container. The caller then writes its `count` items (for a dict, `count` pairs of a key and a value).
    pub fn open(&mut self, group: Group, count: usize) {
        self.out.push(match group {
            Group::List => tag::LIST,
            Group::Tuple => tag::TUPLE,
            Group::Dict => tag::DICT,
        });
        self.varint(count as u64);
    }

    /// Begins a list or tuple of ints. The caller then calls [`Self::next_int`] `count` times.
    pub fn open_ints(&mut self, group: Group, count: usize) {
        self.out.push(tag::INTS);
        self.out.push(if group == Group::List { tag::LIST } else { tag::TUPLE });
        self.varint(count as u64);
        self.out.reserve(count * 8);
    }

    /// Writes the next int of a container that [`Self::open_ints`] has begun.
    #[inline]
    pub fn next_int(&mut self, value: i64) {
        self.out.extend_from_slice(&value.to_le_bytes());
    }

    fn leaf(&mut self, kind: Kind, dtype: Dtype, shape: &[i64], plan: &TransferPlan, place: u8) {
        self.view(kind, dtype, shape, (!plan.contiguous).then_some(&plan.strides), place);
    }

    fn view(&mut self, kind: Kind, dtype: Dtype, shape: &[i64], strides: Option<&[i64]>, place: u8) {
        let with_strides = if strides.is_some() { FORM_STRIDES } else { 0 };
        let kind = match kind {
            Kind::Tensor => tag::TENSOR,
            Kind::Array => tag::ARRAY,
            Kind::ReadOnlyArray => tag::READ_ONLY_ARRAY,
        };
        self.out.extend_from_slice(&[kind, dtype.code(), shape.len() as u8 | with_strides | place]);
        for &size in shape {
            self.varint(size as u64);
        }
        for &stride in strides.unwrap_or_default() {
            self.varint(stride as u64);
        }
    }

    /// Writes a leaf whose bytes are part of the payload.
    ///
    /// # Safety
    /// As for [`TransferPlan::copy`].
    pub unsafe fn inline(&mut self, kind: Kind, dtype: Dtype, shape: &[i64], plan: &TransferPlan, first: *const u8) {
        self.leaf(kind, dtype, shape, plan, 0);
        self.out.reserve(plan.bytes);
        let at = self.out.len();
        if plan.bytes > 0 {
            // SAFETY: `plan.bytes` bytes were reserved after `at`; the caller guarantees the source.
            unsafe { plan.copy(first, self.out.as_mut_ptr().add(at)) };
        }
        // SAFETY: exactly these bytes were reserved and written.
        unsafe { self.out.set_len(at + plan.bytes) };
    }

    /// Writes a tensor or array whose bytes are in a memory leaf. [`Self::fill`] sets the location.
    pub fn outside(&mut self, kind: Kind, dtype: Dtype, shape: &[i64], plan: &TransferPlan) -> Placeholder {
        self.leaf(kind, dtype, shape, plan, FORM_OUTSIDE);
        self.placeholder()
    }

    fn placeholder(&mut self) -> Placeholder {
        let placeholder = Placeholder(self.out.len());
        self.out.extend_from_slice(&[0; 12]);
        placeholder
    }

    /// Writes a gap, one byte wide, which alias resolution replaces with a value.
    pub fn gap(&mut self) {
        self.out.push(tag::BACK);
    }

    /// Marks the value that follows.
    pub fn mark(&mut self) {
        self.out.push(tag::MARK);
    }

    /// Writes a reference to the object with this mark.
    pub fn back(&mut self, mark: usize) {
        self.out.push(tag::BACK);
        self.varint(mark as u64);
    }

    /// Writes a storage whose bytes are part of the payload.
    pub fn storage(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(&[tag::STORAGE, 0]);
        self.varint(bytes.len() as u64);
        self.out.extend_from_slice(bytes);
    }

    /// Writes a storage whose `len` bytes are in a memory leaf. [`Self::fill`] sets the location.
    pub fn storage_outside(&mut self, len: usize) -> Placeholder {
        self.out.extend_from_slice(&[tag::STORAGE, FORM_OUTSIDE]);
        self.varint(len as u64);
        self.placeholder()
    }

    /// Writes a tensor whose bytes are in a storage. `strides` are in elements and not negative; `offset` is in bytes.
    pub fn shared(&mut self, dtype: Dtype, shape: &[i64], strides: &[i64], storage: usize, offset: usize) {
        let natural = Dims::contiguous(shape).is_some_and(|natural| *natural == *strides);
        self.view(Kind::Tensor, dtype, shape, (!natural).then_some(strides), FORM_SHARED);
        self.varint(storage as u64);
        self.varint(offset as u64);
    }

    /// Writes a tensor without elements, whose offset in its storage is `offset` elements.
    pub fn empty(&mut self, dtype: Dtype, shape: &[i64], plan: &TransferPlan, offset: u64) {
        self.leaf(Kind::Tensor, dtype, shape, plan, FORM_OUTSIDE | FORM_SHARED);
        self.varint(offset);
    }

    /// Writes bytes that another writer wrote, including placeholders.
    pub fn raw(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }

    /// Fills a placeholder with the index of a memory leaf and the offset of the bytes in that leaf.
    pub fn fill(&mut self, placeholder: Placeholder, leaf: u32, offset: u64) {
        let at = placeholder.0;
        self.out[at..at + 4].copy_from_slice(&leaf.to_le_bytes());
        self.out[at + 4..at + 12].copy_from_slice(&offset.to_le_bytes());
    }
}
