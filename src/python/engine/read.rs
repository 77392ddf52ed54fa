//! Conversion of results to Python objects.

use std::sync::atomic::Ordering;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use super::call::Call;
use super::raised::Raised;
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
use crate::python::functions::BATCHES;
use crate::wire::ResultKind;

/// A result that is decoded as far as possible without running Python code.
enum Read {
    Batch(Py<PyAny>),
    Pickled(Pickled),
}

impl<'py> Call<'_, 'py> {
    /// Answers with a result. Returns an error only if a signal handler raises it; the next call then delivers the
    /// result.
    #[inline]
    pub(super) fn read(&mut self, incoming: &Incoming) -> PyResult<()> {
        match self.read_message(incoming) {
            Ok(Read::Batch(object)) => self.deliver(code::BATCH, object),
            Ok(Read::Pickled(pickle)) => self.read_pickle(pickle),
            Err(error) => self.deliver(code::ERROR, Raised::new(self.py, error)),
        }
    }

    /// Answers with a result that was decoded or unpickled earlier. Errors are as for [`Call::read`].
    pub(super) fn read_ready(&mut self, ready: Ready) -> PyResult<()> {
        match ready {
            Ready::Batch(batch) => self.deliver(code::BATCH, batch.take()),
            Ready::Raised(error) => self.deliver(code::ERROR, Raised::new(self.py, error)),
            Ready::Error(wrapper) => self.deliver(code::ERROR, wrapper.take()),
            Ready::Pickled(pickle) => self.read_pickle(pickle),
        }
    }

    /// Unpickles a tied result now, while the worker that it depends on still lives. An error takes the batch's place.
    /// An error that a signal handler raises is returned at once, and the next call tries again.
    pub(super) fn open(&mut self, incoming: &Incoming, ready: Option<Ready>) -> PyResult<()> {
        let read = match ready {
            Some(Ready::Pickled(pickle)) => Ok(Read::Pickled(pickle)),
            _ => self.read_message(incoming),
        };
        let opened = match read {
            Ok(Read::Batch(object)) => Ok(object),
            Ok(Read::Pickled(pickle)) => match self.load(&pickle) {
                Ok(loaded) => loaded,
                Err(interrupt) => {
                    self.state.engine.delivery().open_interrupted(Ready::Pickled(pickle));
                    return Err(interrupt);
                }
            },
            Err(error) => Err(error),
        };
        if opened.is_err() && self.state.engine.lost_tied()? {
            return Ok(());
        }
        self.state.engine.opened(match opened {
            Ok(batch) => Ready::Batch(DetachedObject::new(batch)),
            Err(error) => Ready::Raised(error),
        })?;
        Ok(())
    }

    #[inline]
    fn read_message(&mut self, incoming: &Incoming) -> PyResult<Read> {
        let py = self.py;
        let buffer = std::mem::take(&mut self.state.buffer);
        let mut message = Message::open(self.state.engine.arena(), incoming, buffer)?;
        let read = if incoming.entry.kind == ResultKind::Error {
            let payload = PyBytes::new(py, message.payload()).unbind();
            Read::Pickled(Pickled { payload, objects: PyList::empty(py).unbind(), is_batch: false })
        } else {
            let (payload, leaves) = message.parts();
            let object = codec::decode(py, Bridge::get(py)?, payload, leaves)?;
            if incoming.entry.kind == ResultKind::Plain {
                Read::Batch(object)
            } else {
                let (payload, objects) = codec::pickle_of(object.bind(py))?;
                let (payload, objects) = (payload.unbind(), objects.unbind());
                Read::Pickled(Pickled { payload, objects, is_batch: incoming.is_batch() })
            }
        };
        self.state.buffer = message.into_buffer();
        codec::shrink(&mut self.state.buffer);
        Ok(read)
    }

    /// Unpickles a result. An inner error takes the batch's place. An outer error was raised by a signal handler, and
    /// the batch is intact.
    ///
    /// Unpickling runs user code. Signals are not deferred meanwhile, because it must be possible to interrupt user
    /// code that hangs. The code runs once, unless a handler interrupts it: the caller then keeps the pickle, and the
    /// next call runs the code again.
    fn load(&self, pickle: &Pickled) -> PyResult<PyResult<Py<PyAny>>> {
        let loads = || {
            let arguments = (&pickle.payload, &pickle.objects).into_pyobject(self.py)?;
            call(self.callbacks.loads.bind(self.py), arguments).map(Bound::unbind)
        };
        match loads() {
            // If the check itself fails, a handler has raised that error, too.
            Err(error) if self.is_interrupt(&error)? => Err(error),
            loaded => Ok(loaded),
        }
    }

    /// Returns true if `error` was raised by a signal handler rather than by the code that the handler interrupted.
    pub(super) fn is_interrupt(&self, error: &PyErr) -> PyResult<bool> {
        // Do not use `error.value`, because that exception has no traceback.
        let value = error.clone_ref(self.py).into_value(self.py);
        let arguments = (value,).into_pyobject(self.py)?;
        call(self.callbacks.is_interrupt.bind(self.py), arguments)?.extract()
    }

    /// Unpickles a result and answers with it. If a signal handler interrupts the unpickling, keeps the pickle for the
    /// next call.
    fn read_pickle(&mut self, pickle: Pickled) -> PyResult<()> {
        let code = if pickle.is_batch { code::BATCH } else { code::ERROR };
        match self.load(&pickle) {
            Ok(Ok(loaded)) => self.deliver(code, loaded),
            Ok(Err(error)) => self.deliver(code::ERROR, Raised::new(self.py, error)),
            Err(interrupt) => {
                self.state.engine.delivery().on_event(Event::DecodeInterrupted(Ready::Pickled(pickle)));
                Err(interrupt)
            }
        }
    }

    #[inline]
    fn deliver(&self, code: u8, object: impl IntoPyObject<'py>) -> PyResult<()> {
        if code == code::BATCH {
            BATCHES.fetch_add(1, Ordering::Relaxed);
            self.handle.meter.add(Count::Batches, 1);
        } else {
            self.handle.answers().positions.failed();
        }
        self.give(code, object)
    }
}
