//! The reading side.

use std::os::fd::BorrowedFd;

use super::{HEADER, MAGIC, PLACE_BITS, ROW_MASK, ROWS, VERSION, WORDS, form, tag};
use crate::error::{Error, Result};
use crate::sys::sealed::SealedMap;

/// A row of a [`Store`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Row<'a> {
    /// An int.
    Int(i64),
    /// A float.
    Float(f64),
    /// The bytes that were passed to the builder.
    Record(&'a [u8]),
}

/// The position and length in bytes of a section of the image. [`Store::open`] has checked that the section lies within
/// the image.
#[derive(Clone, Copy, Debug)]
struct Section {
    at: usize,
    len: usize,
}

/// A mapped image. Reading takes no lock, and is safe in forked children.
#[derive(Debug)]
pub struct Store {
    map: SealedMap,
    /// The kind that was passed to the builder.
    pub kind: u64,
    rows: u64,
    uniform: bool,
    table: Section,
    slots: Section,
    unhashed: Section,
    meta: Section,
    data: Section,
}

/// Returns the error for an image whose contents are invalid.
#[cold]
pub fn damaged(what: &str) -> Error {
    Error::foreign(format!("it is damaged: {what}"))
}

#[inline]
fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[inline]
fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

impl Store {
    /// Maps a finished image.
    ///
    /// Errors: [`Error::Foreign`] if the file is not an image, or is one of another version.
    pub fn open(fd: BorrowedFd<'_>) -> Result<Self> {
        let map = SealedMap::new(fd, false)?;
        // SAFETY: the mapping is not writable.
        let bytes = unsafe { map.bytes() };
        let header = bytes.get(..HEADER as usize).ok_or_else(|| Error::foreign("it is too short"))?;
        let mut words = [0; WORDS];
        for (at, slot) in words.iter_mut().enumerate() {
            *slot = u64_at(header, at * 8).unwrap_or(0);
        }
        let [magic, version, kind, rows, chunk_rows, ..] = words;
        if magic != MAGIC {
            return Err(Error::foreign("it does not begin with the header of a shared object"));
        }
        if version != VERSION {
            return Err(Error::foreign(format!("its version is {version}, not {VERSION}")));
        }
        let section = |number: usize, each: usize| {
            let [at, len] = [words[5 + 2 * number], words[6 + 2 * number]];
            let range = usize::try_from(at).ok().zip(usize::try_from(len).ok());
            let inside = |(at, len): &(usize, usize)| {
                at.checked_add(*len).is_some_and(|end| end <= bytes.len()) && len.is_multiple_of(each)
            };
            let (at, len) = range.filter(inside).ok_or_else(|| damaged("a section is outside the file"))?;
            Ok::<_, Error>(Section { at, len })
        };
        let (table, slots, unhashed) = (section(0, 16)?, section(1, 8)?, section(2, 8)?);
        let (meta, data) = (section(3, 1)?, section(4, 1)?);
        if table.len == 0 || !(slots.len == 0 || (slots.len / 8).is_power_of_two()) {
            return Err(damaged("a table has the wrong length"));
        }
        if rows > ROW_MASK || (chunk_rows != 0 && chunk_rows != ROWS) {
            return Err(damaged("its number of rows is invalid"));
        }
        Ok(Self { kind, rows, uniform: chunk_rows == ROWS, table, slots, unhashed, meta, data, map })
    }

    /// Returns the whole image.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is not writable.
        unsafe { self.map.bytes() }
    }

    #[inline]
    fn section(&self, section: Section) -> &[u8] {
        self.bytes().get(section.at..section.at + section.len).unwrap_or_default()
    }

    /// Returns the number of rows.
    #[inline]
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Returns the `meta` that was passed to `Builder::finish`.
    pub fn meta(&self) -> &[u8] {
        self.section(self.meta)
    }

    /// Returns the position and length of the raw data in bytes.
    pub fn data(&self) -> (usize, usize) {
        (self.data.at, self.data.len)
    }

    /// Returns a row. For an index below [`Self::rows`], the call fails only if the image is damaged.
    #[inline]
    pub fn row(&self, row: u64) -> Result<Row<'_>> {
        self.find(row).ok_or_else(|| damaged("a row is outside its chunk"))
    }

    #[inline]
    fn find(&self, row: u64) -> Option<Row<'_>> {
        let table = self.section(self.table);
        let chunk = if self.uniform { (row / ROWS) as usize } else { Self::chunk_of(table, row)? };
        let entry: &[u8; 32] = table.get(chunk.checked_mul(16)?..)?.first_chunk()?;
        let [first, place, next, end] = [0, 8, 16, 24].map(|at| u64_at(entry, at).unwrap_or(0));
        let place_of = |word: u64| (word & ((1 << PLACE_BITS) - 1)) as usize;
        let chunk = self.bytes().get(place_of(place)..place_of(end))?;
        if row >= next {
            return None;
        }
        let (row, rows) = (row.checked_sub(first)? as usize, (next - first) as usize);
        match place >> PLACE_BITS {
            form::INTS => Some(Row::Int(u64_at(chunk, row.checked_mul(8)?)? as i64)),
            form::FLOATS => Some(Row::Float(f64::from_bits(u64_at(chunk, row.checked_mul(8)?)?))),
            form::RECORDS => {
                // The offsets at which the rows end. The first row starts at 0.
                let ends = chunk.get(..rows.checked_mul(4)?)?;
                let begin = if row == 0 { 0 } else { u32_at(ends, row * 4 - 4)? as usize };
                let end = u32_at(ends, row * 4)? as usize;
                Some(Row::Record(chunk.get(ends.len()..)?.get(begin..end)?))
            }
            form::LONE => Some(Row::Record(chunk.get(8..)?.get(..usize::try_from(u64_at(chunk, 0)?).ok()?)?)),
            _ => None,
        }
    }

    /// Returns the index of the last chunk whose first row is not after `row`.
    fn chunk_of(table: &[u8], row: u64) -> Option<usize> {
        // The last entry marks the end of the last chunk.
        let (mut low, mut high) = (0, table.len() / 16 - 1);
        while low < high {
            let middle = low.midpoint(high);
            if u64_at(table, middle * 16)? <= row { low = middle + 1 } else { high = middle }
        }
        low.checked_sub(1)
    }

    /// Returns the key rows that may have the hash `hash`, in the order in which the hash table is probed. There are
    /// none if the image has no hash table.
    pub fn candidates(&self, hash: u64) -> impl Iterator<Item = u64> + '_ {
        let slots = self.section(self.slots);
        let size = slots.len() / 8;
        let start = hash as usize;
        let probes = (0..size).map(move |step| u64_at(slots, (start.wrapping_add(step) & (size - 1)) * 8));
        let filled = probes.map_while(|slot| slot.filter(|slot| *slot != 0));
        let likely = filled.filter(move |slot| tag(*slot) == tag(hash));
        let rows = likely.filter_map(|slot| (slot & ROW_MASK).checked_sub(1));
        rows.filter(|row| *row < self.rows)
    }

    /// Returns the rows of keys without a hash.
    pub fn unhashed(&self) -> impl Iterator<Item = u64> + '_ {
        let unhashed = self.section(self.unhashed);
        (0..unhashed.len() / 8).filter_map(|at| u64_at(unhashed, at * 8)).filter(|row| *row < self.rows)
    }
}
