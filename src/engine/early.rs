//! Early epochs: the next epoch begins before the current one has ended.

use super::core::Engine;
use crate::error::{Error, Result};

impl<T, B: Send + 'static, E> Engine<T, B, E> {
    /// Returns true if a task of the next epoch can be submitted now, because the sampler has ended and there is room.
    pub fn may_be_early(&self) -> bool {
        !self.finished && !self.snapshots && self.scheduler.may_be_early()
    }

    /// Begins the next epoch early: workers get `message` after their current tasks, and later submissions belong to
    /// the next epoch. Returns false if a ring or the memory has no room for the messages. Call it at most once per
    /// epoch, and only if [`Engine::may_be_early`] returns true.
    pub fn begin_early(&mut self, message: &[u8]) -> Result<bool> {
        let first_task = self.scheduler.first_task().0 + self.scheduler.dispatched();
        let entries = match self.outbox.early_entries(first_task, message) {
            Ok(Some(entries)) => entries,
            Ok(None) | Err(Error::NoMemory { .. } | Error::RegionFull { .. }) => return Ok(false),
            Err(error) => return Err(error),
        };
        self.scheduler.begin_early()?;
        self.times.show_early(first_task);
        let pushed = self.outbox.push_early(&entries);
        self.sticky(pushed)?;
        Ok(true)
    }

    /// Returns true if the early epoch can become the current one.
    pub fn may_take_up(&self) -> bool {
        !self.delivery.is_broken() && self.scheduler.may_take_up()
    }

    /// Makes the early epoch the current one. Call it only if [`Engine::may_take_up`] returns true.
    pub fn take_up(&mut self) -> Result<()> {
        self.times.tick();
        self.scheduler.take_up()?;
        self.mark_epoch();
        self.handle.answers().begin_epoch();
        self.liveness.begin_epoch();
        self.times.show_epoch(self.scheduler.first_task().0);
        Ok(())
    }
}
