//! A cache of samples that processes share: records in one file, which all of them map. No call takes a lock, or waits
//! for another process.
//!
//! ```text
//! file     := header (4 KiB), counters (4 KiB), index, heap
//! header   := words: magic version rows limit end stored closed probes logged boot meta-length; meta at byte 256
//! counters := 64 stripes of 8 words: hits misses refused damaged, the others unused
//! index    := a word for each row: 0 (absent), 1 (never), or the position of its record
//! record   := length:u32 check:u32 bytes, padded to a multiple of 8
//! ```
//! A row changes from absent to whole in one step, and a record never moves. A writer takes space at the end of the
//! heap with a compare-and-swap, writes the record there, and then publishes the record in the index with another
//! compare-and-swap. A killed writer therefore leaves only unused space, and a reader sees either a whole record or
//! none. If two writers write the same row at the same time, the second writer finds the index word taken; it gives its
//! space back, or leaves the space unused if other writers have taken space after it.
//!
//! A record in a file on a disk may be incomplete, because the machine may have crashed after only some of the record's
//! pages were written. So each process checks such a record when it first reads it. `codec` defines the meaning of a
//! record's bytes.

mod format;
mod table;
#[cfg(test)]
mod tests;

pub use format::{HEADER, VERSION};
pub use table::{Cache, Closed, Head, Lookup, Put, Record, Usage};
