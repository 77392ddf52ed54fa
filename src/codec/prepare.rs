//! Preparation of batches on arrival, before `next` delivers them. The pin thread builds them in memory from torch's
//! allocator of pinned memory.

use std::sync::Arc;

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::pickle::Pickled;
use super::pinning::Copies;
use super::{Pinned, decode, decode_pinned, pickle_of, shrink};
use crate::engine::Incoming;
use crate::engine::completions::Message;
use crate::engine::pin::Prepare;
use crate::interop::detached::{DetachedObject, attached};
use crate::interop::exit_guard::call;
use crate::interop::tensor::Bridge;
use crate::shm::arena::Arena;
use crate::shm::lease::Lease;
use crate::wire::ResultKind;

/// A result that was prepared on arrival: pinned, or unpickled while its worker was alive.
#[derive(Debug)]
pub enum Ready {
    Batch(DetachedObject),
    /// The error that unpickling raised.
    Raised(PyErr),
    /// torch's `ExceptionWrapper` of the error that pinning raised.
    Error(DetachedObject),
    /// A result that is still pickled, because a signal handler interrupted the unpickling.
    Pickled(Pickled),
}

/// The Python functions that the pin thread calls; `_core.pyi` has their types.
pub struct PinCallbacks {
    /// Called once, on the pin thread.
    pub begin: DetachedObject,
    /// Returns the allocator and whether tuples become lists; None if torch's function has been replaced.
    pub plain: DetachedObject,
    /// torch's function that pins a batch.
    pub pin: DetachedObject,
    /// Wraps an exception in torch's `ExceptionWrapper`.
    pub failure: DetachedObject,
    /// Unpickles a batch.
    pub loads: DetachedObject,
}

/// A decoder of batches into pinned memory.
pub struct PinnedDecoder {
    callbacks: PinCallbacks,
    /// Reused for each message.
    buffer: Vec<u8>,
}

impl PinnedDecoder {
    pub fn new(callbacks: PinCallbacks) -> Self {
        Self { callbacks, buffer: Vec::new() }
    }

    /// Prepares the pin thread. Call it on that thread.
    pub fn begin(&self, py: Python<'_>) -> PyResult<()> {
        call(&self.callbacks.begin.bind(py), PyTuple::empty(py)).map(drop)
    }

    /// Builds the batch of a message in pinned memory, with its large tensors still unfilled: the returned copies fill
    /// them. If torch's function must pin the batch, no copies are returned, and the batch is complete.
    fn build<'py>(
        &self,
        py: Python<'py>,
        message: &mut Message,
        kind: ResultKind,
    ) -> PyResult<(Py<PyAny>, Option<Copies<Lease>>)> {
        let bridge = Bridge::get(py)?;
        let (payload, leaves) = message.parts();
        if kind == ResultKind::Plain {
            let plain = call(&self.callbacks.plain.bind(py), PyTuple::empty(py))?;
            let plain: Option<(Bound<'py, PyAny>, bool)> = plain.extract()?;
            if let Some((allocate, tuples_become_lists)) = plain
                && let Some(pinned) = Pinned::new(payload, allocate, tuples_become_lists)?
            {
                let (batch, copies) = decode_pinned(bridge, payload, leaves, pinned, py)?;
                return Ok((batch, Some(copies)));
            }
        }
        let mut object = decode(py, bridge, payload, leaves)?.into_bound(py);
        if kind != ResultKind::Plain {
            let (payload, objects) = pickle_of(&object)?;
            let arguments = PyTuple::new(py, [payload.as_any(), objects.as_any()])?;
            object = call(&self.callbacks.loads.bind(py), arguments)?;
        }
        let batch = call(&self.callbacks.pin.bind(py), PyTuple::new(py, [object])?)?;
        Ok((batch.unbind(), None))
    }

    fn failed(&self, py: Python<'_>, error: PyErr) -> Result<Ready, String> {
        if !error.is_instance_of::<PyException>(py) {
            return Err(error.to_string());
        }
        let failure = self.callbacks.failure.bind(py);
        let wrap = || call(&failure, PyTuple::new(py, [error.into_value(py)])?);
        wrap().map(|it| Ready::Error(DetachedObject::new(it.unbind()))).map_err(|error| error.to_string())
    }
}

impl Prepare for PinnedDecoder {
    type Ready = Ready;

    fn prepare(&mut self, arena: &Arc<Arena>, incoming: &Incoming) -> Result<Ready, String> {
        let buffer = std::mem::take(&mut self.buffer);
        let mut message = match Message::open(arena, incoming, buffer) {
            Ok(message) => message,
            Err(error) => return attached(|py| self.failed(py, error.into())),
        };
        let (ready, copies) = attached(|py| match self.build(py, &mut message, incoming.entry.kind) {
            Ok((batch, copies)) => Ok((Ready::Batch(DetachedObject::new(batch)), copies)),
            Err(error) => Ok((self.failed(py, error)?, None)),
        })?;
        if let Some(copies) = copies {
            copies.run();
        }
        self.buffer = message.into_buffer();
        shrink(&mut self.buffer);
        Ok(ready)
    }

    fn is_error(ready: &Ready) -> bool {
        matches!(ready, Ready::Error(_))
    }
}
