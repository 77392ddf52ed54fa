//! The pin thread's Python side: batches are decoded into memory of torch's pinned allocator.

use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::engine::Pickled;
use super::runtime::Runtime;
use crate::codec::{self, Copies, Pinned};
use crate::engine::completions::Message;
use crate::engine::pin::{Body, Prepare};
use crate::engine::{Handle, Incoming};
use crate::interop::stay::{call, let_go};
use crate::interop::tensor::Bridge;
use crate::shm::arena::Arena;
use crate::shm::lease::Lease;
use crate::sys::{clock, fork};
use crate::wire::ResultKind;

/// A Python object that the pin thread may let go of while it does not hold the GIL.
///
/// PyO3 would put it onto a list behind a lock, which a fork may copy while it is held: so the GIL is taken here. In a
/// forked child the object stays where it is: to free pinned memory takes the allocator's locks, which are no better.
pub struct Held {
    object: Option<Py<PyAny>>,
    generation: u64,
}

impl Held {
    /// Over an object.
    pub fn new(object: Py<PyAny>) -> Self {
        Self { object: Some(object), generation: fork::generation() }
    }

    /// The object.
    pub fn take(mut self) -> Option<Py<PyAny>> {
        self.object.take()
    }

    fn bind<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        self.object.as_ref().map_or_else(|| py.None(), |object| object.clone_ref(py)).into_bound(py)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.generation == fork::generation() {
            Python::try_attach(|py| self.object.take().map(|object| let_go(py, object)));
        }
        std::mem::forget(self.object.take());
    }
}

/// A batch that was made ready when it came: by the pin thread, or because it had to be unpickled while its worker lives.
pub enum Ready {
    /// The batch.
    Batch(Held),
    /// What unpickling it has raised.
    Raised(PyErr),
    /// torch's `ExceptionWrapper` of what kept it from being pinned.
    Error(Held),
    /// Not ready after all: a signal handler cut off its unpickling.
    Pickled(Pickled),
}

impl std::fmt::Debug for Ready {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Batch(_) => "Batch",
            Self::Raised(_) => "Raised",
            Self::Error(_) => "Error",
            Self::Pickled(_) => "Pickled",
        })
    }
}

/// What makes batches ready: `rustloader.device.pinning.Pinner` and what the decoder needs.
pub struct Pinner {
    /// The Python object.
    pinner: Held,
    runtime: Arc<Runtime>,
    /// Reused for each message.
    buffer: Vec<u8>,
}

const GONE: &str = "the interpreter is at its end";

impl Pinner {
    /// Over an object of the Python class.
    pub fn new(py: Python<'_>, pinner: Py<PyAny>) -> PyResult<Self> {
        Ok(Self { pinner: Held::new(pinner), runtime: Runtime::get(py)?, buffer: Vec::new() })
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
            let plain = call(&pinner.getattr("plain")?, PyTuple::empty(py))?;
            let plain: Option<(Bound<'py, PyAny>, bool)> = plain.extract()?;
            if let Some((allocate, tuples_become_lists)) = plain
                && let Some(pinned) = Pinned::new(payload, allocate, tuples_become_lists)?
            {
                let (batch, copies) = codec::decode_pinned(bridge, payload, leaves, pinned, py)?;
                return Ok((batch, Some(copies)));
            }
        }
        let mut object = codec::decode(py, bridge, payload, leaves)?.into_bound(py);
        if kind != ResultKind::Plain {
            let (payload, objects) = codec::pickle_of(&object)?;
            object =
                call(self.runtime.loads.bind(py), PyTuple::new(py, [payload.as_any(), objects.as_any()])?)?;
        }
        let batch = call(&pinner.getattr("pin")?, PyTuple::new(py, [object])?)?;
        Ok((batch.unbind(), None))
    }

    fn failed(&self, py: Python<'_>, error: PyErr) -> Result<Ready, String> {
        if !error.is_instance_of::<PyException>(py) {
            return Err(error.to_string());
        }
        let wrap =
            || call(&self.pinner.bind(py).getattr("failure")?, PyTuple::new(py, [error.into_value(py)])?);
        wrap().map(|it| Ready::Error(Held::new(it.unbind()))).map_err(|error| error.to_string())
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
            Ok((batch, copies)) => Ok((Ready::Batch(Held::new(batch)), copies)),
            Err(error) => Ok((self.failed(py, error)?, None)),
        })?;
        if let Some(copies) = copies {
            copies.run();
        }
        self.buffer = message.into_buffer();
        codec::shrink(&mut self.buffer);
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
        let begin = body.prepare().pinner.bind(py).getattr("begin");
        begin.and_then(|begin| call(&begin, PyTuple::empty(py))).map_err(|error| error.to_string())?;
        py.detach(|| body.run())
    })
}

/// Waits for the pin thread's end, at most `seconds`; says whether it has ended.
pub fn join(py: Python<'_>, handle: &Handle, seconds: Option<f64>) -> PyResult<bool> {
    if !handle.is_ours() {
        return Ok(true);
    }
    let Some(control) = handle.pinning() else { return Ok(true) };
    if control.is_current() {
        return Ok(false);
    }
    let limit = seconds.map_or(Duration::MAX, |seconds| {
        Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
    });
    let start = clock::monotonic();
    loop {
        let left = limit.saturating_sub(clock::monotonic() - start);
        if py.detach(|| control.join(left)) {
            return Ok(true);
        }
        if left.is_zero() {
            return Ok(false);
        }
        py.check_signals()?;
    }
}
