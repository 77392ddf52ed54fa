//! Objects in shared memory: their images, builders, lists and dicts. `_core.pyi` documents the classes.

mod build;
mod items;
mod pairs;
mod store;

pub use build::ShareBuilder;
pub use items::{SharedItems, SharedIterator};
pub use pairs::SharedPairs;
pub use store::{SharedData, SharedStore};
