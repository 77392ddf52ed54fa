//! The constants of the format, which the module's documentation describes.

/// The first word of a file: "RLCACHE1".
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"RLCACHE1");
/// The version of the layout, and of how samples are encoded.
pub const VERSION: u64 = 1;
/// Bytes of the header and the counters.
pub const HEADER: u64 = 8192;
/// Position at which the meta begins.
pub(super) const META: u64 = 256;
/// Maximum bytes of a meta.
pub(super) const META_MAX: usize = 3840;
/// Bytes of a record before its contents.
pub(super) const PREFIX: u64 = 8;

/// Numbers of the header's words.
pub(super) mod word {
    pub const MAGIC: usize = 0;
    pub const VERSION: usize = 1;
    pub const ROWS: usize = 2;
    /// The file's length.
    pub const LIMIT: usize = 3;
    /// Position at which the unused part of the heap begins.
    pub const END: usize = 4;
    /// Bytes of published records.
    pub const STORED: usize = 5;
    pub const CLOSED: usize = 6;
    /// Number of samples that are still to be made twice, for comparison.
    pub const PROBES: usize = 7;
    /// One bit for each message that was already logged.
    pub const LOGGED: usize = 8;
    /// A number that identifies the boot during which the file was last used.
    pub const BOOT: usize = 9;
    pub const META_LEN: usize = 10;
    pub const COUNT: usize = 11;
}

/// Values of index words that are not positions.
pub(super) mod state {
    pub const ABSENT: u64 = 0;
    pub const NEVER: u64 = 1;
}

/// The word at which the counters begin.
pub(super) const COUNTERS: usize = 512;
/// Number of stripes of the counters, so that processes count in different cache lines.
pub(super) const STRIPES: usize = 64;
/// Words of a stripe.
pub(super) const STRIPE: usize = 8;

/// Numbers of a stripe's words.
pub(super) mod counter {
    pub const HITS: usize = 0;
    pub const MISSES: usize = 1;
    pub const REFUSED: usize = 2;
    pub const DAMAGED: usize = 3;
}
