//! The state of the engine, and exclusive access to it.

use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::exceptions::PyBaseException;
use pyo3::prelude::*;

use crate::codec::prepare::Ready;
use crate::engine::gate::Gate;
use crate::engine::{Ending, Engine, Handle};

/// The engine, and reusable buffers: `buffer` for messages, `payload` for index batches.
pub(super) struct State {
    pub(super) engine: Engine<Py<PyAny>, Ready, Py<PyBaseException>>,
    pub(super) buffer: Vec<u8>,
    pub(super) payload: Vec<u8>,
    /// The message of a `begin` that had to return because a worker's slot became vacant. The workers already have this
    /// message.
    pub(super) begun: Option<Vec<u8>>,
    /// The early epoch, if there is one.
    pub(super) early: Option<Early>,
}

/// What the workers were sent for an early epoch.
pub(super) struct Early {
    /// The message that began the epoch.
    pub(super) message: Vec<u8>,
    /// The epoch's tasks: each index batch with its encoded bytes.
    pub(super) tasks: Vec<(Py<PyAny>, Vec<u8>)>,
}

/// Exclusive access to the state, released on drop.
pub(super) struct Access<'a> {
    pub(super) gate: &'a Gate,
    /// True after a call of `PyEngine::finish`: the engine must be released when this access is dropped.
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
    /// Runs with the GIL, and releases the GIL only after the gate: see `PyEngine::finish`.
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
        // In a child that was forked inside `next` (by the sampler, for example), the gate's lock may be held by a
        // thread that exists only in the parent.
        if self.handle.is_ours() {
            self.gate.leave();
        }
        if !matches!(ending, Ending::Nothing) {
            Python::attach(|py| py.detach(|| ending.carry_out()));
        }
    }
}
