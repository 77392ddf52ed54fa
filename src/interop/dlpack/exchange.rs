//! torch's side of DLPack, for reading tensors and for creating them over blocks.

use std::ffi::{CStr, c_char};

use pyo3::ffi;
use pyo3::prelude::*;

use super::abi::{DLTensor, MakeTensor, ReadTensor, exchange_functions};
use super::block::Block;
use crate::interop::memory::Memory;

const EXCHANGE_API: &CStr = c"dlpack_exchange_api";
const CAPSULE: &CStr = c"dltensor";
const USED_CAPSULE: &CStr = c"used_dltensor";

/// The C functions of torch's DLPack exchange API (`torch.Tensor.__dlpack_c_exchange_api__`), which older versions of
/// torch lack.
#[derive(Clone, Copy)]
pub struct Exchange {
    read: ReadTensor,
    make: MakeTensor,
}

impl Exchange {
    /// Returns the functions of a tensor type. Returns `None` if they are missing, or if no table has
    /// the supported major version.
    pub fn of(tensor_type: &Bound<'_, PyAny>) -> Option<Self> {
        let capsule = tensor_type.getattr("__dlpack_c_exchange_api__").ok()?;
        // SAFETY: the call accepts any object and checks the name; an error is cleared below.
        let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), EXCHANGE_API.as_ptr()) };
        if pointer.is_null() {
            drop(PyErr::take(capsule.py()));
            return None;
        }
        // SAFETY: a capsule of this name holds a table that lives as long as the process.
        let (read, make) = unsafe { exchange_functions(pointer.cast()) }?;
        Some(Self { read, make })
    }

    /// Describes a tensor. Returns `None` if torch cannot describe it. The shape and stride pointers point into
    /// the tensor, so copy the arrays at once.
    #[inline]
    pub fn read(&self, tensor: &Bound<'_, PyAny>) -> Option<DLTensor> {
        let mut out = std::mem::MaybeUninit::<DLTensor>::uninit();
        // SAFETY: the table belongs to the object's type, which the callers check; the GIL is held.
        if unsafe { (self.read)(tensor.as_ptr().cast(), out.as_mut_ptr()) } != 0 {
            drop(PyErr::take(tensor.py()));
            return None;
        }
        // SAFETY: the call fills the structure when it returns 0.
        Some(unsafe { out.assume_init() })
    }

    /// Creates a tensor over a block. If this succeeds, call [`Block::release_to_tensor`].
    #[inline]
    fn make<'py, M: Memory>(&self, py: Python<'py>, block: &Block<M>) -> PyResult<Bound<'py, PyAny>> {
        let mut out = std::ptr::null_mut();
        // SAFETY: the block's structure is complete; the GIL is held.
        if unsafe { (self.make)(block.versioned(), &mut out) } != 0 {
            return Err(PyErr::fetch(py));
        }
        // SAFETY: the call returned a new reference, or null with an exception set.
        unsafe { Bound::from_owned_ptr_or_err(py, out.cast()) }
    }
}

/// The way in which blocks are passed to torch.
pub enum Importer {
    /// Through torch's C function.
    Exchange(Exchange),
    /// Through a capsule and `torch._C._from_dlpack`.
    Capsule(Py<PyAny>),
}

impl Importer {
    /// Creates a tensor that owns `block`. The block is freed exactly once, even if this fails.
    pub fn import<M: Memory>(&self, py: Python<'_>, block: Block<M>) -> PyResult<Py<PyAny>> {
        let made = match self {
            Self::Exchange(exchange) => exchange.make(py, &block),
            Self::Capsule(from_dlpack) => Self::through_capsule(py, from_dlpack, &block),
        };
        // On an error, dropping the block frees it. If torch has already called the deleter, that call did nothing.
        let tensor = made?;
        block.release_to_tensor();
        Ok(tensor.unbind())
    }

    fn through_capsule<'py, M: Memory>(
        py: Python<'py>,
        from_dlpack: &Py<PyAny>,
        block: &Block<M>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // SAFETY: the capsule has no destructor, and the block outlives its use below.
        let capsule = unsafe {
            let made = ffi::PyCapsule_New(block.legacy().cast(), CAPSULE.as_ptr(), None);
            Bound::from_owned_ptr_or_err(py, made)?
        };
        let made = from_dlpack.bind(py).call1((&capsule,));
        // SAFETY: the capsule lives and the name is static. The new name marks the capsule as used.
        unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), USED_CAPSULE.as_ptr().cast::<c_char>()) };
        made
    }
}
