//! The early start of the next epoch: its tasks are sent before the current epoch has ended, with predicted index
//! batches. When the epoch begins, its index batches are drawn from the sampler as usual. The results of the tasks that
//! were sent early are used only if every draw equals its prediction.

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::call::Call;
use super::state::Early;
use crate::codec;
use crate::error::Error;
use crate::interop::exit_guard::{call, next_item};
use crate::wire::TaskKind;

/// The draws made so far to check the predictions of an early epoch.
#[derive(Default)]
pub(super) struct Drawn<'py> {
    /// Number of draws, including one that failed or reached the end of the sampler.
    pub(super) draws: usize,
    /// True if the early epoch has become the current one, because every draw was as predicted.
    taken_up: bool,
    /// The index batches that were drawn as predicted, with their encoded bytes. They are sent again if a later draw
    /// differs from its prediction.
    matched: Vec<(Py<PyAny>, Vec<u8>)>,
    /// The result of the first draw that was not as predicted: an index batch, the end of the sampler, or an error.
    mismatch: Option<PyResult<Option<Bound<'py, PyAny>>>>,
}

impl Drawn<'_> {
    pub(super) fn taken_up(&self) -> bool {
        self.taken_up
    }
}

impl<'py> Call<'_, 'py> {
    /// Sends a predicted task of the next epoch. If that epoch has not begun early yet, begins it first. Does nothing
    /// if the epoch cannot be predicted or there is no room.
    pub(super) fn draw_early(&mut self) -> PyResult<()> {
        let Some(predictor) = self.predictor.filter(|_| self.state.engine.may_be_early()) else {
            return Ok(());
        };
        if self.state.early.is_none() {
            let begin = predictor.getattr("begin")?;
            let Some(message) = call(&begin, PyTuple::empty(self.py))?.extract::<Option<Vec<u8>>>()? else {
                return Ok(());
            };
            if !self.state.engine.begin_early(&message)? {
                return Ok(());
            }
            self.state.early = Some(Early { message, tasks: Vec::new() });
        }
        let index = next_item(predictor)?;
        let mut bytes = Vec::new();
        let Some(index) = index.filter(|index| codec::encode_indices(index, &mut bytes)) else {
            return Ok(self.state.engine.sampler_ended()?);
        };
        let index = index.unbind();
        match self.state.engine.submit(index.clone_ref(self.py), TaskKind::Plain, &bytes) {
            Ok(Some(_)) => self
                .state
                .early
                .iter_mut()
                .for_each(|early| early.tasks.push((index.clone_ref(self.py), bytes.clone()))),
            // The index batch can be dropped, because it is drawn from the sampler when the epoch begins.
            Ok(None) | Err(Error::NoMemory { .. } | Error::RegionFull { .. }) => self.state.engine.sampler_ended()?,
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Draws one index batch from the sampler for each predicted task that was sent, until a draw is not as predicted.
    /// Draws nothing if the message or first worker of the epoch is not the predicted one, or if the early epoch cannot
    /// become the current one. If all draws are as predicted, the early epoch becomes the current one. Otherwise, the
    /// caller must pass the result to [`Call::send_drawn`], which sends the index batches that were drawn.
    pub(super) fn draw_predicted(&mut self, early: Early, message: &[u8], first_worker: u32) -> PyResult<Drawn<'py>> {
        let mut drawn = Drawn::default();
        if early.message != message || first_worker != 0 || !self.state.engine.may_take_up() {
            return Ok(drawn);
        }
        for (index, predicted) in early.tasks {
            let item = self.py.check_signals().and_then(|()| next_item(self.next_index));
            drawn.draws += 1;
            if !matches!(&item, Ok(Some(item)) if self.is_encoded_as(item, &predicted)) {
                drawn.mismatch = Some(item);
                return Ok(drawn);
            }
            drawn.matched.push((index, predicted));
        }
        self.state.engine.take_up()?;
        drawn.matched.clear();
        drawn.taken_up = true;
        Ok(drawn)
    }

    fn is_encoded_as(&mut self, index: &Bound<'py, PyAny>, bytes: &[u8]) -> bool {
        self.state.payload.clear();
        codec::encode_indices(index, &mut self.state.payload) && self.state.payload == bytes
    }

    /// Sends the index batches that [`Call::draw_predicted`] drew, including the one that was not as predicted. If the
    /// sampler ended instead, reports the end; if it raised an error, returns that error.
    pub(super) fn send_drawn(&mut self, drawn: Drawn<'py>) -> PyResult<()> {
        for (index, bytes) in drawn.matched {
            self.state.payload = bytes;
            self.send(index.into_bound(self.py), None)?;
        }
        match drawn.mismatch {
            None => Ok(()),
            Some(Ok(Some(index))) => self.submit(index),
            Some(Ok(None)) => self.sampler_has_ended(),
            Some(Err(error)) => Err(error),
        }
    }
}
