//! torch's side of DLPack: reading its tensors, and making them over blocks.

use std::ffi::{CStr, c_char};

use pyo3::ffi;
use pyo3::prelude::*;

use super::Block;
use super::abi::{DLManagedTensorVersioned, DLTensor, MakeTensor, ReadTensor, exchange_functions};
use crate::interop::memory::Memory;

const EXCHANGE_API: &CStr = c"dlpack_exchange_api";
const CAPSULE: &CStr = c"dltensor";
const USED_CAPSULE: &CStr = c"used_dltensor";

/// torch's C functions, where it has them (`torch.Tensor.__dlpack_c_exchange_api__`).
#[derive(Clone, Copy)]
pub struct Exchange {
    read: ReadTensor,
    make: MakeTensor,
}

impl Exchange {
    /// The functions of a tensor type; `None` where they are missing or of another major version.
    pub fn of(tensor_type: &Bound<'_, PyAny>) -> Option<Self> {
        let capsule = tensor_type.getattr("__dlpack_c_exchange_api__").ok()?;
        // SAFETY: any object may be asked; the name is checked by the call, an error is cleared below.
        let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), EXCHANGE_API.as_ptr()) };
        if pointer.is_null() {
            drop(PyErr::take(capsule.py()));
            return None;
        }
        // SAFETY: a capsule of this name holds a table, alive as long as the process.
        let (read, make) = unsafe { exchange_functions(pointer.cast()) }?;
        Some(Self { read, make })
    }

    /// Describes a tensor; `None` if it cannot be described. Its sizes and strides are torch's: to be copied
    /// at once.
    #[inline]
    pub fn read(&self, tensor: &Bound<'_, PyAny>) -> Option<DLTensor> {
        let mut out = std::mem::MaybeUninit::<DLTensor>::uninit();
        // SAFETY: the object's type is the one that the table belongs to (our callers check it), and the GIL
        // is held.
        if unsafe { (self.read)(tensor.as_ptr().cast(), out.as_mut_ptr()) } != 0 {
            drop(PyErr::take(tensor.py()));
            return None;
        }
        // SAFETY: the call fills the structure when it returns 0.
        Some(unsafe { out.assume_init() })
    }

    /// Makes a tensor; it owns the block when this succeeds.
    #[inline]
    fn make<'py>(
        &self,
        py: Python<'py>,
        managed: *mut DLManagedTensorVersioned,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut out = std::ptr::null_mut();
        // SAFETY: `managed` is a complete structure of ours; the GIL is held.
        let failed = unsafe { (self.make)(managed, &mut out) } != 0;
        if failed {
            return Err(PyErr::fetch(py));
        }
        // SAFETY: the call gives a new reference, or null with an exception set.
        unsafe { Bound::from_owned_ptr_or_err(py, out.cast()) }
    }
}

/// How torch is handed a block.
pub enum Importer {
    /// Through its C function.
    Exchange(Exchange),
    /// Through a capsule and `torch._C._from_dlpack`.
    Capsule(Py<PyAny>),
}

impl Importer {
    /// Makes a tensor that owns `block`. Whatever goes wrong, the block is freed just once.
    pub fn import<M: Memory>(&self, py: Python<'_>, block: Block<M>) -> PyResult<Py<PyAny>> {
        let made = match self {
            Self::Exchange(exchange) => exchange.make(py, block.versioned()),
            Self::Capsule(from_dlpack) => Self::through_capsule(py, from_dlpack, &block),
        };
        match made {
            Ok(tensor) => {
                block.hand_over();
                Ok(tensor.unbind())
            }
            // `block` is dropped here. Its deleter, should torch have called it meanwhile, did nothing.
            Err(error) => Err(error),
        }
    }

    fn through_capsule<'py, M: Memory>(
        py: Python<'py>,
        from_dlpack: &Py<PyAny>,
        block: &Block<M>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // SAFETY: the capsule has no destructor, so a plain pointer does; the block outlives the capsule's
        // use below.
        let capsule = unsafe {
            let made = ffi::PyCapsule_New(block.legacy().cast(), CAPSULE.as_ptr(), None);
            Bound::from_owned_ptr_or_err(py, made)?
        };
        let made = from_dlpack.bind(py).call1((&capsule,));
        // SAFETY: a live capsule; the name is static. Renamed, it can never again be taken for an unused one.
        unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), USED_CAPSULE.as_ptr().cast::<c_char>()) };
        made
    }
}
