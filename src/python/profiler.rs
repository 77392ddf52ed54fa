//! Whether anybody would see `record_function`.

use std::sync::OnceLock;

use pyo3::prelude::*;

use crate::sys;

type HasCallbacks = unsafe extern "C" fn() -> bool;

static HAS_CALLBACKS: OnceLock<Option<HasCallbacks>> = OnceLock::new();

/// True while a profiler, an NVTX emitter, an execution trace observer or any other callback of torch is active in this
/// thread. Asks `at::hasCallbacks`; where torch does not export it the answer is always True.
#[pyfunction]
pub fn observed() -> bool {
    let function = HAS_CALLBACKS.get_or_init(|| {
        let address = sys::symbol::find(c"libtorch_cpu.so", c"_ZN2at12hasCallbacksEv")?;
        // SAFETY: the symbol is `bool at::hasCallbacks()`, by its mangled name; it takes nothing.
        Some(unsafe { std::mem::transmute::<*mut libc::c_void, HasCallbacks>(address) })
    });
    // SAFETY: as above; it only reads torch's thread-local and global state and throws nothing.
    function.is_none_or(|function| unsafe { function() })
}
