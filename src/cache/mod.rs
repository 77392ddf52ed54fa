//! A cache of samples that processes share: records in one file, which all of them map. No call waits or takes a lock.
//!
//! ```text
//! file     := header (4 KiB), counters (4 KiB), index, heap
//! header   := words: magic version rows limit end stored closed probes logged boot meta-length; meta from byte 256 on
//! counters := 64 stripes of 8 words: hits misses refused damaged, the others unused
//! index    := a word for each row: 0 (absent), 1 (never), or the position of its record
//! record   := length:u32 check:u32 bytes, padded to a multiple of 8
//! ```
//! A row changes from absent to whole once, and a record never moves. A writer takes space at the end of the heap by a
//! compare-and-swap, writes the record there, and then publishes it in the index by another one. So a writer that is
//! killed leaves only unused space, and a reader sees a whole record or none. Two writers may write the same row at the
//! same time: the second one finds the word taken and gives its space back, or leaves it unused if others have taken
//! space after it.
//!
//! Records in a file on a disk are checked, because the machine may have crashed when only some of their pages were
//! written: each process checks a record when it first reads it. `codec` defines the meaning of a record's bytes.

mod format;
mod table;
#[cfg(test)]
mod tests;

pub use format::{HEADER, VERSION};
pub use table::{Cache, Closed, Head, Lookup, Put, Record, Usage};
