//! Samples that processes make once: records in one file that all of them map. No call waits and none takes a lock.
//!
//! ```text
//! file     := header (4 KiB), counters (4 KiB), index, heap
//! header   := words: magic version rows limit heap end stored closed probes told boot meta-length; meta from byte 256 on
//! counters := 64 stripes of 8 words: hits misses refused damaged, the rest unused
//! index    := a word for each row: 0 (absent), 1 (never), or where its record begins
//! record   := length:u32 check:u32 bytes, padded to a multiple of 8
//! ```
//! A row goes from absent to whole once and never moves. A writer takes space at the end of the heap (a compare-and-swap),
//! writes the record there, and then publishes it in the index (another one). So a writer that is killed leaves nothing but
//! unused space, and a reader sees a whole record or none. Two writers may make the same row at the same time: the second one
//! finds the word taken and gives its space back, or leaves it unused if others have taken space behind it.
//!
//! Records are checked where a machine may have gone down between their pages, in files on a disk: each process checks a
//! record when it first reads it. What a record's bytes mean is the business of `codec`.

mod table;
#[cfg(test)]
mod tests;

pub use table::{Cache, Closed, Found, Head, Put, Record, Usage};

/// The first word of a file: "RLCACHE1".
const MAGIC: u64 = u64::from_le_bytes(*b"RLCACHE1");
/// The version of the layout, and of how samples are encoded.
pub const VERSION: u64 = 1;
/// Bytes of the header with the counters.
const HEADER: u64 = 8192;
/// Where the meta begins, and how long it may be.
const META: u64 = 256;
/// The most bytes of a meta.
pub const MOST_META: usize = 3840;
/// Bytes before those of a record.
const PREFIX: u64 = 8;

/// The words of the header.
mod word {
    pub const MAGIC: usize = 0;
    pub const VERSION: usize = 1;
    pub const ROWS: usize = 2;
    /// The file's length.
    pub const LIMIT: usize = 3;
    /// Where the heap begins.
    pub const HEAP: usize = 4;
    /// Where the heap's unused part begins.
    pub const END: usize = 5;
    /// Bytes of published records.
    pub const STORED: usize = 6;
    pub const CLOSED: usize = 7;
    /// Samples that are still to be made twice.
    pub const PROBES: usize = 8;
    /// Bits of what was told in the log.
    pub const TOLD: usize = 9;
    /// The boot of the machine that last used the file.
    pub const BOOT: usize = 10;
    pub const META_LEN: usize = 11;
    pub const COUNT: usize = 12;
}

/// Words of the index that are no places.
mod state {
    pub const ABSENT: u64 = 0;
    pub const NEVER: u64 = 1;
}

/// Stripes of the counters: processes count in different cache lines.
const STRIPES: usize = 64;
/// Words of a stripe.
const STRIPE: usize = 8;

/// The words of a stripe.
mod counter {
    pub const HITS: usize = 0;
    pub const MISSES: usize = 1;
    pub const REFUSED: usize = 2;
    pub const DAMAGED: usize = 3;
}
