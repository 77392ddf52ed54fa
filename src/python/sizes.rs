//! The sizes of an arena that the main process passes to its workers.

/// The values from which a worker computes an arena's geometry: total bytes, number of workers, slots per ring, and
/// whether the workers share a queue.
pub type Sizes = (u64, u32, u32, bool);
