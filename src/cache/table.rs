//! The table: a mapped file that many processes read and write.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use super::format::{COUNTERS, HEADER, MAGIC, META, META_MAX, PREFIX, STRIPE, STRIPES, VERSION, counter, state, word};
use crate::config::{HEADROOM_CHECK, HEADROOM_MARGIN};
use crate::error::{Error, Result};
use crate::sys::cgroup::Roots;
use crate::sys::map::Mapping;
use crate::sys::owned::KnownFd;
use crate::sys::{fork, identity, memfd, memory, sealed};
use crate::wire::checksum;

/// Maximum bytes of a record that are handled at once: parts up to this length are joined, so that one call writes
/// them.
const JOINED: usize = 64 << 10;

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
}

/// The state of a row in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// The row has no record yet.
    Absent,
    /// The row's sample cannot be kept.
    Never,
    /// The row has a whole record.
    Whole(Record),
}

/// The location of a record's bytes in the mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The address of the first byte, valid while the [`Cache`] lives. A broken process may write to the bytes: copy
    /// them before you check them.
    pub ptr: *const u8,
    /// The number of bytes.
    pub len: usize,
}

impl Record {
    /// Returns a copy of at most `len` bytes, starting at the offset `at`.
    pub fn copy(&self, at: usize, len: usize) -> Vec<u8> {
        let len = len.min(self.len.saturating_sub(at));
        let mut bytes = Vec::with_capacity(len);
        // SAFETY: the range is in the record, which is in the mapping; `bytes` has room for `len` bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(self.ptr.add(at.min(self.len)), bytes.as_mut_ptr(), len);
            bytes.set_len(len);
        }
        bytes
    }
}

/// The reason why a cache takes no more samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    /// None: the cache still takes samples.
    Open = 0,
    /// The cache's limit is reached.
    Full = 1,
    /// The machine, a memory cgroup or the disk has no more room.
    NoRoom = 2,
}

/// The outcome of [`Cache::put`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// The record is published.
    Stored,
    /// The row already has a record, or is marked as one whose sample cannot be kept.
    Known,
    /// The sample was not stored, because the cache takes no more samples; true if this call has closed the cache.
    Closed(bool),
}

/// The space that a cache uses, and counts of its reads and records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Number of reads that found their sample.
    pub hits: u64,
    /// Number of reads that did not find their sample.
    pub misses: u64,
    /// Number of rows that were marked because their samples cannot be kept.
    pub refused: u64,
    /// Number of records whose bytes were found to have changed since they were written.
    pub damaged: u64,
    /// Bytes of published records.
    pub stored: u64,
    /// Bytes of the heap that were taken but hold no record: the space of killed writers, and of rows that two
    /// processes wrote at the same time.
    pub unused: u64,
    /// Bytes of the heap that no writer has taken yet.
    pub left: u64,
    /// Maximum size of the cache in bytes, including its index.
    pub limit: u64,
}

impl Usage {
    /// Computes the usage from the words of a header and its counters; `word` returns the word at an index.
    fn read(word: impl Fn(usize) -> u64, limit: u64) -> Self {
        let sum = |at: usize| (0..STRIPES).map(|stripe| word(COUNTERS + stripe * STRIPE + at)).sum();
        let [rows, end, stored] = [word::ROWS, word::END, word::STORED].map(&word);
        Self {
            hits: sum(counter::HITS),
            misses: sum(counter::MISSES),
            refused: sum(counter::REFUSED),
            damaged: sum(counter::DAMAGED),
            stored,
            unused: end.saturating_sub(Cache::overhead(rows)).saturating_sub(stored),
            left: limit.saturating_sub(end),
            limit,
        }
    }

    /// Computes the usage from the first [`HEADER`] bytes of a file, which other processes may be using; `None` if the
    /// file is not a table of this version.
    pub fn of_header(header: &[u8]) -> Option<Self> {
        let words = header.get(..HEADER as usize)?.as_chunks::<8>().0;
        let word = |at: usize| u64::from_ne_bytes(words[at]);
        (word(word::MAGIC) == MAGIC && word(word::VERSION) == VERSION).then(|| Self::read(word, word(word::LIMIT)))
    }
}

/// A mapped table. Forked children may use it, too.
#[derive(Debug)]
pub struct Cache {
    map: Mapping,
    fd: KnownFd,
    rows: u64,
    /// The position at which the heap starts.
    heap: u64,
    /// The position up to which a memory check has succeeded.
    checked: AtomicU64,
    /// True if the file's pages are memory that nothing can reclaim.
    in_memory: bool,
    /// A bit for each row, set once this process has checked the row's record; empty if records need no check.
    verified: Box<[AtomicU64]>,
    /// The stripe of this process, and the fork generation in which it was chosen.
    stripe: AtomicU64,
}

impl Cache {
    /// Creates an empty table in a new memfd of `limit` bytes, which must be more than [`Self::overhead`].
    pub fn create(rows: u64, limit: u64, meta: &[u8]) -> Result<Self> {
        let fd = memfd::create("rustloader-cache", limit)?;
        memfd::seal(fd.as_fd())?;
        Self::format(fd.as_fd(), rows, limit, meta)?;
        Self::open(fd, true)
    }

    /// Returns the number of bytes that precede the first record in a table of `rows` rows.
    pub fn overhead(rows: u64) -> u64 {
        rows.saturating_mul(8).saturating_add(HEADER).next_multiple_of(4096)
    }

    /// Formats a file of `limit` zero bytes as an empty table. The magic is written last, because a file without it
    /// does not count as a table.
    pub fn format(fd: BorrowedFd<'_>, rows: u64, limit: u64, meta: &[u8]) -> Result<()> {
        let heap = Self::overhead(rows);
        if heap >= limit || meta.len() > META_MAX || usize::try_from(limit).is_err() {
            return Err(Error::usage(format!("a cache of {rows} rows does not fit into {limit} bytes")));
        }
        let mut words = [0; word::COUNT];
        words[word::VERSION] = VERSION;
        words[word::ROWS] = rows;
        words[word::LIMIT] = limit;
        words[word::END] = heap;
        words[word::PROBES] = rows.div_ceil(100).min(8);
        words[word::META_LEN] = meta.len() as u64;
        words[word::BOOT] = boot();
        let words: Vec<u8> = words.into_iter().flat_map(u64::to_ne_bytes).collect();
        sealed::write_at(fd, &words, 0)?;
        sealed::write_at(fd, meta, META)?;
        sealed::write_at(fd, &MAGIC.to_ne_bytes(), 0)
    }

    /// Reads the header of a file; `None` if the file is not a table or cannot be mapped.
    pub fn head(fd: BorrowedFd<'_>) -> Result<Option<Head>> {
        let Ok(map) = Mapping::new(fd, HEADER as usize) else { return Ok(None) };
        let words: &[AtomicU64] = words(&map, 0, word::COUNT);
        let read = |at: usize| words[at].load(Ordering::Acquire);
        let len = read(word::META_LEN) as usize;
        if read(word::MAGIC) != MAGIC || len > META_MAX {
            return Ok(None);
        }
        let meta = Record { ptr: map.as_ptr().wrapping_add(META as usize), len }.copy(0, len);
        let [version, rows, limit] = [word::VERSION, word::ROWS, word::LIMIT].map(read);
        let is_possible = i64::try_from(limit).is_ok() && Self::overhead(rows) < limit;
        Ok(is_possible.then_some(Head { version, rows, limit, meta }))
    }

    /// Maps a table made by [`Self::create`], or by [`Self::format`] in a file that is at least as long as its limit.
    /// `in_memory` is true if the file's pages are memory that nothing can reclaim.
    ///
    /// Errors: [`Error::Foreign`] if the file is not a table of this version.
    pub fn open(fd: OwnedFd, in_memory: bool) -> Result<Self> {
        let head = Self::head(fd.as_fd())?.filter(|head| head.version == VERSION);
        let head = head.ok_or_else(|| Error::foreign("it is not a cache of this version"))?;
        let limit = usize::try_from(head.limit).map_err(|_| Error::foreign("its limit is damaged"))?;
        let heap = Self::overhead(head.rows);
        let map = Mapping::new(fd.as_fd(), limit)?;
        Ok(Self {
            map,
            fd: KnownFd::new(fd),
            rows: head.rows,
            heap,
            checked: AtomicU64::new(0),
            in_memory,
            verified: Box::default(),
            stripe: AtomicU64::new(u64::MAX),
        })
    }

    /// Maps a table as [`Self::open`] does, in a file that outlives the programs that use it. The caller must hold the
    /// file's lock. `whole` is the length that the file had before the caller extended it to its limit; records beyond
    /// that length are lost. After a crash of the machine, the index and the end of the heap may disagree. The end is
    /// therefore computed from the index if the file was shorter than its limit, or was last used before the current
    /// boot. Rows whose samples could not be kept become absent, because the samples may now be picklable.
    pub fn open_file(fd: OwnedFd, in_memory: bool, whole: u64) -> Result<Self> {
        let mut cache = Self::open(fd, in_memory)?;
        cache.verified = (0..cache.rows.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        let is_cut = whole < cache.limit();
        if is_cut || cache.usage().refused > 0 {
            cache.forget(|row, at| at == state::NEVER || cache.end_of(row).is_none_or(|end| end > whole));
            (0..STRIPES).for_each(|stripe| cache.counter(stripe, counter::REFUSED).store(0, Ordering::Relaxed));
        }
        if is_cut || cache.header(word::BOOT).load(Ordering::Relaxed) != boot() {
            let ends = (0..cache.rows).filter_map(|row| Some((cache.end_of(row)?, cache.space_at(row)?)));
            let (end, stored) =
                ends.fold((cache.heap, 0), |(end, sum), (record_end, size)| (end.max(record_end), sum + size));
            cache.header(word::END).store(end, Ordering::Relaxed);
            cache.header(word::STORED).store(stored, Ordering::Relaxed);
            cache.header(word::BOOT).store(boot(), Ordering::Relaxed);
        }
        Ok(cache)
    }

    /// Makes rows absent again: those for which `is_gone`, called with the row and its index word, returns true.
    fn forget(&self, is_gone: impl Fn(u64, u64) -> bool) {
        for row in 0..self.rows {
            let at = self.row(row).load(Ordering::Relaxed);
            if at != state::ABSENT && is_gone(row, at) {
                self.row(row).store(state::ABSENT, Ordering::Relaxed);
            }
        }
    }

    /// Returns the first `max_rows` rows that have a record, or all of them if there are fewer. In a table of more than
    /// 65,536 rows, considers only evenly spaced rows.
    pub fn some_rows(&self, max_rows: usize) -> Vec<u64> {
        let step = self.rows.div_ceil(1 << 16).max(1) as usize;
        let whole = (0..self.rows).step_by(step).filter(|row| matches!(self.lookup(*row), Lookup::Whole(_)));
        whole.take(max_rows).collect()
    }

    /// Raises the limit to `limit`, the length that the file has now, and lets the table take samples again. The caller
    /// must then open the table again, because this mapping keeps its length.
    pub fn grow(&self, limit: u64) {
        if self.header(word::LIMIT).fetch_max(limit, Ordering::Relaxed) < limit {
            self.header(word::CLOSED).store(Closed::Open as u64, Ordering::Relaxed);
        }
    }

    /// Lets the cache take samples again if it was closed with [`Closed::NoRoom`].
    pub fn reopen(&self) {
        let (no_room, open) = (Closed::NoRoom as u64, Closed::Open as u64);
        let _ = self.header(word::CLOSED).compare_exchange(no_room, open, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Returns the descriptor; `None` if other code has closed it.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.is_intact().then(|| self.fd.as_fd())
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Returns the length of this mapping in bytes, which was the limit when the table was opened.
    pub fn limit(&self) -> u64 {
        self.map.len() as u64
    }

    /// Returns the reason why the cache takes no more samples, or [`Closed::Open`].
    pub fn closed(&self) -> Closed {
        match self.header(word::CLOSED).load(Ordering::Relaxed) {
            0 => Closed::Open,
            1 => Closed::Full,
            _ => Closed::NoRoom,
        }
    }

    /// Returns true for the first few calls, counted over all processes. The caller then makes its sample twice, for
    /// comparison.
    pub fn take_probe(&self) -> bool {
        let probes = self.header(word::PROBES);
        let take = |left: u64| left.checked_sub(1);
        probes.load(Ordering::Relaxed) > 0 && probes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }

    /// Returns true for the first call with this bit, counted over all processes.
    pub fn is_news(&self, bit: u64) -> bool {
        self.header(word::LOGGED).fetch_or(bit, Ordering::Relaxed) & bit == 0
    }

    /// Counts `number` hits.
    #[inline]
    pub fn count_hits(&self, number: u64) {
        self.counter(self.stripe(), counter::HITS).fetch_add(number, Ordering::Relaxed);
    }

    /// Counts `number` misses.
    pub fn count_misses(&self, number: u64) {
        self.counter(self.stripe(), counter::MISSES).fetch_add(number, Ordering::Relaxed);
    }

    /// Looks up a row in the index. Panics if the table has no such row.
    #[inline]
    pub fn lookup(&self, row: u64) -> Lookup {
        // SYNC: row-published (pairs with the Release in `put`): a reader that sees the position sees the record's
        // bytes.
        let at = self.row(row).load(Ordering::Acquire);
        match at {
            state::ABSENT => Lookup::Absent,
            state::NEVER => Lookup::Never,
            _ => self.record(row, at).map_or(Lookup::Absent, Lookup::Whole),
        }
    }

    /// Returns a row's record, which is at the position `at`; `None` if it cannot be read. If records are checked and
    /// this one is damaged, the row becomes absent, so that its sample is made again. A position beyond the end of this
    /// mapping is not damage: another program has raised the limit.
    #[inline]
    fn record(&self, row: u64, at: u64) -> Option<Record> {
        if at >= self.limit() && at.is_multiple_of(8) {
            return None;
        }
        let record = self.bounded(at);
        if self.verified.is_empty() {
            return record;
        }
        let (word, bit) = (&self.verified[row as usize / 64], 1 << (row % 64));
        if word.load(Ordering::Relaxed) & bit != 0 {
            return record;
        }
        let whole = record.filter(|record| self.prefix(at).1 == check(row, *record));
        if whole.is_some() {
            word.fetch_or(bit, Ordering::Relaxed);
            return whole;
        }
        let removed = self.row(row).compare_exchange(at, state::ABSENT, Ordering::Relaxed, Ordering::Relaxed);
        if removed.is_ok() {
            self.count(counter::DAMAGED);
        }
        None
    }

    /// Returns the record at the position `at`, if it lies within the heap.
    #[inline]
    fn bounded(&self, at: u64) -> Option<Record> {
        let first = at.checked_add(PREFIX).filter(|_| at >= self.heap && at.is_multiple_of(8))?;
        let room = self.limit().checked_sub(first)?;
        let len = u64::from(self.prefix(at).0);
        let ptr = self.map.as_ptr().wrapping_add(first as usize);
        (len <= room).then_some(Record { ptr, len: len as usize })
    }

    /// Returns the two halves of a record's prefix: length and checksum. `at` must be a multiple of 8 within the
    /// mapping.
    #[inline]
    fn prefix(&self, at: u64) -> (u32, u32) {
        let word = self.word(at).load(Ordering::Relaxed);
        (word as u32, (word >> 32) as u32)
    }

    /// Returns the position at which a row's record ends; `None` if the row has no record in the heap.
    fn end_of(&self, row: u64) -> Option<u64> {
        let at = self.row(row).load(Ordering::Relaxed);
        self.bounded(at).map(|record| at + space_of(record.len as u64))
    }

    /// Returns the number of bytes that a row's record takes in the heap; `None` as for [`Self::end_of`].
    fn space_at(&self, row: u64) -> Option<u64> {
        self.bounded(self.row(row).load(Ordering::Relaxed)).map(|record| space_of(record.len as u64))
    }

    /// Writes a record, whose bytes are given in parts, and publishes it.
    ///
    /// Errors: [`Error::Os`] if the write fails; the cache is then closed.
    pub fn put(&self, row: u64, parts: &[&[u8]]) -> Result<Put> {
        if self.row(row).load(Ordering::Relaxed) != state::ABSENT {
            return Ok(Put::Known);
        }
        if self.closed() != Closed::Open {
            return Ok(Put::Closed(false));
        }
        let len = parts.iter().map(|part| part.len()).sum::<usize>();
        let Ok(len) = u32::try_from(len) else { return Ok(self.never(row)) };
        let size = space_of(u64::from(len));
        let Some(fd) = self.fd() else { return Ok(self.close(Closed::NoRoom)) };
        let Some(at) = self.reserve(size) else {
            // If another program has raised the limit, the file is full only for this program.
            let maps_all = self.header(word::LIMIT).load(Ordering::Relaxed) <= self.limit();
            return Ok(if maps_all { self.close(Closed::Full) } else { Put::Closed(false) });
        };
        let written = self.write(fd, row, at, len, parts);
        let published = match written {
            Ok(true) => self.row(row).compare_exchange(
                state::ABSENT,
                at,
                // SYNC: row-published (pairs with the Acquire in `lookup`).
                Ordering::Release,
                Ordering::Relaxed,
            ),
            _ => Err(0),
        };
        if published.is_ok() {
            self.header(word::STORED).fetch_add(size, Ordering::Relaxed);
            return Ok(Put::Stored);
        }
        // No row refers to the reserved space. It is given back unless another process has taken space after it.
        let end = self.header(word::END);
        let _ = end.compare_exchange(at + size, at, Ordering::Relaxed, Ordering::Relaxed);
        match written {
            Ok(true) => Ok(Put::Known),
            Ok(false) => Ok(self.close(Closed::NoRoom)),
            Err(error) => {
                self.close(Closed::NoRoom);
                Err(error)
            }
        }
    }

    /// Marks a row as one whose sample cannot be kept, or cannot be read back. Returns [`Put::Known`].
    pub fn never(&self, row: u64) -> Put {
        if self.row(row).swap(state::NEVER, Ordering::Relaxed) != state::NEVER {
            self.count(counter::REFUSED);
        }
        Put::Known
    }

    /// Reserves `size` bytes of the heap and returns their position; `None` if they would exceed the limit.
    fn reserve(&self, size: u64) -> Option<u64> {
        let limit = self.limit().min(self.header(word::LIMIT).load(Ordering::Relaxed));
        let take = |end: u64| end.checked_add(size).filter(|end| *end <= limit);
        self.header(word::END).fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).ok()
    }

    /// Writes a record into its reserved space at `at`. Returns false if there is no memory for the record.
    fn write(&self, fd: BorrowedFd<'_>, row: u64, at: u64, len: u32, parts: &[&[u8]]) -> Result<bool> {
        if !self.has_memory(at, at + space_of(u64::from(len))) {
            return Ok(false);
        }
        let mut bytes = u64::from(len).to_ne_bytes().to_vec();
        let (mut remaining, mut to) = (parts, at);
        while let Some((part, others)) = remaining.split_first().filter(|(part, _)| bytes.len() + part.len() <= JOINED)
        {
            bytes.extend_from_slice(part);
            remaining = others;
        }
        sealed::write_at(fd, &bytes, to)?;
        to += bytes.len() as u64;
        for part in remaining {
            sealed::write_at(fd, part, to)?;
            to += part.len() as u64;
        }
        if !self.verified.is_empty() {
            let ptr = self.map.as_ptr().wrapping_add((at + PREFIX) as usize);
            let sum = check(row, Record { ptr, len: len as usize });
            self.word(at).store(u64::from(sum) << 32 | u64::from(len), Ordering::Relaxed);
        }
        Ok(true)
    }

    /// Returns true if there is memory for the positions `from..to` of the heap. Asks the system only about once per
    /// [`HEADROOM_CHECK`] bytes.
    fn has_memory(&self, from: u64, to: u64) -> bool {
        if !self.in_memory || to <= self.checked.load(Ordering::Relaxed) {
            return true;
        }
        let ahead = (to - from).max(HEADROOM_CHECK);
        let margin = ahead.clamp(*HEADROOM_MARGIN.start(), *HEADROOM_MARGIN.end());
        let enough = memory::available(&Roots::default()).bytes >= ahead.saturating_add(margin);
        if enough {
            self.checked.fetch_max(from + ahead, Ordering::Relaxed);
        }
        enough
    }

    fn close(&self, reason: Closed) -> Put {
        let before = self.header(word::CLOSED).compare_exchange(
            Closed::Open as u64,
            reason as u64,
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
        Put::Closed(before.is_ok())
    }

    /// Returns the space that the cache uses, and the counts of reads and records.
    pub fn usage(&self) -> Usage {
        Usage::read(|at| self.header(at).load(Ordering::Relaxed), self.limit())
    }

    #[inline]
    fn count(&self, at: usize) {
        self.counter(self.stripe(), at).fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the stripe of this process.
    #[inline]
    fn stripe(&self) -> usize {
        let (stored, generation) = (self.stripe.load(Ordering::Relaxed), fork::generation() << 8);
        if stored & !0xff == generation {
            return stored as usize & 0xff;
        }
        let stripe = std::process::id() as usize % STRIPES;
        self.stripe.store(generation | stripe as u64, Ordering::Relaxed);
        stripe
    }

    #[inline]
    fn counter(&self, stripe: usize, at: usize) -> &AtomicU64 {
        self.header(COUNTERS + stripe * STRIPE + at)
    }

    #[inline]
    fn header(&self, at: usize) -> &AtomicU64 {
        self.word(at as u64 * 8)
    }

    #[inline]
    fn row(&self, row: u64) -> &AtomicU64 {
        assert!(row < self.rows, "the table has no row {row}");
        self.word(HEADER + row * 8)
    }

    /// Returns the word at the position `at`, which must be a multiple of 8 within the mapping.
    #[inline]
    fn word(&self, at: u64) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.limit(), "the file has no word at {at}");
        // SAFETY: the word is in the mapping and aligned, and all users of these words use atomics.
        unsafe { AtomicU64::from_ptr(self.map.as_ptr().add(at as usize).cast()) }
    }
}

/// Returns `count` words of a mapping, starting with the word at index `at`.
fn words(map: &Mapping, at: usize, count: usize) -> &[AtomicU64] {
    assert!((at + count) * 8 <= map.len(), "the mapping has no words {at}..{}", at + count);
    // SAFETY: the words are in the mapping, which begins on a page, and all users of them use atomics.
    unsafe { std::slice::from_raw_parts(map.as_ptr().cast::<AtomicU64>().add(at), count) }
}

/// Returns the number of bytes that a record of `len` bytes takes in the heap.
fn space_of(len: u64) -> u64 {
    (len + PREFIX).next_multiple_of(8)
}

/// Returns the checksum of a record. The checksum covers the row, so that another row's record does not pass for this
/// row's.
fn check(row: u64, record: Record) -> u32 {
    let pieces = (0..record.len).step_by(JOINED).map(|at| checksum(&record.copy(at, JOINED)));
    pieces.fold(row.wrapping_mul(0x9e37_79b9_7f4a_7c15), |sum, piece| sum.rotate_left(5) ^ piece) as u32
}

/// Returns a number that identifies this boot of the machine; 0 if unknown.
fn boot() -> u64 {
    identity::boot_id().map_or(0, |id| checksum(&id))
}
