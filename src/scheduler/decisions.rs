//! The conditions that `next` checks, and its answers.

use super::reorder::TaskState;
use super::{Decision, Scheduler};
use crate::id::WorkerId;

impl<T, R> Scheduler<T, R> {
    /// Returns true if the limits and the state of the iterator allow one more submission. Does not check whether a
    /// worker can take the task.
    #[inline]
    pub(super) fn accepts(&self) -> bool {
        self.outstanding < self.max_tasks
            && self.outstanding + self.ready < self.window
            && self.resuming == 0
            && self.first_dead.is_none()
            && !self.shut_down
            && self.shared.as_ref().is_none_or(|shared| shared.span() < self.span)
            && self.bytes.as_ref().is_none_or(|bytes| {
                // A single task is admitted even if its result may exceed the limit.
                self.outstanding + self.ready == 0 || bytes.admits(self.outstanding)
            })
    }

    /// Returns true if one more index batch fits into the window and a worker can take it, so that the sampler is not
    /// asked for a batch that no worker takes.
    #[inline]
    pub(super) fn has_room(&self) -> bool {
        if self.early.is_some() {
            return self.may_be_early();
        }
        !self.ended && self.accepts() && (self.shared.is_some() || self.workers.any_open())
    }

    /// Removes dropped tasks from the front of the queue. Then, if the result of the front task has arrived, removes
    /// that task from the queue and returns its slot.
    #[inline]
    pub(super) fn take_ready(&mut self) -> Option<u32> {
        while let Some(front) = self.reorder.front() {
            let slot = self.reorder.slot(front);
            match slot.state {
                TaskState::Ready | TaskState::Failed => {
                    if !self.fills {
                        self.workers.unload(slot.worker);
                    }
                    if let Some(bytes) = &mut self.bytes {
                        bytes.remove(slot.bytes);
                    }
                    self.reorder.pop();
                    self.ready -= 1;
                    return Some(front);
                }
                TaskState::Outstanding | TaskState::Lost => return None,
                TaskState::Dropped => {
                    self.reorder.pop();
                    self.reorder.release(front);
                }
                TaskState::Free => unreachable!("the queue contains no free slots"),
            }
        }
        None
    }

    /// Releases `slot` and returns the decision that delivers its result.
    #[inline]
    pub(super) fn deliver(&mut self, slot: u32) -> Decision<T, R> {
        let entry = self.reorder.slot(slot);
        let (task, worker, failed) = (entry.task, WorkerId(entry.worker), entry.state == TaskState::Failed);
        match self.reorder.release(slot) {
            (Some(tag), Some(result)) if failed => self.answer(Decision::Raise { task, worker, tag, result }),
            (Some(tag), Some(result)) => self.answer(Decision::Deliver { task, worker, tag, result }),
            _ => unreachable!("a slot to deliver has a tag and a result"),
        }
    }

    /// Makes this call of `next` and every later one raise the death.
    pub(super) fn raise_death(&mut self) -> Decision<T, R> {
        self.raised = self.death();
        match self.raised {
            Some(death) => self.answer(Decision::Dead(death)),
            None => unreachable!("a death is raised only after a worker has died"),
        }
    }

    /// Returns [`Decision::Wait`], or [`Decision::TimedOut`] if the timeout has expired.
    pub(super) fn wait(&mut self) -> Decision<T, R> {
        debug_assert!(self.outstanding + self.resuming > 0, "nothing can end this wait");
        if self.clock.expired {
            return self.answer(Decision::TimedOut);
        }
        Decision::Wait(self.deadline())
    }

    /// Stops the timeout and returns `decision`, which must not be [`Decision::Wait`].
    #[inline]
    pub(super) fn answer(&mut self, decision: Decision<T, R>) -> Decision<T, R> {
        self.clock.stop();
        decision
    }
}
