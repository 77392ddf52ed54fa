//! What both ends of an arena know of it.

/// What a worker computes an arena's geometry from: bytes, workers, slots of a ring, whether the workers share a queue.
pub type Sizes = (u64, u32, u32, bool);
