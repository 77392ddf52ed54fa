//! Results as Python objects.

use std::sync::atomic::Ordering;

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use super::state::State;
use super::{BATCHES, PyEngine};
use crate::codec;
use crate::codec::prepare::Ready;
use crate::engine::Incoming;
use crate::engine::completions::Message;
use crate::interop::detached::DetachedObject;
use crate::interop::exit_guard::call;
use crate::interop::tensor::Bridge;
use crate::metrics::Count;
use crate::python::code;
use crate::wire::ResultKind;

/// So often an unpickling that has failed is tried again.
const RELOADS: usize = 4;

/// A result that has to be unpickled.
struct Pickled {
    payload: Py<PyBytes>,
    /// What stands beside it.
    objects: Py<PyList>,
    is_batch: bool,
}

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

    /// Unpickles a result that asks something of its worker, which may leave afterwards. An error stands in the batch's place;
    /// what a signal handler has raised comes at once, and the batch is kept.
    pub(super) fn open(&self, py: Python<'_>, state: &mut State, incoming: &Incoming) -> PyResult<()> {
        let mut interrupt = Ok(());
        let opened = match read_message(py, state, incoming) {
            Ok(Read::Batch(object)) => Ok(object),
            Ok(Read::Pickled(pickle)) => match self.load(py, &pickle) {
                Err(error) => {
                    let again = self.load_again(py, &pickle);
                    if again.is_ok() || !error.is_instance_of::<PyException>(py) {
                        interrupt = Err(error);
                        again
                    } else {
                        Err(error)
                    }
                }
                loaded => loaded,
            },
            Err(error) => Err(error),
        };
        state.engine.opened(match opened {
            Ok(batch) => Ready::Batch(DetachedObject::new(batch)),
            Err(error) => Ready::Raised(error),
        })?;
        interrupt
    }

    fn load(&self, py: Python<'_>, pickle: &Pickled) -> PyResult<Py<PyAny>> {
        let arguments = (&pickle.payload, &pickle.objects).into_pyobject(py)?;
        call(self.callbacks.loads.bind(py), arguments).map(Bound::unbind)
    }

    /// Unpickling runs Python code, and signal handlers in it. What a handler raises there looks like an error of the batch, but
    /// does not come again: so it is tried again, and where it then succeeds the batch is kept.
    fn load_again(&self, py: Python<'_>, pickle: &Pickled) -> PyResult<Py<PyAny>> {
        let mut again = self.load(py, pickle);
        for _ in 1..RELOADS {
            if again.is_ok() {
                break;
            }
            again = self.load(py, pickle);
        }
        again
    }

    /// Unpickles a result; one that comes at the second try only is for the next call.
    fn read_pickle(
        &self,
        py: Python<'_>,
        state: &mut State,
        answer: &Bound<'_, PyList>,
        pickle: Pickled,
    ) -> PyResult<()> {
        let code = if pickle.is_batch { code::BATCH } else { code::ERROR };
        let error = match self.load(py, &pickle) {
            Ok(object) => return self.deliver(answer, code, object),
            Err(error) => error,
        };
        if let Ok(object) = self.load_again(py, &pickle) {
            state.unread = Some((code, object));
        }
        Err(error)
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
