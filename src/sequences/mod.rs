//! The batches of an epoch, planned from the lengths of the samples.
//!
//! A plan depends on the lengths, the settings, the seed and the epoch alone, so all ranks make the same plan on all
//! platforms, and a position in it is one number. Results must not change: programs resume runs of earlier versions.

mod budget;
mod free_list;
mod packs;
mod plan;
mod shuffler;

pub use budget::budget;
pub use packs::packs;
pub use plan::{Order, Plan};

#[cfg(test)]
mod tests;
