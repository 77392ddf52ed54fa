//! Exchange of tensors and arrays with Python (DLPack, torch, NumPy), and calls into Python that are safe while the
//! interpreter exits. The files without calls into Python also compile without the feature `python`, for their tests.

pub mod dlpack;
pub mod memory;
pub mod moving;
pub mod view;

#[cfg(feature = "python")]
pub mod array_tensor;
#[cfg(feature = "python")]
pub mod buffer;
#[cfg(feature = "python")]
pub mod collate;
#[cfg(feature = "python")]
pub mod detached;
#[cfg(feature = "python")]
mod errors;
#[cfg(feature = "python")]
pub mod exit_guard;
#[cfg(feature = "python")]
pub mod fetcher;
#[cfg(feature = "python")]
pub mod gather;
#[cfg(feature = "python")]
pub mod index_stream;
#[cfg(feature = "python")]
pub mod numpy_memory;
#[cfg(feature = "python")]
pub mod tensor;
#[cfg(feature = "python")]
pub mod text;
#[cfg(feature = "python")]
pub mod torch_symbols;
