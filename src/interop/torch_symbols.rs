//! Functions in torch's libraries that have no Python API.

use std::sync::OnceLock;

use crate::sys;

type HasCallbacks = unsafe extern "C" fn() -> bool;

static HAS_CALLBACKS: OnceLock<Option<HasCallbacks>> = OnceLock::new();

/// Returns true if `at::hasCallbacks` reports that a callback of torch (profiler, NVTX emitter, trace observer) is
/// active in this thread. Also returns true if torch does not export that function.
pub fn has_callbacks() -> bool {
    let function = HAS_CALLBACKS.get_or_init(|| {
        let address = sys::symbol::find(c"libtorch_cpu.so", c"_ZN2at12hasCallbacksEv")?;
        // SAFETY: according to its mangled name, the symbol is `at::hasCallbacks()`, which takes no arguments and
        // returns a bool.
        Some(unsafe { std::mem::transmute::<*mut libc::c_void, HasCallbacks>(address) })
    });
    // SAFETY: as above. The function only reads torch's thread-local and global state, and does not throw.
    function.is_none_or(|function| unsafe { function() })
}
