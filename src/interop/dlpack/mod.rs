//! DLPack: its C structures, and tensors made over memory of ours.

pub mod abi;
mod block;
#[cfg(feature = "python")]
pub(crate) mod buffer;
#[cfg(feature = "python")]
pub(crate) mod exchange;

pub use block::Block;
