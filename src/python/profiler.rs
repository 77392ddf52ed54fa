//! Whether anybody looks on: would see `record_function`, or wants reports.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;

use crate::sys;

type HasCallbacks = unsafe extern "C" fn() -> bool;

/// A `rustloader.report` is in force.
static REPORTING: AtomicBool = AtomicBool::new(false);
static HAS_CALLBACKS: OnceLock<Option<HasCallbacks>> = OnceLock::new();

/// True while a profiler, an NVTX emitter, an execution trace observer or any other callback of torch is active in this
/// thread, or a report is in force. Asks `at::hasCallbacks`; where torch does not export it the answer is always True.
#[pyfunction]
pub fn observed() -> bool {
    if REPORTING.load(Ordering::Relaxed) {
        return true;
    }
    let function = HAS_CALLBACKS.get_or_init(|| {
        let address = sys::symbol::find(c"libtorch_cpu.so", c"_ZN2at12hasCallbacksEv")?;
        // SAFETY: the symbol is `bool at::hasCallbacks()`, by its mangled name; it takes nothing.
        Some(unsafe { std::mem::transmute::<*mut libc::c_void, HasCallbacks>(address) })
    });
    // SAFETY: as above; it only reads torch's thread-local and global state and throws nothing.
    function.is_none_or(|function| unsafe { function() })
}

/// Has [`observed`] answer True while reports are in force: so `next` asks one question for both.
#[pyfunction]
pub fn set_reporting(reporting: bool) {
    REPORTING.store(reporting, Ordering::Relaxed);
}
