//! What exclusive access protects.

use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, TryLockError};

use pyo3::exceptions::{PyBaseException, PyValueError};
use pyo3::prelude::*;

use super::PyEngine;
use crate::codec::prepare::Ready;
use crate::engine::gate::Attempt;
use crate::engine::{Ending, Engine};
use crate::error::Error;
use crate::python::gate;

/// The engine, and buffers that are reused for each message and each index batch.
pub(super) struct State {
    pub(super) engine: Engine<Py<PyAny>, Ready, Py<PyBaseException>>,
    pub(super) buffer: Vec<u8>,
    pub(super) payload: Vec<u8>,
    /// The message of a `begin` that a vacancy has cut off: the workers have got it.
    pub(super) begun: Option<Vec<u8>>,
}

/// Exclusive access to the state, released on drop.
pub(super) struct Access<'a> {
    pub(super) engine: &'a PyEngine,
    pub(super) state: Option<MutexGuard<'a, State>>,
}

impl Access<'_> {
    pub(super) fn state(&mut self) -> &mut State {
        match &mut self.state {
            Some(state) => state,
            None => unreachable!("an access without its state is only ever dropped"),
        }
    }
}

impl Drop for Access<'_> {
    /// Runs with the GIL and detaches only after the gate is released: see `PyEngine::finish`.
    fn drop(&mut self) {
        let mut ending = Ending::Nothing;
        if let Some(state) = &mut self.state {
            state.engine.interrupted();
            // SYNC: finish-wanted (pairs with the Release in `finish`).
            if self.engine.finish_wanted.load(Ordering::Acquire) {
                ending = state.engine.finish();
            }
        }
        self.state = None;
        // A fork inside `next` (in the sampler, for example) may have copied the gate's lock while a thread held it.
        if self.engine.handle.is_ours() {
            self.engine.gate.leave();
        }
        if !matches!(ending, Ending::Nothing) {
            Python::attach(|py| py.detach(|| ending.carry_out()));
        }
    }
}

impl PyEngine {
    pub(super) fn check_worker(&self, worker: u32) -> PyResult<()> {
        if worker < self.handle.arena.geometry().workers {
            return Ok(());
        }
        Err(PyValueError::new_err(format!("there is no worker {worker}")))
    }

    /// Waits for exclusive access without the GIL.
    pub(super) fn enter(&self, py: Python<'_>) -> PyResult<Access<'_>> {
        gate::enter(py, &self.gate, &self.handle)?;
        self.access()
    }

    /// Enters if no thread has exclusive access, this one included.
    pub(super) fn try_enter(&self) -> PyResult<Option<Access<'_>>> {
        self.handle.check_ours()?;
        let entered = self.gate.try_enter() == Attempt::Entered;
        entered.then(|| self.access()).transpose()
    }

    fn access(&self) -> PyResult<Access<'_>> {
        let state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.gate.leave();
                return Err(Error::usage("the engine was used without exclusive access").into());
            }
        };
        Ok(Access { engine: self, state: Some(state) })
    }
}
