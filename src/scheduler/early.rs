//! The early epoch: the next epoch, whose tasks are sent while results of the current one wait for delivery.

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
    /// The epoch's slots in delivery order: all of them if results are delivered in order, otherwise those with
    /// results.
    pub queue: VecDeque<u32>,
    /// True once the sampler has ended in this epoch.
    pub ended: bool,
    /// True if tasks of the current epoch have been lost by a death since this epoch began.
    pub loses_current: bool,
}

impl<T, R> Scheduler<T, R> {
    /// Returns true if a task of the next epoch can be submitted now, because the sampler has ended in the current
    /// epoch and there is room. At most `max_tasks` tasks are submitted early.
    pub fn may_be_early(&self) -> bool {
        let has_begun = match &self.early {
            Some(early) => !early.ended && self.next_task.0 - early.first.0 < u64::from(self.max_tasks),
            None => self.ended && self.persistent && !self.replaces && self.refills == 0,
        };
        has_begun && self.accepts()
    }

    /// Returns true if the next epoch has begun early.
    pub fn is_early(&self) -> bool {
        self.early.is_some()
    }

    /// Begins the next epoch early: later submissions belong to it. Returns its first task. Fails with [`Error::Usage`]
    /// if it has already begun, or unless [`Scheduler::may_be_early`] returns true.
    pub fn begin_early(&mut self) -> Result<TaskId> {
        if self.early.is_some() || !self.may_be_early() {
            return Err(Error::usage("an epoch begins early once, after the end of the sampler"));
        }
        let first = self.next_task;
        self.early =
            Some(Early { first, outstanding: 0, ready: 0, queue: VecDeque::new(), ended: false, loses_current: false });
        Ok(first)
    }

    /// Returns true if the early epoch can become the current one, because all results of the current epoch have been
    /// delivered and none of its tasks has been lost by a death.
    pub fn may_take_up(&self) -> bool {
        self.early.is_some()
            && self.reorder.front().is_none()
            && self.staged.is_none()
            && self.outstanding_now() == 0
            && self.raised.is_none()
            && !self.shut_down
            && (self.first_dead.is_none() || self.loses_only_early())
    }

    /// Makes the early epoch the current one. Fails with [`Error::Usage`] unless [`Scheduler::may_take_up`] returns
    /// true.
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

    /// Returns the number of tasks of the current epoch, without the early one, that a living worker will answer.
    #[inline]
    pub(super) fn outstanding_now(&self) -> u32 {
        self.outstanding - self.early.as_ref().map_or(0, |early| early.outstanding)
    }

    /// Returns true if deaths have lost tasks, but only of the early epoch, so that the current epoch is not affected.
    pub(super) fn loses_only_early(&self) -> bool {
        let Some(early) = &self.early else { return false };
        !early.loses_current && self.first_lost.is_some_and(|death| death.lost >= Some(early.first))
    }

    /// Returns the end of the current epoch's task numbers, which is exclusive.
    pub(super) fn end_of_tasks(&self) -> TaskId {
        self.early.as_ref().map_or(self.next_task, |early| early.first)
    }

    /// Counts a submitted task if there is an early epoch, to which the task then belongs. Returns false if there is
    /// none.
    #[inline]
    pub(super) fn submitted_early(&mut self, slot: u32) -> bool {
        let Some(early) = &mut self.early else { return false };
        early.outstanding += 1;
        if self.delivery == DeliveryOrder::InOrder {
            early.queue.push_back(slot);
        }
        true
    }

    /// Counts a result if its task belongs to the early epoch. Returns false if it belongs to the current epoch.
    #[inline]
    pub(super) fn answered_early(&mut self, task: TaskId, slot: u32) -> bool {
        let Some(early) = self.early.as_mut().filter(|early| task >= early.first) else { return false };
        early.outstanding -= 1;
        early.ready += 1;
        if self.delivery == DeliveryOrder::AsCompleted {
            early.queue.push_back(slot);
        }
        true
    }

    /// Counts a task as lost, in the epoch to which it belongs.
    pub(super) fn lost_task(&mut self, task: TaskId) {
        self.outstanding -= 1;
        match &mut self.early {
            Some(early) if task >= early.first => early.outstanding -= 1,
            Some(early) => early.loses_current = true,
            None => {}
        }
    }

    /// Abandons the early epoch: discards its results that have arrived. Its other tasks become stale.
    pub(super) fn discard_early(&mut self) {
        for slot in self.early.take().map(|early| early.queue).into_iter().flatten() {
            if matches!(self.reorder.slot(slot).state, TaskState::Ready | TaskState::Failed) {
                self.discard(slot);
            }
        }
    }
}
