//! A cache of samples that processes share: records in one file, which all of them map. No call takes a lock, or waits
//! for another process.
//!
//! ```text
//! file     := header (4 KiB), counters (4 KiB), openings (16 KiB), index, heap
//! header   := words: magic version rows limit end stored closed probes logged boot meta-length flags opened; meta at
//!             byte 256
//! counters := 64 stripes of 8 words: hits misses refused damaged, the others unused
//! openings := 32 times 64 words: number token started spent differing-row hits misses, comparisons
//! index    := a word for each row: 0 (absent), 1 (never), or the position of its record
//! record   := length:u32 writer:u32 check:u64 bytes, padded to a multiple of 8
//! ```
//! A row changes from absent to whole in one step, and a record never moves. A writer takes space at the end of the
//! heap with a compare-and-swap, writes the record there, and then publishes the record in the index with another
//! compare-and-swap. A killed writer therefore leaves only unused space, and a reader sees either a whole record or
//! none. If two writers write the same row at the same time, the second writer finds the index word taken; it gives its
//! space back, or leaves the space unused if other writers have taken space after it.
//!
//! All that a handle is stands in the file: its flags, the limit, and whether its pages are memory. So a descriptor is
//! enough to open the table in another process, together with the number of the opening (see `openings`).
//!
//! A record in a file on a disk may be incomplete, because the machine may have crashed after only some of the record's
//! pages were written. So each process checks such a record when it first reads it. `codec` defines the meaning of a
//! record's bytes.

mod format;
mod head;
mod openings;
mod record;
mod table;
#[cfg(test)]
mod tests;
mod usage;

pub use format::{HEADER, VERSION};
pub use head::Head;
pub use record::{Batch, Record};
pub use table::{Cache, Closed, Lookup, Put};
pub use usage::Usage;
