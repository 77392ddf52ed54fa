//! Signals that are kept back while workers are forked.

use pyo3::prelude::*;

use crate::sys::hold;

/// Keeps a signal back until `release_signal`, in all threads; false where there is nothing to keep back.
#[pyfunction]
pub fn hold_signal(signal: i32) -> bool {
    hold::hold(signal)
}

/// Lets a signal in again. One that came meanwhile comes to this thread.
#[pyfunction]
pub fn release_signal(signal: i32) {
    hold::release(signal);
}
