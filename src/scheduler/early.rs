//! The early epoch: the next epoch, whose tasks are sent before the current one has ended.

use super::reorder::TaskState;
use super::{DeliveryOrder, Scheduler};
use crate::error::{Error, Result};
use crate::id::TaskId;
use std::collections::VecDeque;

/// An epoch that began before the end of the current one. Its tasks count toward the same limits.
#[derive(Debug)]
pub(super) struct Early {
    /// The epoch's first task.
    pub first: TaskId,
    /// Number of the epoch's tasks that a living worker will answer.
    pub outstanding: u32,
    /// Number of the epoch's results that wait for delivery.
    pub ready: u32,
    /// The epoch's slots in delivery order. Without in-order delivery, only slots with results.
    pub queue: VecDeque<u32>,
    /// True once the sampler has ended in the early epoch.
    pub ended: bool,
    /// True if tasks of the current epoch have been lost since the early epoch began.
    pub loses_current: bool,
}

impl<T, R> Scheduler<T, R> {
    /// Returns true if a task of the next epoch can be submitted now: the sampler has ended in the current epoch, and
    /// there is room. At most `max_tasks` tasks are submitted early.
    pub fn may_be_early(&self) -> bool {
        let is_due = match &self.early {
            Some(early) => !early.ended && self.next_task.0 - early.first.0 < u64::from(self.max_tasks),
            None => self.ended && self.persistent && !self.replaces && self.refills == 0,
        };
        is_due && self.accepts()
    }

    /// Returns true if the next epoch has begun early.
    pub fn is_early(&self) -> bool {
        self.early.is_some()
    }

    /// Begins the next epoch early: later submissions belong to it. Returns its first task. Fails with [`Error::Usage`]
    /// if it has already begun, or if [`Scheduler::may_be_early`] returns false.
    pub fn begin_early(&mut self) -> Result<TaskId> {
        if self.early.is_some() || !self.may_be_early() {
            return Err(Error::usage("an epoch can begin early only once, and only after the sampler has ended"));
        }
        let first = self.next_task;
        self.early =
            Some(Early { first, outstanding: 0, ready: 0, queue: VecDeque::new(), ended: false, loses_current: false });
        Ok(first)
    }

    /// Returns true if the early epoch can become the current one: all results of the current epoch have been
    /// delivered, and none of its tasks has been lost.
    pub fn may_take_up(&self) -> bool {
        self.early.is_some()
            && self.reorder.front().is_none()
            && self.staged.is_none()
            && self.outstanding_now() == 0
            && self.raised.is_none()
            && !self.shut_down
            && (self.first_dead.is_none() || self.loses_only_early())
    }

    /// Makes the early epoch the current one. Fails with [`Error::Usage`] if [`Scheduler::may_take_up`] returns false.
    pub fn take_up(&mut self) -> Result<()> {
        let early = if self.may_take_up() { self.early.take() } else { None };
        let early = early.ok_or_else(|| Error::usage("no early epoch can become the current one"))?;
        // A shared queue has no loads.
        let tasks = if self.shared.is_some() { 0 } else { self.next_task.0 - early.first.0 };
        self.workers.take_up(tasks, self.first_dead.is_none());
        for slot in &early.queue {
            let entry = self.reorder.slot(*slot);
            // With a window, the load of a worker is the number of its unanswered tasks.
            if self.fills && self.shared.is_none() && matches!(entry.state, TaskState::Ready | TaskState::Failed) {
                self.workers.unload(entry.worker);
            }
            self.reorder.enqueue(*slot);
        }
        self.first_task = early.first;
        self.refills = 0;
        self.ended = false;
        self.clock.stop();
        Ok(())
    }

    /// Returns `outstanding` without the tasks of the early epoch.
    #[inline]
    pub(super) fn outstanding_now(&self) -> u32 {
        self.outstanding - self.early.as_ref().map_or(0, |early| early.outstanding)
    }

    /// Returns true if tasks have been lost, but only tasks of the early epoch, so that the current epoch can end.
    pub(super) fn loses_only_early(&self) -> bool {
        let Some(early) = &self.early else { return false };
        !early.loses_current && self.first_lost.is_some_and(|death| death.lost >= Some(early.first))
    }

    /// Returns the first task number after those of the current epoch.
    pub(super) fn end_of_tasks(&self) -> TaskId {
        self.early.as_ref().map_or(self.next_task, |early| early.first)
    }

    /// Counts a submitted task in the early epoch, to which it then belongs. Returns false if there is no early epoch.
    #[inline]
    pub(super) fn count_early_submission(&mut self, slot: u32) -> bool {
        let Some(early) = &mut self.early else { return false };
        early.outstanding += 1;
        if self.delivery == DeliveryOrder::InOrder {
            early.queue.push_back(slot);
        }
        true
    }

    /// Counts a result in the early epoch. Returns false if its task belongs to the current epoch.
    #[inline]
    pub(super) fn count_early_result(&mut self, task: TaskId, slot: u32) -> bool {
        let Some(early) = self.early.as_mut().filter(|early| task >= early.first) else { return false };
        early.outstanding -= 1;
        early.ready += 1;
        if self.delivery == DeliveryOrder::AsCompleted {
            early.queue.push_back(slot);
        }
        true
    }

    /// Counts a lost task in the epoch to which it belongs.
    pub(super) fn count_lost(&mut self, task: TaskId) {
        self.outstanding -= 1;
        match &mut self.early {
            Some(early) if task >= early.first => early.outstanding -= 1,
            Some(early) => early.loses_current = true,
            None => {}
        }
    }

    /// Abandons the early epoch: discards the results that have arrived. The other tasks become stale.
    pub(super) fn discard_early(&mut self) {
        for slot in self.early.take().map(|early| early.queue).into_iter().flatten() {
            if matches!(self.reorder.slot(slot).state, TaskState::Ready | TaskState::Failed) {
                self.discard(slot);
            }
        }
    }
}
