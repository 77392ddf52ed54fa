//! The pin thread's Python side: batches are decoded into memory of torch's pinned allocator.

use std::sync::Arc;

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use super::codec::{self, Copies, Pinned};
use super::runtime::Runtime;
use super::tensor::Bridge;
use crate::engine::Incoming;
use crate::engine::completions::Message;
use crate::engine::pin::{Body, Prepare};
use crate::shm::arena::Arena;
use crate::shm::lease::Lease;
use crate::wire::ResultKind;

/// A batch as the pin thread hands it on.
pub enum Ready {
    /// Pinned.
    Batch(Py<PyAny>),
    /// torch's `ExceptionWrapper` of what kept it from being pinned.
    Error(Py<PyAny>),
}

impl std::fmt::Debug for Ready {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if matches!(self, Self::Batch(_)) { "Batch" } else { "Error" })
    }
}

/// What makes batches ready: `rustloader._pin.Pinner` and what the decoder needs.
pub struct Pinner {
    /// The Python object.
    pinner: Py<PyAny>,
    runtime: Arc<Runtime>,
    /// Reused for each message.
    buffer: Vec<u8>,
}

const GONE: &str = "the interpreter is at its end";

impl Pinner {
    /// Over an object of the Python class.
    pub fn new(py: Python<'_>, pinner: Py<PyAny>) -> PyResult<Self> {
        Ok(Self { pinner, runtime: Runtime::get(py)?, buffer: Vec::new() })
    }

    /// Builds a batch. Plain ones are built over pinned memory that the copies then fill; for all others torch's function
    /// does what it does.
    fn build<'py>(
        &self,
        py: Python<'py>,
        message: &mut Message,
        kind: ResultKind,
    ) -> PyResult<(Py<PyAny>, Option<Copies<Lease>>)> {
        let pinner = self.pinner.bind(py);
        let bridge = Bridge::get(py)?;
        let (payload, leaves) = message.parts();
        if kind == ResultKind::Plain {
            // None where somebody has replaced torch's function: then that is called.
            let plain: Option<(Bound<'py, PyAny>, bool)> = pinner.call_method0("plain")?.extract()?;
            if let Some((allocate, tuples_become_lists)) = plain {
                let pinned = Pinned::new(payload, allocate, tuples_become_lists)?;
                let (batch, copies) = codec::decode_pinned(bridge, payload, leaves, pinned, py)?;
                return Ok((batch, Some(copies)));
            }
        }
        let mut object = codec::decode(py, bridge, payload, leaves)?;
        if kind != ResultKind::Plain {
            let (payload, objects): (Py<PyBytes>, Py<PyList>) = object.extract(py)?;
            object = self.runtime.loads.bind(py).call1((payload, objects))?.unbind();
        }
        Ok((pinner.call_method1("pin", (object,))?.unbind(), None))
    }

    fn failed(&self, py: Python<'_>, error: PyErr) -> Result<Ready, String> {
        if !error.is_instance_of::<PyException>(py) {
            return Err(error.to_string());
        }
        let wrapped = self.pinner.call_method1(py, "failure", (error.into_value(py),));
        wrapped.map(Ready::Error).map_err(|error| error.to_string())
    }
}

impl Prepare for Pinner {
    type Ready = Ready;

    fn prepare(&mut self, arena: &Arc<Arena>, incoming: &Incoming) -> Result<Ready, String> {
        let buffer = std::mem::take(&mut self.buffer);
        let mut message = match Message::open(arena, incoming, buffer) {
            Ok(message) => message,
            Err(error) => return attached(|py| self.failed(py, error.into())),
        };
        let (ready, copies) = attached(|py| match self.build(py, &mut message, incoming.entry.kind) {
            Ok((batch, copies)) => Ok((Ready::Batch(batch), copies)),
            Err(error) => Ok((self.failed(py, error)?, None)),
        })?;
        if let Some(copies) = copies {
            copies.run();
        }
        self.buffer = message.into_buffer();
        Ok(ready)
    }
}

/// Runs with the GIL, which the thread does not hold.
fn attached<R>(body: impl FnOnce(Python<'_>) -> Result<R, String>) -> Result<R, String> {
    Python::try_attach(body).unwrap_or_else(|| Err(GONE.to_owned()))
}

/// Runs the pin thread: it is made known to Python once for its whole life, and holds the GIL only where it needs it.
pub fn run(body: Body<Pinner>) -> Result<(), String> {
    attached(|py| {
        body.prepare().pinner.call_method0(py, "begin").map_err(|error| error.to_string())?;
        py.detach(|| body.run())
    })
}
