//! Connections between the main process and workers on other machines, as Python objects.

use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;

use crate::config::ORPHAN_GRACE;
use crate::sys::signal;
use crate::transport::{Link, Remote};

/// The main process's end. `_core.pyi` documents it.
#[pyclass(frozen, name = "Link", module = "rustloader._core")]
pub struct PyLink(pub Arc<Link>);

#[pymethods]
impl PyLink {
    #[getter]
    fn has_ended(&self) -> bool {
        self.0.has_ended()
    }

    #[getter]
    fn reason(&self) -> Option<String> {
        self.0.reason()
    }

    #[getter]
    fn received(&self) -> u64 {
        self.0.received()
    }
}

/// Opens the worker's end. The process must have no other work, because it exits when the connection ends, even
/// while the dataset is loading a sample.
pub fn open(fd: i32, ring_slots: u32, region_len: u64) -> PyResult<Arc<Remote>> {
    // SAFETY: the caller passes ownership of the descriptor, which is open.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let lost = || {
        std::thread::sleep(ORPHAN_GRACE);
        signal::exit_now(1);
    };
    let killed = || _ = signal::kill(std::process::id() as i32, libc::SIGKILL);
    Ok(Remote::start(socket, ring_slots, region_len, lost, killed)?)
}

/// Converts seconds to a duration: 0 if the value is negative or NaN, [`Duration::MAX`] if it is too large.
pub fn limit(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}
