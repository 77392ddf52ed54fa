//! The constants of the file format, which the documentation of the parent module describes.

/// The first word of a file: "RLCACHE1".
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"RLCACHE1");
/// The version of the layout and of the encoding of samples.
pub const VERSION: u64 = 2;
/// Bytes of the header and the counters together.
pub const HEADER: u64 = 8192;
/// Position at which the meta starts.
pub(super) const META: u64 = 256;
/// Maximum length of the meta in bytes.
pub(super) const META_MAX: usize = 3840;
/// Position at which the index starts, after the openings.
pub(super) const INDEX: u64 = HEADER + (OPENINGS * OPENING * 8) as u64;
/// Bytes of a record's prefix: its length, its writer and its check.
pub(super) const PREFIX: u64 = 16;

/// Indices of the words of the header.
pub(super) mod word {
    pub const MAGIC: usize = 0;
    pub const VERSION: usize = 1;
    pub const ROWS: usize = 2;
    /// Position at which the heap ends. The file is at least this long.
    pub const LIMIT: usize = 3;
    /// Position at which the free part of the heap starts.
    pub const END: usize = 4;
    /// Bytes of published records.
    pub const STORED: usize = 5;
    pub const CLOSED: usize = 6;
    /// Number of samples that are yet to be made twice, for comparison.
    pub const PROBES: usize = 7;
    /// A bit for each log message, set once a process has logged it.
    pub const LOGGED: usize = 8;
    /// A number that identifies the boot during which the file was last used.
    pub const BOOT: usize = 9;
    pub const META_LEN: usize = 10;
    /// Bits of [`super::flag`].
    pub const FLAGS: usize = 11;
    /// Number of times that the file was opened.
    pub const OPENED: usize = 12;
    pub const COUNT: usize = 13;
}

/// Bits of the flags, which are the same for all handles of a table.
pub(super) mod flag {
    /// The table outlives the programs that use it. Its records have checksums, and those of other openings are compared
    /// with the dataset.
    pub const LASTING: u64 = 1;
}

/// Values of an index word that are not the position of a record.
pub(super) mod state {
    pub const ABSENT: u64 = 0;
    pub const NEVER: u64 = 1;
}

/// The index of the first word of the counters.
pub(super) const COUNTERS: usize = 512;
/// Number of stripes of the counters. Processes use different stripes, so that they rarely share a cache line.
pub(super) const STRIPES: usize = 64;
/// Number of words in a stripe.
pub(super) const STRIPE: usize = 8;

/// Indices of the words of a stripe.
pub(super) mod counter {
    pub const HITS: usize = 0;
    pub const MISSES: usize = 1;
    pub const REFUSED: usize = 2;
    pub const DAMAGED: usize = 3;
}

/// Number of openings that a file describes. A later opening replaces the oldest.
pub(super) const OPENINGS: usize = 32;
/// Number of words that describe an opening.
pub(super) const OPENING: usize = 64;

/// Indices of the words that describe an opening.
pub(super) mod opening {
    /// The opening's number, counted from 1; 0 while the words are being written.
    pub const NUMBER: usize = 0;
    /// A number by which processes that open the file by its path find their opening.
    pub const TOKEN: usize = 1;
    /// The monotonic time of the opening, in nanoseconds.
    pub const STARTED: usize = 2;
    /// Nanoseconds that the opening's processes have spent on comparisons.
    pub const SPENT: usize = 3;
    /// A row whose record differs from the dataset, plus 1; 0 if none is known.
    pub const DIFFERS: usize = 4;
    /// Number of the opening's reads that found their sample, and of those that did not.
    pub const HITS: usize = 5;
    pub const MISSES: usize = 6;
    /// The first of the comparisons; 0 after the last.
    pub const COMPARED: usize = 7;
}

/// Returns the number of bytes that precede the first record in a table of `rows` rows.
pub(super) fn overhead(rows: u64) -> u64 {
    rows.saturating_mul(8).saturating_add(INDEX).next_multiple_of(4096)
}
