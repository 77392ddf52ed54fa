//! The C structures of `dlpack.h`, version 1.3 (<https://github.com/dmlc/dlpack>).

use std::ffi::{c_int, c_void};

/// `kDLCPU` of `DLDeviceType`: ordinary memory.
pub const CPU: i32 = 1;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DLDevice {
    pub device_type: i32,
    pub device_id: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DLDataType {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

/// `DLTensor`. Strides count elements.
#[repr(C)]
#[derive(Debug)]
pub struct DLTensor {
    pub data: *mut c_void,
    pub device: DLDevice,
    pub ndim: i32,
    pub dtype: DLDataType,
    pub shape: *mut i64,
    pub strides: *mut i64,
    /// Bytes from `data` to the first element.
    pub byte_offset: u64,
}

/// `DLManagedTensor`: the contents of a capsule named "dltensor".
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensor {
    pub dl_tensor: DLTensor,
    pub manager_ctx: *mut c_void,
    /// The function that the tensor's owner calls once, with this structure, to free it.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DLPackVersion {
    /// Incremented for incompatible changes to the layout.
    pub major: u32,
    /// Incremented for additions that keep the layout.
    pub minor: u32,
}

/// `DLManagedTensorVersioned`: the argument of the exchange API.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensorVersioned {
    pub version: DLPackVersion,
    pub manager_ctx: *mut c_void,
    /// The function that the tensor's owner calls once, with this structure, to free it.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    /// Bits that mark memory as read-only or copied.
    pub flags: u64,
    pub dl_tensor: DLTensor,
}

/// A function that fills a structure with the description of a tensor object. Returns 0 on success.
pub type ReadTensor = unsafe extern "C" fn(*mut c_void, *mut DLTensor) -> c_int;
/// A function that creates a tensor object, which then owns the structure. Returns 0 on success.
pub type MakeTensor = unsafe extern "C" fn(*mut DLManagedTensorVersioned, *mut *mut c_void) -> c_int;

/// `DLPackExchangeAPIHeader`.
#[repr(C)]
#[derive(Debug)]
pub struct ExchangeHeader {
    version: DLPackVersion,
    prev_api: *const ExchangeHeader,
}

/// `DLPackExchangeAPI`, major version 1.
#[repr(C)]
#[derive(Debug)]
struct ExchangeTable {
    header: ExchangeHeader,
    managed_tensor_allocator: *const c_void,
    managed_tensor_from_py_object_no_sync: *const c_void,
    managed_tensor_to_py_object_no_sync: Option<MakeTensor>,
    dltensor_from_py_object_no_sync: Option<ReadTensor>,
    current_work_stream: *const c_void,
}

/// Returns the functions of the first table in the chain whose major version is 1. Returns `None` if there is no such
/// table, or if it lacks one of the functions.
///
/// # Safety
/// `header` must be null or the start of a table of the version that it names. The same must hold for each older table
/// in the chain.
pub unsafe fn exchange_functions(mut header: *const ExchangeHeader) -> Option<(ReadTensor, MakeTensor)> {
    while !header.is_null() {
        // SAFETY: by the contract; every version begins with this header.
        let ExchangeHeader { version, prev_api } = unsafe { &*header };
        if version.major == 1 {
            // SAFETY: major version 1 lays the table out as `ExchangeTable`.
            let table = unsafe { &*header.cast::<ExchangeTable>() };
            return table.dltensor_from_py_object_no_sync.zip(table.managed_tensor_to_py_object_no_sync);
        }
        header = *prev_api;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn read(_: *mut c_void, _: *mut DLTensor) -> c_int {
        1
    }

    unsafe extern "C" fn make(_: *mut DLManagedTensorVersioned, _: *mut *mut c_void) -> c_int {
        2
    }

    fn table(major: u32, prev_api: *const ExchangeHeader, make: Option<MakeTensor>) -> ExchangeTable {
        ExchangeTable {
            header: ExchangeHeader { version: DLPackVersion { major, minor: 3 }, prev_api },
            managed_tensor_allocator: std::ptr::null(),
            managed_tensor_from_py_object_no_sync: std::ptr::null(),
            managed_tensor_to_py_object_no_sync: make,
            dltensor_from_py_object_no_sync: Some(read),
            current_work_stream: std::ptr::null(),
        }
    }

    #[test]
    fn the_table_of_major_version_1_is_found() {
        // SAFETY: `header` is null, or belongs to a table on this stack that begins with it.
        let functions_of = |header: *const ExchangeHeader| unsafe { exchange_functions(header) };
        let first = table(1, std::ptr::null(), Some(make));
        let newer = table(2, &first.header, None);
        for header in [&raw const first, &raw const newer] {
            let (_, make) = functions_of(header.cast()).unwrap();
            // SAFETY: this is the test's function, which does not read its arguments.
            assert_eq!(unsafe { make(std::ptr::null_mut(), std::ptr::null_mut()) }, 2);
        }
        assert!(functions_of(std::ptr::null()).is_none());
        let (other, half) = (table(0, std::ptr::null(), Some(make)), table(1, std::ptr::null(), None));
        assert!(functions_of((&raw const other).cast()).is_none());
        assert!(functions_of((&raw const half).cast()).is_none());
    }
}
