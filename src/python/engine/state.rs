//! What the turn protects.

use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, TryLockError};

use pyo3::prelude::*;

use super::PyEngine;
use crate::codec::prepare::Ready;
use crate::engine::{Ending, Engine};
use crate::error::Error;
use crate::python::gate;

/// The engine, and buffers.
pub(super) struct State {
    pub(super) engine: Engine<Py<PyAny>, Ready, PyErr>,
    /// Reused for each message.
    pub(super) buffer: Vec<u8>,
    /// Reused for each index batch.
    pub(super) payload: Vec<u8>,
}

impl State {
    pub(super) fn new(engine: Engine<Py<PyAny>, Ready, PyErr>) -> Self {
        Self { engine, buffer: Vec::new(), payload: Vec::new() }
    }
}

/// The turn and what may be used with it. Given back when it is dropped, also by an error.
pub(super) struct InTurn<'a> {
    pub(super) engine: &'a PyEngine,
    pub(super) state: Option<MutexGuard<'a, State>>,
}

impl InTurn<'_> {
    pub(super) fn state(&mut self) -> &mut State {
        match &mut self.state {
            Some(state) => state,
            None => unreachable!("a turn without its state is only ever dropped"),
        }
    }
}

impl Drop for InTurn<'_> {
    /// With the GIL, which is given up only once the turn is given back: see `PyEngine::finish`.
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
        // A fork within `next` (in the sampler, say) may have copied the turn's lock while a thread had it.
        if self.engine.handle.is_ours() {
            self.engine.gate.leave();
        }
        if !matches!(ending, Ending::Nothing) {
            Python::attach(|py| py.detach(|| ending.carry_out()));
        }
    }
}

impl PyEngine {
    /// Takes the turn; waits for it without the GIL.
    pub(super) fn enter(&self, py: Python<'_>) -> PyResult<InTurn<'_>> {
        gate::enter(py, &self.gate, &self.handle)?;
        match self.state.try_lock() {
            Ok(state) => Ok(InTurn { engine: self, state: Some(state) }),
            Err(TryLockError::Poisoned(poisoned)) => {
                Ok(InTurn { engine: self, state: Some(poisoned.into_inner()) })
            }
            Err(TryLockError::WouldBlock) => {
                self.gate.leave();
                Err(Error::usage("the engine was used without the turn").into())
            }
        }
    }
}
