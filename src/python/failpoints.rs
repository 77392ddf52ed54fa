//! What tests see of the failpoints, in a build that has them.

use std::collections::HashMap;

use pyo3::prelude::*;

use crate::sys::failpoint;

/// How many system calls of each kind this process has made. Arms what the environment says, if this process has not
/// done so yet.
#[pyfunction]
pub fn _failpoint_calls() -> HashMap<&'static str, u64> {
    failpoint::kinds().iter().map(|kind| (*kind, failpoint::calls(kind))).collect()
}
