//! A worker's connection to the main process: ring ends, allocator and doorbell.

mod core;
mod ends;
mod keep;
mod memory;
mod sending;
#[cfg(test)]
mod tests;

pub use self::core::{Port, Received};
pub use self::keep::Keep;
