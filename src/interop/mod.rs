//! Interchange with Python's tensors and arrays: DLPack, torch, NumPy, and calls of Python that survive the interpreter's exit.
//!
//! What needs no interpreter compiles without the feature `python`: memory, views, DLPack's structures and blocks.

pub mod dlpack;
pub mod memory;
pub mod view;

#[cfg(feature = "python")]
pub(crate) mod collate;
#[cfg(feature = "python")]
pub(crate) mod detached;
#[cfg(feature = "python")]
mod errors;
#[cfg(feature = "python")]
pub(crate) mod exit_guard;
#[cfg(feature = "python")]
pub(crate) mod fetcher;
#[cfg(feature = "python")]
pub(crate) mod tensor;
#[cfg(feature = "python")]
pub(crate) mod text;
#[cfg(feature = "python")]
pub(crate) mod torch_symbols;
