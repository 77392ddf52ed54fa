//! Objects in shared memory: images, their builder, and the lists and dicts that read them. `_core.pyi` documents the
//! classes.

mod build;
mod items;
mod pairs;
mod store;

pub use build::ShareBuilder;
pub use items::{SharedItems, SharedIterator};
pub use pairs::SharedPairs;
pub use store::{SharedData, SharedStore};
