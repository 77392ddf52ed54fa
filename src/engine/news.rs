//! The engine's work outside of `next`: the wait for the workers' first snapshots.

use super::completions::Incoming;
use super::core::Engine;
use crate::error::Result;
use crate::id::WorkerId;

impl<T, B: Send + 'static, E> Engine<T, B, E> {
    /// Returns true while a first snapshot of this epoch is still to come: its worker lives, and nothing has ended the
    /// iterator.
    pub fn is_starting(&self) -> bool {
        let goes_on = self.snapshots && !self.has_ended() && self.delivery.is_sound();
        let state = self.handle.answers();
        let has_died = |worker| self.scheduler.is_dead(worker) || self.scheduler.is_vacant(worker);
        let is_awaited = |worker| !state.has_started(worker) && !has_died(WorkerId(worker));
        goes_on && (0..self.arena().geometry().workers).any(is_awaited)
    }

    /// Processes new events outside of `next`. Returns a tied result, which must be opened before others are taken:
    /// [`Step::Open`](super::Step::Open).
    pub fn take_news(&mut self) -> Result<Option<(Incoming, Option<B>)>> {
        self.handle.check_ours()?;
        if self.has_ended() || self.delivery.is_broken() {
            return Ok(None);
        }
        self.look()?;
        Ok(self.delivery.tied())
    }

    /// Returns true once no more results may be taken: the rings may belong to another iterator.
    fn has_ended(&self) -> bool {
        self.finished || self.handle.closing()
    }
}
