//! Starts the next epoch early: sends its tasks before the current epoch has ended. The index batches are predicted.
//! When the epoch begins, they are drawn from the sampler all the same, and the tasks that were sent count only if the
//! draws equal the prediction.

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::call::Call;
use super::state::Early;
use crate::codec;
use crate::error::Error;
use crate::interop::exit_guard::{call, next_item};
use crate::wire::TaskKind;

/// What has been drawn so far at the beginning of an epoch.
#[derive(Default)]
pub(super) struct Drawn<'py> {
    /// Number of draws.
    pub(super) draws: usize,
    /// True if the early epoch has become the current one, because every draw was as predicted.
    taken_up: bool,
    /// Index batches that were drawn as predicted, with their bytes. Sent again if a later draw differs.
    again: Vec<(Py<PyAny>, Vec<u8>)>,
    /// The first draw that was not as predicted.
    last: Option<PyResult<Option<Bound<'py, PyAny>>>>,
}

impl Drawn<'_> {
    pub(super) fn taken_up(&self) -> bool {
        self.taken_up
    }
}

impl<'py> Call<'_, 'py> {
    /// Sends a task of the next epoch, if it can be predicted and there is room.
    pub(super) fn draw_early(&mut self) -> PyResult<()> {
        let Some(foresight) = self.foresight.filter(|_| self.state.engine.may_be_early()) else {
            return Ok(());
        };
        if self.state.early.is_none() {
            let begin = foresight.getattr("begin")?;
            let Some(message) = call(&begin, PyTuple::empty(self.py))?.extract::<Option<Vec<u8>>>()? else {
                return Ok(());
            };
            if !self.state.engine.begin_early(&message)? {
                return Ok(());
            }
            self.state.early = Some(Early { message, tasks: Vec::new() });
        }
        let index = next_item(foresight)?;
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
            // The epoch draws it again when it begins.
            Ok(None) | Err(Error::NoMemory { .. } | Error::RegionFull { .. }) => self.state.engine.sampler_ended()?,
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Draws the predicted index batches from the sampler. If all are as predicted, the early epoch becomes the
    /// current one; otherwise [`Call::send_drawn`] sends what was drawn.
    pub(super) fn draw_foreseen(&mut self, early: Early, message: &[u8], first_worker: u32) -> PyResult<Drawn<'py>> {
        let mut drawn = Drawn::default();
        if early.message != message || first_worker != 0 || !self.state.engine.may_take_up() {
            return Ok(drawn);
        }
        for (index, foreseen) in early.tasks {
            let item = self.py.check_signals().and_then(|()| next_item(self.next_index));
            drawn.draws += 1;
            if !matches!(&item, Ok(Some(item)) if self.is_encoded_as(item, &foreseen)) {
                drawn.last = Some(item);
                return Ok(drawn);
            }
            drawn.again.push((index, foreseen));
        }
        self.state.engine.take_up()?;
        drawn.again.clear();
        drawn.taken_up = true;
        Ok(drawn)
    }

    fn is_encoded_as(&mut self, index: &Bound<'py, PyAny>, bytes: &[u8]) -> bool {
        self.state.payload.clear();
        codec::encode_indices(index, &mut self.state.payload) && self.state.payload == bytes
    }

    /// Sends what [`Call::draw_foreseen`] drew, if it was not as predicted.
    pub(super) fn send_drawn(&mut self, drawn: Drawn<'py>) -> PyResult<()> {
        for (index, bytes) in drawn.again {
            self.state.payload = bytes;
            self.send(index.into_bound(self.py), None)?;
        }
        match drawn.last {
            None => Ok(()),
            Some(Ok(Some(index))) => self.submit(index),
            Some(Ok(None)) => self.sampler_has_ended(),
            Some(Err(error)) => Err(error),
        }
    }
}
