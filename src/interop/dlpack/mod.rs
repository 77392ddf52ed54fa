//! DLPack: its C structures, and tensors made over memory of ours.
//!
//! The structures follow `dlpack.h`, version 1.3 (<https://github.com/dmlc/dlpack>).

mod block;
mod buffer;
mod lease;

use std::ffi::{CStr, c_char, c_int, c_void};

use pyo3::ffi;
use pyo3::prelude::*;

pub use block::Block;
pub use buffer::{LeaseBuffer, heap_storage};
pub use lease::{Heap, Lease};

/// `DLDeviceType`: ordinary memory.
pub const CPU: i32 = 1;

const EXCHANGE_API: &CStr = c"dlpack_exchange_api";
const CAPSULE: &CStr = c"dltensor";
const USED_CAPSULE: &CStr = c"used_dltensor";

/// `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DLDevice {
    pub device_type: i32,
    pub device_id: i32,
}

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DLDataType {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

/// `DLTensor`; strides count elements.
#[repr(C)]
pub struct DLTensor {
    pub data: *mut c_void,
    pub device: DLDevice,
    pub ndim: i32,
    pub dtype: DLDataType,
    pub shape: *mut i64,
    pub strides: *mut i64,
    pub byte_offset: u64,
}

/// `DLManagedTensor`, what a capsule named "dltensor" holds.
#[repr(C)]
pub struct DLManagedTensor {
    pub dl_tensor: DLTensor,
    pub manager_ctx: *mut c_void,
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

/// `DLPackVersion`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DLPackVersion {
    pub major: u32,
    pub minor: u32,
}

/// `DLManagedTensorVersioned`, what the exchange API takes.
#[repr(C)]
pub struct DLManagedTensorVersioned {
    pub version: DLPackVersion,
    pub manager_ctx: *mut c_void,
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    pub flags: u64,
    pub dl_tensor: DLTensor,
}

type FromPyObject = unsafe extern "C" fn(*mut c_void, *mut DLTensor) -> c_int;
type ToPyObject = unsafe extern "C" fn(*mut DLManagedTensorVersioned, *mut *mut c_void) -> c_int;

#[repr(C)]
struct ExchangeHeader {
    version: DLPackVersion,
    prev_api: *const ExchangeHeader,
}

#[repr(C)]
struct ExchangeTable {
    header: ExchangeHeader,
    managed_tensor_allocator: *const c_void,
    managed_tensor_from_py_object_no_sync: *const c_void,
    managed_tensor_to_py_object_no_sync: Option<ToPyObject>,
    dltensor_from_py_object_no_sync: Option<FromPyObject>,
    current_work_stream: *const c_void,
}

/// torch's C functions, where it has them (`torch.Tensor.__dlpack_c_exchange_api__`).
#[derive(Clone, Copy)]
pub struct Exchange {
    read: FromPyObject,
    make: ToPyObject,
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
        let mut header: *const ExchangeHeader = pointer.cast();
        while !header.is_null() {
            // SAFETY: a capsule of this name holds a table with this header, alive as long as the process; so
            // does each of the chain of older ones.
            let ExchangeHeader { version, prev_api } = unsafe { &*header };
            if version.major == 1 {
                // SAFETY: major version 1 lays the table out as `ExchangeTable`.
                let table = unsafe { &*header.cast::<ExchangeTable>() };
                let (read, make) =
                    (table.dltensor_from_py_object_no_sync?, table.managed_tensor_to_py_object_no_sync?);
                return Some(Self { read, make });
            }
            header = *prev_api;
        }
        None
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
    pub fn import<L: Lease>(&self, py: Python<'_>, block: Block<L>) -> PyResult<Py<PyAny>> {
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

    fn through_capsule<'py, L: Lease>(
        py: Python<'py>,
        from_dlpack: &Py<PyAny>,
        block: &Block<L>,
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
