//! DLPack: its C structures, and tensors over the arena's memory.

pub mod abi;
pub mod block;
#[cfg(feature = "python")]
pub mod exchange;
