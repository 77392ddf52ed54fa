//! A worker's status page as a dict.

use std::sync::atomic::Ordering;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::shm::layout::{StatusPage, Terminated, WorkerState};

/// State, pid, task, tasks done, what it knows of a SIGTERM, seconds in the state and in each state.
pub fn describe<'py>(py: Python<'py>, page: &StatusPage) -> PyResult<Bound<'py, PyDict>> {
    let status = PyDict::new(py);
    let since = page.since_ns.load(Ordering::Relaxed);
    let now = crate::sys::clock::monotonic_ns();
    status.set_item("state", WorkerState::from_u32(page.state.load(Ordering::Relaxed)).name())?;
    status.set_item("pid", page.pid.load(Ordering::Relaxed))?;
    status.set_item("task", page.task.load(Ordering::Relaxed))?;
    status.set_item("tasks_done", page.tasks_done.load(Ordering::Relaxed))?;
    status.set_item("terminated", Terminated::name_of(page.terminated.load(Ordering::Relaxed)))?;
    status.set_item("seconds_in_state", now.saturating_sub(since) as f64 / 1e9)?;
    let spent = PyDict::new(py);
    for (number, word) in page.spent_ns.iter().enumerate() {
        let name = WorkerState::from_u32(number as u32).name();
        spent.set_item(name, word.load(Ordering::Relaxed) as f64 / 1e9)?;
    }
    status.set_item("seconds", spent)?;
    Ok(status)
}
