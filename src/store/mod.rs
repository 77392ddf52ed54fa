//! Objects that processes share: rows, or raw data, which lie in one sealed memfd and are read in place.
//!
//! ```text
//! image  := header, then in any order: chunks or data, table, slots, unhashed rows, meta
//! header := 15 words: magic version kind rows chunk_rows table:section slots:section
//!           unhashed:section meta:section data:section
//! section:= at:u64 length:u64, in bytes
//! table  := (first row:u64 place:u64) for each chunk, and once more for the end
//! place  := position of the chunk (bits 0-55) and its form (bits 56-63)
//! chunk  := (form 1) i64 ...  (form 2) f64 ...  (form 3) end:u32 for each row, bytes
//!           (form 4) length:u64, bytes of one row
//! slots  := words of an open-addressed table: 0, or row + 1 (bits 0-39) and the hash's top bits (bits 40-63)
//! unhashed := row:u64 of each key row without a hash
//! ```
//! Numbers are little-endian. A chunk has 1,024 rows, or fewer if 1,024 rows would exceed 1 MiB; `chunk_rows` is 1,024
//! if all chunks but the last have 1,024 rows, otherwise 0. `codec` defines the meaning of a row's bytes and of the
//! meta of rows; `python/rustloader/sharing` defines the kinds and the meta of raw data. The seals guarantee that the
//! file's length and contents never change; everything else is checked at each access, because the descriptor may come
//! from another program.

mod builder;
mod reader;
#[cfg(test)]
mod tests;

pub use builder::Builder;
pub use reader::{Row, Store, damaged};

use crate::wire;

/// The first word of an image: "RLSHARED".
const MAGIC: u64 = u64::from_le_bytes(*b"RLSHARED");
const VERSION: u64 = 1;
/// Bytes before the first chunk: a full page, so that raw data start at a page boundary.
const HEADER: u64 = 4096;
/// Number of words of the header that are used.
const WORDS: usize = 15;
/// Number of rows in a full chunk.
const ROWS: u64 = 1024;
/// Maximum total bytes of a chunk's rows. A row of at least this many bytes has a chunk to itself.
const CHUNK: usize = 1 << 20;
/// Number of bits of a `place` word that hold the position of the chunk.
const PLACE_BITS: u32 = 56;
/// Number of bits of a slot that hold the row index plus 1.
const ROW_BITS: u32 = 40;
const ROW_MASK: u64 = (1 << ROW_BITS) - 1;

mod form {
    pub const INTS: u64 = 1;
    pub const FLOATS: u64 = 2;
    pub const RECORDS: u64 = 3;
    pub const LONE: u64 = 4;
}

/// Returns the hash of a key's bytes, which is the same in every process.
pub fn hash(bytes: &[u8]) -> u64 {
    wire::checksum(bytes)
}

/// Returns the top bits of a hash, in the position in which a slot holds them.
fn tag(hash: u64) -> u64 {
    hash & !ROW_MASK
}
