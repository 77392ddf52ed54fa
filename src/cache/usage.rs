//! The space that a cache uses, and counts of its reads and records.

use super::format::{COUNTERS, HEADER, MAGIC, STRIPE, STRIPES, VERSION, counter, overhead, word};

/// The space that a cache uses, and counts of its reads and records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Number of reads that found their sample: of this opening, or of all if the opening is unknown.
    pub hits: u64,
    /// Number of reads that did not find their sample, likewise.
    pub misses: u64,
    /// Number of all reads that found their sample.
    pub lifetime_hits: u64,
    /// Number of all reads that did not find their sample.
    pub lifetime_misses: u64,
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
    pub(super) fn read(word: impl Fn(usize) -> u64, limit: u64) -> Self {
        let sum = |at: usize| (0..STRIPES).map(|stripe| word(COUNTERS + stripe * STRIPE + at)).sum();
        let [rows, end, stored] = [word::ROWS, word::END, word::STORED].map(&word);
        let [hits, misses] = [counter::HITS, counter::MISSES].map(sum);
        Self {
            hits,
            misses,
            lifetime_hits: hits,
            lifetime_misses: misses,
            refused: sum(counter::REFUSED),
            damaged: sum(counter::DAMAGED),
            stored,
            unused: end.saturating_sub(overhead(rows)).saturating_sub(stored),
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
