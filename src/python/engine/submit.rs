//! Index batches on their way from the sampler to the workers.

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use super::call::Call;
use super::state::State;
use crate::codec;
use crate::engine::delivery::Event;
use crate::error::Error;
use crate::interop::exit_guard::{call, next_item};
use crate::shm::alloc::retry_while_reserved;
use crate::wire::TaskKind;

impl<'py> Call<'_, 'py> {
    /// Carries out `Step::Submit`. If the sampler raises an `Exception`, a later call raises it; any other error, such
    /// as an interrupt, is raised at once. Pending signals are handled before the draw, because a handler that raises
    /// inside a generator, such as that of a BatchSampler, ends the generator.
    #[inline]
    pub(super) fn refill(&mut self) -> PyResult<()> {
        let interrupt = self.py.check_signals();
        let drawn = if interrupt.is_ok() { self.draw() } else { Ok(()) };
        self.state.engine.sampler_ends();
        let (event, answer) = match (interrupt, drawn) {
            (Ok(()), Ok(())) => (Event::IndexDrawn, Ok(())),
            (Ok(()), Err(error)) if error.is_instance_of::<PyException>(self.py) => {
                (Event::DrawFailed(error.into_value(self.py)), Ok(()))
            }
            (Err(error), _) | (_, Err(error)) => (Event::DrawInterrupted, Err(error)),
        };
        self.state.engine.delivery().on_event(event);
        answer
    }

    /// Draws one more index batch from the sampler and sends it, or reports the end of the sampler. An index batch that
    /// an earlier call could not send comes first. If the next epoch has begun early, sends a task of that epoch
    /// instead.
    #[inline]
    pub(super) fn draw(&mut self) -> PyResult<()> {
        let index = match self.state.engine.delivery().take_unsent() {
            Some(index) => Some(index.into_bound(self.py)),
            // The sampler has ended.
            None if self.state.early.is_some() => return self.draw_early(),
            None => next_item(self.next_index)?,
        };
        match index {
            Some(index) => self.submit(index),
            None => self.sampler_has_ended(),
        }
    }

    /// Reports the end of the sampler, and continues with the next epoch if that may begin early.
    #[cold]
    pub(super) fn sampler_has_ended(&mut self) -> PyResult<()> {
        self.state.engine.sampler_ended()?;
        self.draw_early()
    }

    /// Encodes an index batch into the payload buffer, or returns its pickle if it cannot be encoded.
    #[inline]
    fn encode(&mut self, index: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        self.state.payload.clear();
        if codec::encode_indices(index, &mut self.state.payload) {
            return Ok(None);
        }
        let dump_index = self.callbacks.dump_index.bind(self.py);
        Ok(Some(call(dump_index, (index,).into_pyobject(self.py)?)?.cast_into::<PyBytes>()?))
    }

    /// Sends a task again, to the process that now has the worker's slot. After an error, the next call tries again.
    pub(super) fn resend(&mut self) -> PyResult<()> {
        let py = self.py;
        py.check_signals()?;
        let Some(index) = self.state.engine.unsent().map(|index| index.clone_ref(py)) else { return Ok(()) };
        let pickle = self.encode(index.bind(py))?;
        let State { engine, payload, .. } = &mut *self.state;
        let (kind, bytes) = encoded(&pickle, payload);
        retry_while_reserved(|| engine.resend(kind, bytes), |time| py.detach(|| std::thread::sleep(time)))?;
        codec::shrink(payload);
        Ok(())
    }

    /// Sends an index batch to the worker that the scheduler picks, or to the shared queue. Drops the index batch if no
    /// worker takes tasks any more, as torch does.
    #[inline]
    pub(super) fn submit(&mut self, index: Bound<'py, PyAny>) -> PyResult<()> {
        let pickle = match self.encode(&index) {
            Err(error) if self.is_interrupt(&error).unwrap_or(true) => {
                self.state.engine.delivery().on_event(Event::IndexUnsent(index.unbind()));
                return Err(error);
            }
            pickle => pickle?,
        };
        self.send(index, pickle)
    }

    /// Sends an index batch, encoded as `pickle` or, if that is `None`, as the contents of the payload buffer.
    #[inline]
    pub(super) fn send(&mut self, index: Bound<'py, PyAny>, pickle: Option<Bound<'py, PyBytes>>) -> PyResult<()> {
        let py = self.py;
        // Keep a copy of the list: the task may have to be sent again, and the sampler may reuse the list by then.
        let index = match index.cast_exact::<PyList>() {
            Ok(list) if self.state.engine.restarts() => list.get_slice(0, list.len()).into_any(),
            _ => index,
        };
        let State { engine, payload, .. } = &mut *self.state;
        let (kind, bytes) = encoded(&pickle, payload);
        let pause = |time| py.detach(|| std::thread::sleep(time));
        let sent = retry_while_reserved(|| engine.submit(index.clone().unbind(), kind, bytes), pause);
        if let Err(Error::NoMemory { .. } | Error::RegionFull { .. }) = sent {
            engine.delivery().on_event(Event::IndexUnsent(index.unbind()));
        }
        codec::shrink(payload);
        sent?;
        Ok(())
    }
}

/// Returns the kind and the bytes of an encoded index batch.
#[inline]
fn encoded<'a>(pickle: &'a Option<Bound<'_, PyBytes>>, payload: &'a [u8]) -> (TaskKind, &'a [u8]) {
    match pickle {
        None => (TaskKind::Plain, payload),
        Some(pickle) => (TaskKind::Pickle, pickle.as_bytes()),
    }
}
