//! Whether `next` is observed: by a profiler of torch's, or by a report.

use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;

use crate::interop::torch_symbols::has_callbacks;

/// A `rustloader.report` is in force.
static REPORTING: AtomicBool = AtomicBool::new(false);

/// True while a callback of torch would see `record_function` in this thread, or a report is in force.
#[pyfunction]
pub fn observed() -> bool {
    REPORTING.load(Ordering::Relaxed) || has_callbacks()
}

/// Makes [`observed`] return True while reports are in force: so `next` asks one question for both.
#[pyfunction]
pub fn set_reporting(reporting: bool) {
    REPORTING.store(reporting, Ordering::Relaxed);
}
