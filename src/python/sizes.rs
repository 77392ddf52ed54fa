//! The sizes of an arena, which both ends know.

/// The sizes from which a worker computes an arena's geometry: bytes, workers, slots of a ring, and true if there is a
/// shared queue.
pub type Sizes = (u64, u32, u32, bool);
