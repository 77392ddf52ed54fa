//! Interchange with Python's tensors and arrays: DLPack, torch, NumPy, and calls of Python that survive the interpreter's end.

pub mod collate;
pub mod dlpack;
pub mod exit_guard;
pub mod tensor;
