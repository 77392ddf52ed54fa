//! Indices: out of the sampler, to the workers.

use pyo3::exceptions::{PyException, PyStopIteration};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyIterator, PyTuple};

use super::PyEngine;
use super::state::State;
use crate::codec;
use crate::engine::delivery::Event;
use crate::error::Error;
use crate::interop::exit_guard::{call, next_of};
use crate::shm::alloc::settle;
use crate::wire::TaskKind;

/// The sampler's next index; `None` at its end. `next_index` is an iterator, or a function to be called.
fn sampled<'py>(next_index: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    if let Ok(iterator) = next_index.cast::<PyIterator>() {
        return next_of(iterator);
    }
    match call(next_index, PyTuple::empty(next_index.py())) {
        Ok(index) => Ok(Some(index)),
        Err(error) if error.is_instance_of::<PyStopIteration>(next_index.py()) => Ok(None),
        Err(error) => Err(error),
    }
}

impl PyEngine {
    /// Answers `Step::Submit`. An error of the sampler is for a later call; what is no `Exception` (an interrupt) is raised at
    /// once. Signals are looked for before: one that has come would otherwise find the sampler, and a handler that raises there
    /// is the end of a generator, such as a BatchSampler's.
    #[inline]
    pub(super) fn refill(
        &self,
        py: Python<'_>,
        state: &mut State,
        next_index: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let interrupt = py.check_signals();
        let drawn = if interrupt.is_ok() { self.draw(py, state, next_index) } else { Ok(()) };
        state.engine.sampler_ends();
        let (event, answer) = match (interrupt, drawn) {
            (Ok(()), Ok(())) => (Event::IndexDrawn, Ok(())),
            (Ok(()), Err(error)) if error.is_instance_of::<PyException>(py) => {
                (Event::DrawFailed(error), Ok(()))
            }
            (Err(error), _) | (_, Err(error)) => (Event::DrawInterrupted, Err(error)),
        };
        state.engine.delivery().on_event(event);
        answer
    }

    /// Takes one more index of the sampler, if there is one, and sends it.
    #[inline]
    pub(super) fn draw(
        &self,
        py: Python<'_>,
        state: &mut State,
        next_index: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let index = match state.engine.delivery().take_unsent() {
            Some(index) => Some(index.into_bound(py)),
            None => sampled(next_index)?,
        };
        match index {
            Some(index) => self.submit(py, state, index),
            None => Ok(()),
        }
    }

    /// Sends an index batch to the worker whose turn it is. When none takes tasks any more it is dropped, as in torch.
    #[inline]
    fn submit(&self, py: Python<'_>, state: &mut State, index: Bound<'_, PyAny>) -> PyResult<()> {
        let State { engine, payload, .. } = state;
        payload.clear();
        let pause = |time| py.detach(|| std::thread::sleep(time));
        let mut send =
            |kind, bytes: &[u8]| settle(|| engine.submit(index.clone().unbind(), kind, bytes), pause);
        let sent = if codec::encode_indices(py, &index, payload) {
            send(TaskKind::Plain, payload)
        } else {
            let pickle = match call(self.callbacks.dump_index.bind(py), (&index,).into_pyobject(py)?) {
                Err(error) if self.is_interrupt(py, &error).unwrap_or(true) => {
                    engine.delivery().on_event(Event::IndexUnsent(index.unbind()));
                    return Err(error);
                }
                pickle => pickle?,
            };
            let pickle = pickle.cast::<PyBytes>()?;
            send(TaskKind::Pickle, pickle.as_bytes())
        };
        if let Err(Error::NoMemory { .. } | Error::RegionFull { .. }) = sent {
            engine.delivery().on_event(Event::IndexUnsent(index.unbind()));
        }
        codec::shrink(payload);
        sent?;
        Ok(())
    }
}
