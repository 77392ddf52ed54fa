//! Records: their bytes in the mapping, and what precedes them.

use std::marker::PhantomData;
use std::ops::Range;

use xxhash_rust::xxh3::Xxh3;

use super::format::PREFIX;

/// Maximum number of bytes that are copied or written at once.
pub(super) const JOINED: usize = 64 << 10;

/// The bytes of a record, or a part of them, in the mapping of a [`Cache`](super::Cache), which `'a` borrows. A broken
/// process may write to the bytes: copy them before you check them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// The address of the first byte, valid for `len` bytes during `'a`.
    ptr: *const u8,
    len: usize,
    owner: PhantomData<&'a [u8]>,
}

impl Record<'_> {
    /// Makes a record.
    ///
    /// # Safety
    /// The address must be valid for `len` bytes during the lifetime, which the caller chooses.
    pub(super) unsafe fn new(ptr: *const u8, len: usize) -> Self {
        Self { ptr, len, owner: PhantomData }
    }

    /// Returns the number of bytes.
    #[expect(clippy::len_without_is_empty, reason = "no caller needs it")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the address of the first byte, valid for [`Self::len`] bytes during the record's lifetime.
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr
    }

    /// Returns the part of `len` bytes that starts at the offset `at`; `None` if the record does not contain it.
    pub fn part(&self, at: usize, len: usize) -> Option<Self> {
        at.checked_add(len).filter(|end| *end <= self.len)?;
        Some(Self { ptr: self.ptr.wrapping_add(at), len, owner: PhantomData })
    }

    /// Returns a copy of at most `len` bytes, starting at the offset `at`.
    pub fn copy(&self, at: usize, len: usize) -> Vec<u8> {
        let at = at.min(self.len);
        let len = len.min(self.len - at);
        let mut bytes = Vec::with_capacity(len);
        // SAFETY: the range is in the record, whose bytes are mapped; `bytes` has room for `len` bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(self.ptr.add(at), bytes.as_mut_ptr(), len);
            bytes.set_len(len);
        }
        bytes
    }

    /// Returns the checksum of the bytes.
    pub(super) fn content(&self) -> u64 {
        let mut sum = Xxh3::new();
        (0..self.len).step_by(JOINED).for_each(|at| sum.update(&self.copy(at, JOINED)));
        sum.digest()
    }
}

/// Records that are written together.
#[derive(Debug, Default)]
pub struct Batch {
    /// The records, each after room for its prefix, and padded to a multiple of 8.
    pub(super) bytes: Vec<u8>,
    /// The row of each record, and the range of its bytes.
    pub(super) records: Vec<(u64, Range<usize>)>,
}

impl Batch {
    /// Adds the record of a row that `write` appends to the bytes. Returns false, and adds none, if `write` does, or if
    /// the record is too long.
    pub fn push(&mut self, row: u64, write: impl FnOnce(&mut Vec<u8>) -> bool) -> bool {
        let before = self.bytes.len();
        let start = before + PREFIX as usize;
        self.bytes.resize(start, 0);
        let is_written = write(&mut self.bytes) && u32::try_from(self.bytes.len() - start).is_ok();
        if is_written {
            self.records.push((row, start..self.bytes.len()));
            self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
        } else {
            self.bytes.truncate(before);
        }
        is_written
    }

    /// Returns the number of bytes.
    pub fn size(&self) -> usize {
        self.bytes.len()
    }

    /// Removes all records.
    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.records.clear();
    }
}

/// Returns the checksum of a record that is given in parts. It depends on the bytes only.
pub(super) fn content_of(parts: &[&[u8]]) -> u64 {
    let mut sum = Xxh3::new();
    parts.iter().for_each(|part| sum.update(part));
    sum.digest()
}

/// What precedes a record's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Prefix {
    /// Number of the record's bytes.
    pub len: u32,
    /// The number of the opening that stored the record; 0 if unknown.
    pub writer: u32,
    /// The checksum of the content, combined with the row and the writer; 0 if the table has no checksums.
    pub check: u64,
}

impl Prefix {
    /// Converts two words of a file.
    pub fn of_words(first: u64, second: u64) -> Self {
        Self { len: first as u32, writer: (first >> 32) as u32, check: second }
    }

    /// Returns the bytes of the prefix.
    pub fn to_bytes(self) -> [u8; PREFIX as usize] {
        let words = [u64::from(self.writer) << 32 | u64::from(self.len), self.check];
        let mut bytes = [0; PREFIX as usize];
        for (to, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
            *to = word.to_ne_bytes();
        }
        bytes
    }

    /// Returns the check of a row's record with this checksum of its content. Records of other rows or writers have
    /// other checks, so that none of them passes for this one.
    pub fn check_of(self, row: u64, content: u64) -> u64 {
        content ^ self.mask(row)
    }

    /// Returns the checksum of the content of a row's record.
    pub fn content(self, row: u64) -> u64 {
        self.check ^ self.mask(row)
    }

    fn mask(self, row: u64) -> u64 {
        let place = row << 32 ^ row >> 32 ^ u64::from(self.writer);
        place.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// Returns the number of bytes that the record takes in the heap.
    pub fn space(self) -> u64 {
        space_of(u64::from(self.len))
    }
}

/// Returns the number of bytes that a record of `len` bytes takes in the heap.
pub(super) fn space_of(len: u64) -> u64 {
    (len + PREFIX).next_multiple_of(8)
}
