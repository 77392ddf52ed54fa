//! Openings of a file: what their processes have read and compared.
//!
//! A call of `rustloader.cache(path=...)` is an opening; all processes that use its dataset belong to it. Each opening
//! has a number, and each record has the number of the opening that stored it. A dataset is known by its samples: the
//! records of another opening may be used after some of them have been made again and found equal.
//!
//! The comparisons of an opening are words in the file, which its processes share: a worker that starts later repeats
//! none of them. Until two records of a writer have been found equal, each process compares every record of that writer
//! before it uses it. Later comparisons are spread over the table, and take at most 1 % of the time and half of the words.

use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::format::{OPENING, OPENINGS, opening};
use crate::sys::clock::monotonic_ns;

/// Minimum number of records of a writer that are compared, and the maximum.
const FIRST: usize = 2;
const MOST: u64 = 8;
/// Part of the time since the opening that later comparisons may take: 1 in this number.
const TIME_SHARE: u64 = 100;
/// Number of writers that a process remembers as settled.
const REMEMBERED: usize = 64;
/// Number of words for the comparisons of an opening.
const ENTRIES: usize = OPENING - opening::COMPARED;
/// Maximum number of an opening. An entry of a comparison has 29 bits for it.
const NUMBERS: u64 = (1 << 29) - 1;

/// What identifies a record for comparisons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    /// The row, and the number of rows.
    pub row: u64,
    pub rows: u64,
    /// The number of the opening that stored the record.
    pub writer: u32,
    /// The checksum of the content, which is the same in other rows and for other writers.
    pub content: u64,
}

impl Candidate {
    /// Returns the word that records a comparison: the upper half of the content's checksum, the writer, and the eighth
    /// of the table. Never 0 for a known writer.
    fn entry(self) -> u64 {
        self.content >> 32 << 32 | (u64::from(self.writer) & NUMBERS) << 3 | self.region()
    }

    fn region(self) -> u64 {
        (self.row * 8 / self.rows.max(1)).min(7)
    }
}

/// The opening to which a handle belongs, and what its process knows of the opening's comparisons.
#[derive(Debug)]
pub(super) struct Opening {
    /// The opening's number; 0 if unknown.
    number: u32,
    /// Used instead of the words in the file if a later opening has replaced them.
    own: [AtomicU64; OPENING],
    /// Numbers of writers whose records need no more comparisons, each at its number modulo [`REMEMBERED`].
    settled: [AtomicU32; REMEMBERED],
}

impl Opening {
    /// Makes the state of a process that belongs to the opening with this number.
    pub fn new(number: u32) -> Self {
        let own = [const { AtomicU64::new(0) }; OPENING];
        own[opening::STARTED].store(monotonic_ns(), Ordering::Relaxed);
        Self { number, own, settled: [const { AtomicU32::new(0) }; REMEMBERED] }
    }

    /// Returns the number of the opening with this token. If the file has none, takes the next number and the words of
    /// the oldest opening. The caller must hold the file's lock. `words` are those of all openings, and `opened` is the
    /// count of openings.
    pub fn find_or_begin(words: &[AtomicU64], opened: &AtomicU64, token: u64) -> u32 {
        let known = words.chunks_exact(OPENING).find(|it| it[opening::TOKEN].load(Ordering::Relaxed) == token);
        let known = known.map_or(0, |it| it[opening::NUMBER].load(Ordering::Relaxed));
        if known != 0 {
            return known as u32;
        }
        let number = (opened.fetch_add(1, Ordering::Relaxed).wrapping_add(1) & NUMBERS).max(1);
        let own = &words[place_of(number as u32)..][..OPENING];
        own.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        own[opening::TOKEN].store(token, Ordering::Relaxed);
        own[opening::STARTED].store(monotonic_ns(), Ordering::Relaxed);
        // SYNC: opening-begun (pairs with the Acquire in `words_in`).
        own[opening::NUMBER].store(number, Ordering::Release);
        number as u32
    }

    /// Returns the opening's number.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the opening's words: among those of all openings of the file, or in this process.
    pub fn words_in<'a>(&'a self, all: &'a [AtomicU64]) -> &'a [AtomicU64] {
        let shared = &all[place_of(self.number)..][..OPENING];
        // SYNC: opening-begun (pairs with the Release in `find_or_begin`).
        let is_there = self.number != 0 && shared[opening::NUMBER].load(Ordering::Acquire) == u64::from(self.number);
        if is_there { shared } else { &self.own }
    }

    /// Returns the row that was found to differ from the dataset, if any.
    pub fn differing_row(&self, all: &[AtomicU64]) -> Option<u64> {
        self.words_in(all)[opening::DIFFERS].load(Ordering::Relaxed).checked_sub(1)
    }

    /// Records that a row's record differs from the dataset. From then on every record of the file is due.
    pub fn differs(&self, all: &[AtomicU64], row: u64) {
        for words in [self.words_in(all), &self.own] {
            words[opening::DIFFERS].store(row + 1, Ordering::Relaxed);
        }
    }

    /// Returns true if a record must be compared with the dataset before it is used.
    #[inline]
    pub fn is_due(&self, all: &[AtomicU64], writer: u32, candidate: impl FnOnce() -> Candidate) -> bool {
        let words = self.words_in(all);
        if words[opening::DIFFERS].load(Ordering::Relaxed) != 0 {
            return true;
        }
        let is_own = writer == self.number && writer != 0;
        !is_own && !self.is_settled(writer) && self.must_compare(words, candidate())
    }

    fn is_settled(&self, writer: u32) -> bool {
        writer != 0 && self.settled[writer as usize % REMEMBERED].load(Ordering::Relaxed) == writer
    }

    #[cold]
    fn must_compare(&self, words: &[AtomicU64], candidate: Candidate) -> bool {
        let entry = candidate.entry();
        let writer = |entry: u64| entry as u32 >> 3;
        let (mut of_writer, mut regions, mut all) = (0, 0, 0);
        // Without words in the file, `words` are this process's own.
        let own = entries(&self.own).take(if ptr::eq(words, self.own.as_slice()) { 0 } else { OPENING });
        for other in entries(words).chain(own) {
            all += 1;
            if writer(other) == writer(entry) {
                if other >> 32 == entry >> 32 {
                    // An equal record, such as an empty one, has been compared.
                    return false;
                }
                of_writer += 1;
                regions |= 1 << (other & 7);
            }
        }
        if of_writer < FIRST {
            return true;
        }
        // Half of the words remain for the first comparisons of other writers.
        if of_writer >= (candidate.rows / 100).clamp(FIRST as u64, MOST) as usize || all > ENTRIES / 2 {
            self.settled[candidate.writer as usize % REMEMBERED].store(candidate.writer, Ordering::Relaxed);
            return false;
        }
        regions >> candidate.region() & 1 == 0 && has_time(words)
    }

    /// Records that a record was compared and found equal, which took this number of nanoseconds. If the opening's words
    /// are full, only this process knows it; if its own are full, too, the record is compared each time.
    pub fn is_equal(&self, all: &[AtomicU64], candidate: Candidate, nanoseconds: u64) {
        let (words, entry) = (self.words_in(all), candidate.entry());
        words[opening::SPENT].fetch_add(nanoseconds, Ordering::Relaxed);
        for word in words[opening::COMPARED..].iter().chain(&self.own[opening::COMPARED..]) {
            match word.compare_exchange(0, entry, Ordering::Relaxed, Ordering::Relaxed) {
                // Threads can compare equal records of two eighths at the same time. They count once.
                Err(other) if other >> 3 != entry >> 3 => {}
                _ => break,
            }
        }
    }
}

fn entries(words: &[AtomicU64]) -> impl Iterator<Item = u64> {
    words[opening::COMPARED..].iter().map(|word| word.load(Ordering::Relaxed)).take_while(|entry| *entry != 0)
}

/// Returns true if the time spent on comparisons is a small part of the time since the opening.
fn has_time(words: &[AtomicU64]) -> bool {
    let since = monotonic_ns().saturating_sub(words[opening::STARTED].load(Ordering::Relaxed));
    words[opening::SPENT].load(Ordering::Relaxed) <= since / TIME_SHARE
}

/// Returns the index of the first word of an opening.
fn place_of(number: u32) -> usize {
    number as usize % OPENINGS * OPENING
}
