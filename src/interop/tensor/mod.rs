//! Reading torch tensors and NumPy arrays, and creating them over memory.

mod array;
pub mod bridge;
pub mod moved;
mod numpy;
mod storage;

pub use self::bridge::{Bridge, items};
pub use self::storage::SharedStorage;
