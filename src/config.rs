//! Limits of the core, each with its unit and its reason.

/// Workers of one iterator: their numbers fit into 16 bits.
pub const WORKERS_MAX: u32 = 1 << 16;
/// Batches of one iterator that are under way: each ring has room for all of them.
pub const TASKS_MAX: u32 = 1 << 24;
