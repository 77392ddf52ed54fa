//! The constants of the file format, which the documentation of the parent module describes.

/// The first word of a file: "RLCACHE1".
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"RLCACHE1");
/// The version of the layout and of the encoding of samples.
pub const VERSION: u64 = 1;
/// Bytes of the header and the counters together.
pub const HEADER: u64 = 8192;
/// Position at which the meta starts.
pub(super) const META: u64 = 256;
/// Maximum length of the meta in bytes.
pub(super) const META_MAX: usize = 3840;
/// Bytes of a record's prefix: its length and its checksum.
pub(super) const PREFIX: u64 = 8;

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
    pub const COUNT: usize = 11;
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
