//! The wait, outside of `next`, for the workers' first snapshots of an epoch.

use super::completions::Incoming;
use super::core::Engine;
use crate::error::Result;
use crate::id::WorkerId;

impl<T, B: Send + 'static, E> Engine<T, B, E> {
    /// Returns true while a live worker has not yet sent its first snapshot of this epoch. Returns false without
    /// snapshots, or if the iterator has ended or failed.
    pub fn is_starting(&self) -> bool {
        let is_active = self.snapshots && !self.has_ended() && self.delivery.is_sound();
        let answers = self.handle.answers();
        let has_died = |worker| self.scheduler.is_dead(worker) || self.scheduler.is_vacant(worker);
        let is_awaited = |worker| !answers.has_started(worker) && !has_died(WorkerId(worker));
        is_active && (0..self.arena().geometry().workers).any(is_awaited)
    }

    /// Processes new events outside of `next`. If this returns a tied result, open it as for
    /// [`Step::Open`](super::Step::Open) before the next call.
    pub fn process_outside_next(&mut self) -> Result<Option<(Incoming, Option<B>)>> {
        self.handle.check_ours()?;
        if self.has_ended() || self.delivery.is_broken() {
            return Ok(None);
        }
        self.process_events()?;
        Ok(self.delivery.tied())
    }

    /// Returns true once the iterator is closed. After that, no results may be taken, because the rings may belong to
    /// another iterator.
    fn has_ended(&self) -> bool {
        self.finished || self.handle.closing()
    }
}
