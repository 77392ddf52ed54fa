//! DLPack: its C structures, and tensors over the arena's memory.

pub mod abi;
mod block;
#[cfg(feature = "python")]
pub mod buffer;
#[cfg(feature = "python")]
pub mod exchange;

pub use block::Block;
