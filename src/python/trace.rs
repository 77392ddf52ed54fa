//! The files of a trace, as a Python object. `_core.pyi` documents the class.

use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::trace::{Event, Kind, Spooler};

/// The files of a trace.
#[pyclass(frozen, name = "TraceSink", module = "rustloader._core")]
pub struct PyTraceSink(pub Arc<Spooler>);

#[pymethods]
impl PyTraceSink {
    #[new]
    fn new(files: Vec<i32>, unfinished: i32, seconds: f64) -> Self {
        // SAFETY: the caller passes ownership of the descriptors, which are open.
        let owned = |fd| unsafe { OwnedFd::from_raw_fd(fd) };
        Self(Spooler::new(files.into_iter().map(owned).collect(), owned(unfinished), (seconds * 1e9) as u64))
    }

    fn begin(&self, source: u32, kind: u32, who: u32, begin: u64, number: u64) -> PyResult<()> {
        let event = Event { kind: kind_of(kind)?, who, begin, length: 0, number, extra: 0 };
        self.0.begin(source, event);
        Ok(())
    }

    #[pyo3(signature = (source, kind, who, begin, length, number, extra = 0))]
    #[expect(clippy::too_many_arguments, reason = "the fields of an event")]
    fn put(&self, source: u32, kind: u32, who: u32, begin: u64, length: u64, number: u64, extra: u64) -> PyResult<()> {
        self.0.put(source, Event { kind: kind_of(kind)?, who, begin, length, number, extra });
        Ok(())
    }

    fn end(&self, py: Python<'_>) -> (u64, Vec<(usize, u64)>) {
        py.detach(|| self.0.end())
    }
}

fn kind_of(number: u32) -> PyResult<Kind> {
    let unknown = || PyValueError::new_err(format!("there is no kind of event with the number {number}"));
    Kind::of_number(number).ok_or_else(unknown)
}
