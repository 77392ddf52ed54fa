//! Functions of torch's libraries without a Python API.

use std::sync::OnceLock;

use crate::sys;

type HasCallbacks = unsafe extern "C" fn() -> bool;

static HAS_CALLBACKS: OnceLock<Option<HasCallbacks>> = OnceLock::new();

/// Returns true if a callback of torch (profiler, NVTX emitter, trace observer) is active in this thread, according to
/// `at::hasCallbacks`. Also returns true if torch does not export that function.
pub fn has_callbacks() -> bool {
    let function = HAS_CALLBACKS.get_or_init(|| {
        let address = sys::symbol::find(c"libtorch_cpu.so", c"_ZN2at12hasCallbacksEv")?;
        // SAFETY: the symbol is `bool at::hasCallbacks()`, by its mangled name; it takes nothing.
        Some(unsafe { std::mem::transmute::<*mut libc::c_void, HasCallbacks>(address) })
    });
    // SAFETY: as above; it only reads torch's thread-local and global state and throws nothing.
    function.is_none_or(|function| unsafe { function() })
}
