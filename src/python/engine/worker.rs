//! The death and the status of a worker as Python objects.

use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

use crate::engine::{DeathReport, Status};
use crate::python::figures::seconds;
use crate::shm::layout::WorkerState;
use crate::sys::pidfd::{ExitStatus, signal_name};

#[pyclass(frozen, get_all, name = "Death", module = "rustloader._core")]
pub struct PyDeath {
    worker_id: u32,
    pid: i32,
    exitcode: Option<i32>,
    signal: Option<String>,
    index: Option<Py<PyAny>>,
    task: Option<u64>,
    answers: u64,
    has_begun: bool,
    place: Option<u64>,
    generation: u32,
    stalled: bool,
    first_task: u64,
}

impl PyDeath {
    pub(super) fn new(py: Python<'_>, death: &DeathReport<'_, Py<PyAny>>) -> Self {
        let (exitcode, signal) = match death.status {
            None => (None, None),
            Some(ExitStatus::Code(code)) => (Some(code), None),
            Some(ExitStatus::Signal(signal)) => (Some(-signal), Some(signal_name(signal))),
        };
        let DeathReport {
            worker: worker_id,
            pid,
            task,
            answers,
            has_begun,
            place,
            generation,
            stalled,
            first_task,
            ..
        } = *death;
        let index = death.index.map(|index| index.clone_ref(py));
        Self {
            worker_id,
            pid,
            exitcode,
            signal,
            index,
            task,
            answers,
            has_begun,
            place,
            generation,
            stalled,
            first_task,
        }
    }
}

pub(super) fn status_dict<'py>(py: Python<'py>, status: &Status) -> PyResult<Bound<'py, PyDict>> {
    let spent = status.spent_ns.iter().enumerate();
    let spent = spent.map(|(state, &ns)| (WorkerState::from_u32(state as u32).name(), seconds(ns)));
    let (state, terminated) = status.names();
    let dict = PyDict::new(py);
    dict.set_item("state", state)?;
    dict.set_item("pid", status.pid)?;
    dict.set_item("task", status.task)?;
    dict.set_item("tasks_done", status.tasks_done)?;
    dict.set_item("terminated", terminated)?;
    dict.set_item("seconds_in_state", seconds(status.in_state_ns))?;
    dict.set_item("seconds", spent.into_py_dict(py)?)?;
    Ok(dict)
}
