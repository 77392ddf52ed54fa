//! The header of a file.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use super::format::{HEADER, MAGIC, META, META_MAX, VERSION, overhead, word};
use super::record::Record;
use crate::error::{Error, Result};
use crate::sys::map::Mapping;
use crate::sys::{identity, sealed};
use crate::wire::checksum;

/// The header of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// The version of the layout and of the encoding of samples.
    pub version: u64,
    /// The number of rows.
    pub rows: u64,
    /// The length of the table in bytes. The file is at least this long.
    pub limit: u64,
    /// The bytes that the creator of the file stored with it.
    pub meta: Vec<u8>,
    /// Bits of [`super::format::flag`].
    pub(super) flags: u64,
}

impl Head {
    /// Reads the header of a file; `None` if the file is not a table.
    ///
    /// Errors: [`Error::Os`] if there is too little memory or address space to map it.
    pub fn read(fd: BorrowedFd<'_>) -> Result<Option<Self>> {
        let map = match Mapping::new(fd, HEADER as usize) {
            Ok(map) => map,
            Err(error @ Error::Os { errno: libc::ENOMEM, .. }) => return Err(error),
            Err(_) => return Ok(None),
        };
        let words: &[AtomicU64] = words(&map, 0, word::COUNT);
        let read = |at: usize| words[at].load(Ordering::Acquire);
        let len = read(word::META_LEN) as usize;
        if read(word::MAGIC) != MAGIC || len > META_MAX {
            return Ok(None);
        }
        // SAFETY: the meta is in the header, which is mapped until this function returns.
        let meta = unsafe { Record::new(map.as_ptr().wrapping_add(META as usize), len) }.copy(0, len);
        let [version, rows, limit, flags] = [word::VERSION, word::ROWS, word::LIMIT, word::FLAGS].map(read);
        let is_possible = i64::try_from(limit).is_ok() && overhead(rows) < limit;
        Ok(is_possible.then_some(Self { version, rows, limit, meta, flags }))
    }

    /// Formats a file of `limit` zero bytes as an empty table with these flags.
    pub(super) fn write(fd: BorrowedFd<'_>, rows: u64, limit: u64, meta: &[u8], flags: u64) -> Result<()> {
        let heap = overhead(rows);
        if heap >= limit || meta.len() > META_MAX || usize::try_from(limit).is_err() {
            return Err(Error::usage(format!("a cache of {rows} rows does not fit into {limit} bytes")));
        }
        let mut words = [0; word::COUNT];
        words[word::MAGIC] = MAGIC;
        words[word::VERSION] = VERSION;
        words[word::ROWS] = rows;
        words[word::LIMIT] = limit;
        words[word::END] = heap;
        words[word::PROBES] = rows.div_ceil(100).min(8);
        words[word::META_LEN] = meta.len() as u64;
        words[word::BOOT] = boot();
        words[word::FLAGS] = flags;
        let words: Vec<u8> = words.into_iter().flat_map(u64::to_ne_bytes).collect();
        sealed::write_at(fd, &words, 0)?;
        sealed::write_at(fd, meta, META)
    }
}

/// Returns `count` words of a mapping, starting with the word at index `at`.
#[inline]
pub(super) fn words(map: &Mapping, at: usize, count: usize) -> &[AtomicU64] {
    assert!((at + count) * 8 <= map.len(), "the mapping has no words {at}..{}", at + count);
    // SAFETY: the words are in the mapping, which begins on a page, and all users of them use atomics,
    // or system calls before others know the file.
    unsafe { std::slice::from_raw_parts(map.as_ptr().cast::<AtomicU64>().add(at), count) }
}

/// Returns a number that identifies this boot of the machine; 0 if unknown.
pub(super) fn boot() -> u64 {
    identity::boot_id().map_or(0, |id| checksum(&id))
}
