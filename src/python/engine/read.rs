//! Results as Python objects.

use std::sync::atomic::Ordering;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use super::state::State;
use super::{BATCHES, PyEngine};
use crate::codec;
use crate::codec::pickle::Pickled;
use crate::codec::prepare::Ready;
use crate::engine::Incoming;
use crate::engine::completions::Message;
use crate::engine::delivery::Event;
use crate::interop::detached::DetachedObject;
use crate::interop::exit_guard::call;
use crate::interop::tensor::Bridge;
use crate::metrics::Count;
use crate::python::code;
use crate::wire::ResultKind;

/// Keeps a message's buffer for the next one.
fn keep(buffer: &mut Vec<u8>, message: Message) {
    *buffer = message.into_buffer();
    codec::shrink(buffer);
}

/// A result, as far as it can be read without Python code.
enum Read {
    Batch(Py<PyAny>),
    Pickled(Pickled),
}

#[inline]
fn read_message(py: Python<'_>, state: &mut State, incoming: &Incoming) -> PyResult<Read> {
    let buffer = std::mem::take(&mut state.buffer);
    let mut message = Message::open(state.engine.arena(), incoming, buffer)?;
    let (payload, objects) = if incoming.entry.kind == ResultKind::Error {
        (PyBytes::new(py, message.payload()).unbind(), PyList::empty(py).unbind())
    } else {
        let (payload, leaves) = message.parts();
        let object = codec::decode(py, Bridge::get(py)?, payload, leaves)?;
        if incoming.entry.kind == ResultKind::Plain {
            keep(&mut state.buffer, message);
            return Ok(Read::Batch(object));
        }
        let (pickle, objects) = codec::pickle_of(object.bind(py))?;
        (pickle.unbind(), objects.unbind())
    };
    keep(&mut state.buffer, message);
    Ok(Read::Pickled(Pickled { payload, objects, is_batch: incoming.is_batch() }))
}

/// Puts a code and its value where the caller finds them.
#[inline]
pub(super) fn give<'py>(
    answer: &Bound<'py, PyList>,
    code: u8,
    value: impl IntoPyObject<'py>,
) -> PyResult<()> {
    answer.set_item(1, value)?;
    answer.set_item(0, code)
}

/// Why an unpickling has failed.
enum Failure {
    /// By itself: the error stands in the batch's place.
    Own(PyErr),
    /// A signal handler cut it off: the batch is sound.
    CutOff(PyErr),
}

impl PyEngine {
    /// Reads a result into `answer`.
    #[inline]
    pub(super) fn read(
        &self,
        py: Python<'_>,
        state: &mut State,
        answer: &Bound<'_, PyList>,
        incoming: &Incoming,
    ) -> PyResult<()> {
        match read_message(py, state, incoming)? {
            Read::Batch(object) => self.deliver(answer, code::BATCH, object),
            Read::Pickled(pickle) => self.read_pickle(py, state, answer, pickle),
        }
    }

    /// Puts a result that was made ready before into `answer`.
    pub(super) fn read_ready(
        &self,
        py: Python<'_>,
        state: &mut State,
        answer: &Bound<'_, PyList>,
        ready: Ready,
    ) -> PyResult<()> {
        match ready {
            Ready::Batch(batch) => self.deliver(answer, code::BATCH, batch.take()),
            Ready::Raised(error) => Err(error),
            Ready::Error(wrapper) => self.deliver(answer, code::ERROR, wrapper.take()),
            Ready::Pickled(pickle) => self.read_pickle(py, state, answer, pickle),
        }
    }

    /// Unpickles a result that asks something of its worker, which may leave afterwards. An error stands in the batch's place;
    /// what a signal handler has raised comes at once, and the next call tries again.
    pub(super) fn open(
        &self,
        py: Python<'_>,
        state: &mut State,
        incoming: &Incoming,
        ready: Option<Ready>,
    ) -> PyResult<()> {
        let read = match ready {
            Some(Ready::Pickled(pickle)) => Ok(Read::Pickled(pickle)),
            _ => read_message(py, state, incoming),
        };
        let opened = match read {
            Ok(Read::Batch(object)) => Ok(object),
            Ok(Read::Pickled(pickle)) => match self.load(py, &pickle) {
                Ok(object) => Ok(object),
                Err(Failure::Own(error)) => Err(error),
                Err(Failure::CutOff(error)) => {
                    state.engine.delivery().open_interrupted(Ready::Pickled(pickle));
                    return Err(error);
                }
            },
            Err(error) => Err(error),
        };
        state.engine.opened(match opened {
            Ok(batch) => Ready::Batch(DetachedObject::new(batch)),
            Err(error) => Ready::Raised(error),
        })?;
        Ok(())
    }

    /// Unpickles. That runs the user's code, and it runs signal handlers, whose errors look like those of the batch.
    ///
    /// Handlers are not kept out: code that hangs here must stay interruptible at once, by whatever signal the program uses. So
    /// the user's code runs once, unless a handler cuts it off: then the message is kept, and the next call runs it again.
    fn load(&self, py: Python<'_>, pickle: &Pickled) -> Result<Py<PyAny>, Failure> {
        let loads = || {
            let arguments = (&pickle.payload, &pickle.objects).into_pyobject(py)?;
            call(self.callbacks.loads.bind(py), arguments).map(Bound::unbind)
        };
        loads().map_err(|error| match self.is_interrupt(py, &error) {
            Ok(false) => Failure::Own(error),
            Ok(true) => Failure::CutOff(error),
            // A handler has raised while this looked.
            Err(second) => Failure::CutOff(second),
        })
    }

    /// Whether a signal handler has raised an error, not the code that it interrupted.
    pub(super) fn is_interrupt(&self, py: Python<'_>, error: &PyErr) -> PyResult<bool> {
        // Not `value`, which has no traceback.
        let value = error.clone_ref(py).into_value(py);
        call(self.callbacks.is_interrupt.bind(py), (value,).into_pyobject(py)?)?.extract()
    }

    /// Unpickles a delivered result into `answer`; one that was cut off is for the next call.
    fn read_pickle(
        &self,
        py: Python<'_>,
        state: &mut State,
        answer: &Bound<'_, PyList>,
        pickle: Pickled,
    ) -> PyResult<()> {
        let code = if pickle.is_batch { code::BATCH } else { code::ERROR };
        match self.load(py, &pickle) {
            Ok(object) => self.deliver(answer, code, object),
            Err(Failure::Own(error)) => Err(error),
            Err(Failure::CutOff(error)) => {
                state.engine.delivery().on_event(Event::DecodeInterrupted(Ready::Pickled(pickle)));
                Err(error)
            }
        }
    }

    #[inline]
    pub(super) fn deliver<'py>(
        &self,
        answer: &Bound<'py, PyList>,
        code: u8,
        object: impl IntoPyObject<'py>,
    ) -> PyResult<()> {
        if code == code::BATCH {
            BATCHES.fetch_add(1, Ordering::Relaxed);
            self.handle.meter.add(Count::Batches, 1);
        }
        give(answer, code, object)
    }
}
