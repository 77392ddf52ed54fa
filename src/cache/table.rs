//! The table: a mapped file that many processes read and write.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use super::format::{
    COUNTERS, HEADER, INDEX, OPENING, OPENINGS, PREFIX, STRIPE, STRIPES, VERSION, counter, flag, opening, overhead,
    state, word,
};
use super::head::{Head, boot, words};
use super::openings::{Candidate, Opening};
use super::record::{Batch, JOINED, Prefix, Record, content_of, space_of};
use super::usage::Usage;
use crate::config::{HEADROOM_CHECK, HEADROOM_MARGIN};
use crate::error::{Error, Result};
use crate::sys::cgroup::Roots;
use crate::sys::map::Mapping;
use crate::sys::owned::KnownFd;
use crate::sys::{files, fork, memfd, memory, sealed};

/// The state of a row in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup<'a> {
    /// The row has no record yet.
    Absent,
    /// The row's sample cannot be kept.
    Never,
    /// The row has a whole record.
    Whole(Record<'a>),
    /// The row has a whole record that must be compared with the dataset before it is used.
    Due(Record<'a>),
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
    /// What this process has checked; `None` if the table does not outlive the programs that use it.
    checks: Option<Box<Checks>>,
    /// The stripe of this process, and the fork generation in which it was chosen.
    stripe: AtomicU64,
}

/// What a process has checked of the records in a file.
#[derive(Debug)]
struct Checks {
    /// A bit for each row, set once this process has checked the row's record.
    verified: Box<[AtomicU64]>,
    opening: Opening,
}

impl Cache {
    /// Creates an empty table in a new memfd of `limit` bytes, which must be more than [`Self::overhead`].
    pub fn create(rows: u64, limit: u64) -> Result<Self> {
        let fd = memfd::create("rustloader-cache", limit)?;
        memfd::seal(fd.as_fd())?;
        Head::write(fd.as_fd(), rows, limit, b"", 0)?;
        Self::open(fd, 0)
    }

    /// Returns the number of bytes that precede the first record in a table of `rows` rows.
    pub fn overhead(rows: u64) -> u64 {
        overhead(rows)
    }

    /// Formats a file of `limit` zero bytes as an empty table that outlives the programs that use it.
    pub fn format(fd: BorrowedFd<'_>, rows: u64, limit: u64, meta: &[u8]) -> Result<()> {
        Head::write(fd, rows, limit, meta, flag::LASTING)
    }

    /// Maps a table made by [`Self::create`], or by [`Self::format`] in a file that is at least as long as its limit.
    /// `opening` is the number of the opening to which this process belongs; 0 if unknown.
    ///
    /// Errors: [`Error::Foreign`] if the file is not a table of this version.
    pub fn open(fd: OwnedFd, opening: u32) -> Result<Self> {
        let head = Head::read(fd.as_fd())?.filter(|head| head.version == VERSION);
        let head = head.ok_or_else(|| Error::foreign("it is not a cache of this version"))?;
        let limit = usize::try_from(head.limit).map_err(|_| Error::foreign("its limit is damaged"))?;
        let map = Mapping::new(fd.as_fd(), limit)?;
        let checks = (head.flags & flag::LASTING != 0).then(|| {
            let verified = (0..head.rows.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
            Box::new(Checks { verified, opening: Opening::new(opening) })
        });
        Ok(Self {
            map,
            in_memory: files::is_in_memory(fd.as_fd()),
            fd: KnownFd::new(fd),
            rows: head.rows,
            heap: overhead(head.rows),
            checked: AtomicU64::new(0),
            checks,
            stripe: AtomicU64::new(u64::MAX),
        })
    }

    /// Maps a table as [`Self::open`] does, for the opening with the token `token`, or for a new one. The caller must
    /// hold the file's lock, or be the only one that knows the file. `whole` is the length that the file had before the
    /// caller extended it to its limit; records beyond that length are lost. After a crash of the machine, the index and
    /// the end of the heap may disagree. The end is therefore computed from the index if the file was shorter than its limit, or was last used before the
    /// current boot. Rows whose samples could not be kept become absent, because the samples may now be picklable.
    pub fn open_file(fd: OwnedFd, whole: u64, token: u64) -> Result<Self> {
        let mut cache = Self::open(fd, 0)?;
        let is_cut = whole < cache.limit();
        if is_cut || cache.usage().refused > 0 {
            (0..STRIPES).for_each(|stripe| cache.counter(stripe, counter::REFUSED).store(0, Ordering::Relaxed));
            cache.forget(|at| at == state::NEVER || cache.bounded(at).is_none_or(|found| found.end() > whole));
        }
        if is_cut || cache.header(word::BOOT).load(Ordering::Relaxed) != boot() {
            cache.recover();
        }
        let number = Opening::find_or_begin(cache.openings(), cache.header(word::OPENED), token);
        if let Some(checks) = &mut cache.checks {
            checks.opening = Opening::new(number);
        }
        Ok(cache)
    }

    /// Makes rows absent again: those for which `is_gone`, called with the row's index word, returns true.
    fn forget(&self, is_gone: impl Fn(u64) -> bool) {
        for row in 0..self.rows {
            let at = self.row(row).load(Ordering::Relaxed);
            if at != state::ABSENT && is_gone(at) {
                // Another program may have just published a record.
                let _ = self.row(row).compare_exchange(at, state::ABSENT, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
    }

    /// Computes the words of the header that follow from the records.
    fn recover(&self) {
        let (mut end, mut stored, mut opened) = (self.heap, 0, self.header(word::OPENED).load(Ordering::Relaxed));
        for found in (0..self.rows).filter_map(|row| self.bounded(self.row(row).load(Ordering::Relaxed))) {
            end = end.max(found.end());
            stored += found.prefix.space();
            opened = opened.max(found.prefix.writer.into());
        }
        for (at, value) in [(word::END, end), (word::STORED, stored), (word::OPENED, opened), (word::BOOT, boot())] {
            self.header(at).store(value, Ordering::Relaxed);
        }
    }

    /// Raises the limit to `limit`, the length that the file has now, and lets the table take samples again. The caller
    /// must then open the table again, because this mapping keeps its length.
    pub fn grow(&self, limit: u64) {
        if self.header(word::LIMIT).fetch_max(limit, Ordering::Relaxed) < limit {
            self.reopen();
        }
    }

    /// Lets the cache take samples again. If there is still no room, the next sample closes it.
    pub fn reopen(&self) {
        self.header(word::CLOSED).store(Closed::Open as u64, Ordering::Relaxed);
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

    /// Returns true if no other program has raised the limit since this table was opened.
    fn maps_all(&self) -> bool {
        self.header(word::LIMIT).load(Ordering::Relaxed) <= self.limit()
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

    /// Notes an event, which a bit stands for. Returns true for the first time, counted over all processes.
    pub fn first_time(&self, event: u64) -> bool {
        self.header(word::LOGGED).fetch_or(event, Ordering::Relaxed) & event == 0
    }

    /// Returns true if an event has been noted by [`Self::first_time`].
    pub fn has_happened(&self, event: u64) -> bool {
        self.header(word::LOGGED).load(Ordering::Relaxed) & event != 0
    }

    /// Counts `number` hits.
    #[inline]
    pub fn count_hits(&self, number: u64) {
        self.counter(self.stripe(), counter::HITS).fetch_add(number, Ordering::Relaxed);
        self.opening_word(opening::HITS, |word| word.fetch_add(number, Ordering::Relaxed));
    }

    /// Counts `number` misses.
    pub fn count_misses(&self, number: u64) {
        self.counter(self.stripe(), counter::MISSES).fetch_add(number, Ordering::Relaxed);
        self.opening_word(opening::MISSES, |word| word.fetch_add(number, Ordering::Relaxed));
    }

    /// Looks up a row in the index. Panics if the table has no such row.
    #[inline]
    pub fn lookup(&self, row: u64) -> Lookup<'_> {
        // SYNC: row-published (pairs with the Release in `put`): a reader that sees the position sees the record's
        // bytes.
        let at = self.row(row).load(Ordering::Acquire);
        match at {
            state::ABSENT => Lookup::Absent,
            state::NEVER => Lookup::Never,
            _ => match (self.bounded(at), &self.checks) {
                (Some(found), None) => Lookup::Whole(found.record),
                (None, None) => Lookup::Absent,
                // Not damage: another program has raised the limit, and this mapping ends before the record does.
                (None, Some(_)) if !self.maps_all() => Lookup::Absent,
                (found, Some(checks)) => self.checked_record(row, at, found, checks),
            },
        }
    }

    /// Checks the record of a row in a file. If it is damaged, the row becomes absent, so that its sample is made again.
    #[inline]
    fn checked_record<'a>(&'a self, row: u64, at: u64, found: Option<Found<'a>>, checks: &Checks) -> Lookup<'a> {
        let (word, bit) = (&checks.verified[row as usize / 64], 1 << (row % 64));
        let is_verified = word.load(Ordering::Relaxed) & bit != 0;
        let whole = found.filter(|found| is_verified || found.record.content() == found.prefix.content(row));
        let Some(Found { prefix, record, .. }) = whole else {
            let removed = self.row(row).compare_exchange(at, state::ABSENT, Ordering::Relaxed, Ordering::Relaxed);
            if removed.is_ok() {
                self.count(counter::DAMAGED);
            }
            return Lookup::Absent;
        };
        if !is_verified {
            word.fetch_or(bit, Ordering::Relaxed);
        }
        if checks.opening.is_due(self.openings(), prefix.writer, || self.candidate(row, prefix)) {
            return Lookup::Due(record);
        }
        Lookup::Whole(record)
    }

    /// Returns the record at the position `at`; `None` if it does not lie within the heap.
    #[inline]
    fn bounded(&self, at: u64) -> Option<Found<'_>> {
        let first = at.checked_add(PREFIX).filter(|_| at >= self.heap && at.is_multiple_of(8))?;
        let room = self.limit().checked_sub(first)?;
        let prefix = Prefix::of_words(self.word(at).load(Ordering::Relaxed), self.word(at + 8).load(Ordering::Relaxed));
        if u64::from(prefix.len) > room {
            return None;
        }
        // SAFETY: these bytes are in the mapping, which lives as long as the cache.
        let record = unsafe { Record::new(self.map.as_ptr().wrapping_add(first as usize), prefix.len as usize) };
        Some(Found { at, prefix, record })
    }

    // Comparisons of records with the dataset

    /// Returns the number of the opening to which this process belongs; 0 for a table in memory.
    pub fn opening(&self) -> u32 {
        self.checks.as_ref().map_or(0, |checks| checks.opening.number())
    }

    /// Returns the row whose record was found to differ from the dataset, if any.
    pub fn differing_row(&self) -> Option<u64> {
        self.checks.as_ref()?.opening.differing_row(self.openings())
    }

    /// Records that a row's record was compared with the dataset, and the result. `nanoseconds` is the time that this
    /// took.
    pub fn compared(&self, row: u64, is_equal: bool, nanoseconds: u64) {
        let Some(checks) = &self.checks else { return };
        if !is_equal {
            checks.opening.differs(self.openings(), row);
        } else if let Some(found) = self.bounded(self.row(row).load(Ordering::Acquire)) {
            checks.opening.is_equal(self.openings(), self.candidate(row, found.prefix), nanoseconds);
        }
    }

    fn candidate(&self, row: u64, prefix: Prefix) -> Candidate {
        Candidate { row, rows: self.rows, writer: prefix.writer, content: prefix.content(row) }
    }

    /// Calls `with` with a word of this process's opening; returns `None` for a table in memory.
    #[inline]
    fn opening_word(&self, at: usize, with: impl FnOnce(&AtomicU64) -> u64) -> Option<u64> {
        let opening = &self.checks.as_ref()?.opening;
        Some(with(&opening.words_in(self.openings())[at]))
    }

    /// Returns the words of all openings.
    #[inline]
    fn openings(&self) -> &[AtomicU64] {
        words(&self.map, HEADER as usize / 8, OPENINGS * OPENING)
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
            return Ok(if self.maps_all() { self.close(Closed::Full) } else { Put::Closed(false) });
        };
        let written = self.write(fd, row, at, len, parts);
        if matches!(written, Ok(true)) && self.publish(row, at) {
            self.header(word::STORED).fetch_add(size, Ordering::Relaxed);
            return Ok(Put::Stored);
        }
        // No row refers to the reserved space.
        self.give_back(at, size);
        match written {
            Ok(true) => Ok(Put::Known),
            Ok(false) => Ok(self.close(Closed::NoRoom)),
            Err(error) => {
                self.close(Closed::NoRoom);
                Err(error)
            }
        }
    }

    /// Writes the records of a batch with one system call if possible, publishes them, and removes them from the batch.
    /// Returns true if this call has closed the cache.
    ///
    /// Errors: as for [`Self::put`].
    pub fn put_all(&self, batch: &mut Batch) -> Result<bool> {
        let mut written = self.write_all(batch);
        if matches!(written, Ok(false)) {
            let put = |(row, range): &(u64, Range<usize>)| self.put(*row, &[&batch.bytes[range.clone()]]);
            let puts = batch.records.iter().map(put).collect::<Result<Vec<_>>>();
            written = puts.map(|puts| !puts.contains(&Put::Closed(true)));
        }
        batch.clear();
        Ok(!written?)
    }

    /// Writes and publishes the records of a batch. Returns false if nothing is written, because the cache takes no more
    /// samples, or has no room for all of the records.
    fn write_all(&self, batch: &mut Batch) -> Result<bool> {
        let Batch { bytes, records } = batch;
        let size = bytes.len() as u64;
        if size == 0 {
            return Ok(true);
        }
        let Some(fd) = self.fd().filter(|_| self.closed() == Closed::Open) else { return Ok(false) };
        let Some(at) = self.reserve(size) else { return Ok(false) };
        if !self.has_memory(at, at + size) {
            self.give_back(at, size);
            return Ok(false);
        }
        for (row, range) in &*records {
            let prefix = self.prefix(*row, range.len() as u32, &[&bytes[range.clone()]]);
            bytes[range.start - PREFIX as usize..range.start].copy_from_slice(&prefix.to_bytes());
        }
        if let Err(error) = sealed::write_at(fd, bytes, at) {
            self.give_back(at, size);
            self.close(Closed::NoRoom);
            return Err(error);
        }
        // The space of a row that another process has stored in the meantime stays unused.
        let publish = |(row, range): &(u64, Range<usize>)| {
            let is_published = self.publish(*row, at + range.start as u64 - PREFIX);
            if is_published { space_of(range.len() as u64) } else { 0 }
        };
        let stored = records.iter().map(publish).sum();
        self.header(word::STORED).fetch_add(stored, Ordering::Relaxed);
        if stored == 0 {
            self.give_back(at, size);
        }
        Ok(true)
    }

    /// Makes the record at the position `at` that of a row. Returns false if the row has one already.
    fn publish(&self, row: u64, at: u64) -> bool {
        // SYNC: row-published (pairs with the Acquire in `lookup`).
        self.row(row).compare_exchange(state::ABSENT, at, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Gives reserved space back, unless another process has taken space after it.
    fn give_back(&self, at: u64, size: u64) {
        let _ = self.header(word::END).compare_exchange(at + size, at, Ordering::Relaxed, Ordering::Relaxed);
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

    /// Returns the prefix of a record of `len` bytes.
    fn prefix(&self, row: u64, len: u32, parts: &[&[u8]]) -> Prefix {
        let mut prefix = Prefix { len, writer: self.opening(), check: 0 };
        if self.checks.is_some() {
            prefix.check = prefix.check_of(row, content_of(parts));
        }
        prefix
    }

    /// Writes a record into its reserved space at `at`. Returns false if there is no memory for the record.
    fn write(&self, fd: BorrowedFd<'_>, row: u64, at: u64, len: u32, parts: &[&[u8]]) -> Result<bool> {
        if !self.has_memory(at, at + space_of(u64::from(len))) {
            return Ok(false);
        }
        let mut bytes = self.prefix(row, len, parts).to_bytes().to_vec();
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
        let all = Usage::read(|at| self.header(at).load(Ordering::Relaxed), self.limit());
        let [hits, misses] =
            [opening::HITS, opening::MISSES].map(|at| self.opening_word(at, |word| word.load(Ordering::Relaxed)));
        Usage { hits: hits.unwrap_or(all.hits), misses: misses.unwrap_or(all.misses), ..all }
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
        self.word(INDEX + row * 8)
    }

    /// Returns the word at the position `at`, which must be a multiple of 8 within the mapping.
    #[inline]
    fn word(&self, at: u64) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.limit(), "the file has no word at {at}");
        // SAFETY: the word is in the mapping and aligned, and all users of these words use atomics.
        unsafe { AtomicU64::from_ptr(self.map.as_ptr().add(at as usize).cast()) }
    }
}

/// A record, found by its position.
#[derive(Clone, Copy)]
struct Found<'a> {
    at: u64,
    prefix: Prefix,
    record: Record<'a>,
}

impl Found<'_> {
    /// Returns the position after the record.
    fn end(&self) -> u64 {
        self.at + self.prefix.space()
    }
}
