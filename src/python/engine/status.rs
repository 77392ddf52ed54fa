//! A worker's status as a dict.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::engine::Status;
use crate::shm::layout::WorkerState;

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// State, pid, task, tasks done, what it knows of a SIGTERM, seconds in the state and in each state.
pub fn describe<'py>(py: Python<'py>, said: &Status) -> PyResult<Bound<'py, PyDict>> {
    let status = PyDict::new(py);
    let (state, terminated) = said.names();
    status.set_item("state", state)?;
    status.set_item("pid", said.pid)?;
    status.set_item("task", said.task)?;
    status.set_item("tasks_done", said.tasks_done)?;
    status.set_item("terminated", terminated)?;
    status.set_item("seconds_in_state", seconds(said.in_state_ns))?;
    let spent = PyDict::new(py);
    for (number, &ns) in said.spent_ns.iter().enumerate() {
        spent.set_item(WorkerState::from_u32(number as u32).name(), seconds(ns))?;
    }
    status.set_item("seconds", spent)?;
    Ok(status)
}
