//! Python classes that describe the current epoch: its position, progress and snapshots. `_core.pyi` documents the
//! attributes.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::engine::position::Position;
use crate::engine::{Progress, Snapshot};

#[pyclass(frozen, get_all, name = "Position", module = "rustloader._core")]
pub struct PyPosition {
    low: u64,
    ahead: Vec<u64>,
    per_worker: Vec<u64>,
    last_worker: Option<u32>,
}

impl From<Position> for PyPosition {
    fn from(position: Position) -> Self {
        let Position { low, ahead, per_worker, last_worker } = position;
        Self { low, ahead, per_worker, last_worker }
    }
}

#[pyclass(frozen, get_all, name = "Snapshot", module = "rustloader._core")]
pub struct PySnapshot {
    answers: u64,
    is_error: bool,
    payload: Py<PyBytes>,
}

impl PySnapshot {
    pub(super) fn new(py: Python<'_>, snapshot: &Snapshot) -> Self {
        let Snapshot { answers, is_error, ref payload } = *snapshot;
        Self { answers, is_error, payload: PyBytes::new(py, payload).unbind() }
    }
}

#[pyclass(frozen, get_all, name = "Progress", module = "rustloader._core")]
pub struct PyProgress {
    sent: u64,
    outstanding: usize,
    loads: Vec<usize>,
    undelivered: Vec<(u64, Option<u32>)>,
}

impl From<Progress> for PyProgress {
    fn from(progress: Progress) -> Self {
        let Progress { sent, outstanding, loads, undelivered } = progress;
        Self { sent, outstanding, loads, undelivered }
    }
}
