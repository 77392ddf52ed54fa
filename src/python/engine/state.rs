//! The state of the engine, and exclusive access to it.

use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::exceptions::PyBaseException;
use pyo3::prelude::*;

use crate::codec::prepare::Ready;
use crate::engine::gate::Gate;
use crate::engine::{Ending, Engine, Handle};

/// The engine, and buffers that are reused for each message and each index batch.
pub(super) struct State {
    pub(super) engine: Engine<Py<PyAny>, Ready, Py<PyBaseException>>,
    pub(super) buffer: Vec<u8>,
    pub(super) payload: Vec<u8>,
    /// The message of a `begin` that returned early because a worker became vacant. The workers already have the
    /// message.
    pub(super) begun: Option<Vec<u8>>,
    /// The next epoch, if it has begun early.
    pub(super) early: Option<Early>,
}

/// The messages of an epoch that began before the current one ended.
pub(super) struct Early {
    /// The message that begins it.
    pub(super) message: Vec<u8>,
    /// Its tasks: each index batch, and its encoded bytes.
    pub(super) tasks: Vec<(Py<PyAny>, Vec<u8>)>,
}

/// Exclusive access to the state, released on drop.
pub(super) struct Access<'a> {
    pub(super) gate: &'a Gate,
    /// `PyEngine::finish` was called: the engine must be released when this access is dropped.
    pub(super) finish_wanted: &'a AtomicBool,
    pub(super) handle: &'a Handle,
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
            if self.finish_wanted.load(Ordering::Acquire) {
                ending = state.engine.finish();
            }
        }
        self.state = None;
        // A fork inside `next` (in the sampler, for example) may have copied the gate's lock while a thread held it.
        if self.handle.is_ours() {
            self.gate.leave();
        }
        if !matches!(ending, Ending::Nothing) {
            Python::attach(|py| py.detach(|| ending.carry_out()));
        }
    }
}
