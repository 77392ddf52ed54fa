//! The transitions that only a shared queue has: tasks whose worker is unknown until they are answered or lost.

use super::Scheduler;
use super::reorder::{NIL, State};
use super::workers::Life;
use crate::error::{Error, Result};
use crate::id::{TaskId, WorkerId};

impl<T, R> Scheduler<T, R> {
    /// Handles a stale task that the shared queue has given back.
    pub(super) fn on_withdrawn(&mut self, task: TaskId) -> Result<()> {
        if self.shut_down {
            return Ok(());
        }
        if task >= self.first_task || self.tag_of(task).is_none() {
            return Err(Error::corrupt(format!(
                "the shared queue gives back task {}, which is not stale",
                task.0
            )));
        }
        self.withdraw(task);
        Ok(())
    }

    fn withdraw(&mut self, task: TaskId) {
        if let Some(slot) = self.shared.as_mut().and_then(|shared| shared.remove(task)) {
            self.discard(slot);
        }
    }

    /// Handles a death at the shared queue: the task that the worker held is lost. Those that still wait in the queue are
    /// lost only with the last worker.
    pub(super) fn on_death_at_queue(&mut self, worker: WorkerId, held: Option<TaskId>) -> Result<()> {
        if let Some(task) = held.filter(|task| self.tag_of(*task).is_none()) {
            return Err(self.impossible(worker, task));
        }
        self.workers.deactivate(worker.0, Life::Dead);
        self.first_dead.get_or_insert(worker);
        // Stale tasks are no loss.
        if let Some(task) = held.filter(|task| *task >= self.first_task) {
            self.note_loss(worker, task);
            self.workers.at(worker.0).front = self.lose(task);
        }
        if self.workers.active() == 0 {
            let left = self.unanswered();
            left.into_iter().for_each(|task| _ = self.lose(task));
        }
        Ok(())
    }

    /// The unanswered tasks of this epoch, with a shared queue.
    pub(super) fn unanswered(&self) -> Vec<TaskId> {
        let tasks = self.shared.iter().flat_map(|shared| shared.tasks()).map(|(task, _)| task);
        tasks.filter(|task| *task >= self.first_task).collect()
    }

    /// Marks a task of the shared queue as lost, and returns its slot.
    fn lose(&mut self, task: TaskId) -> u32 {
        let Some(slot) = self.shared.as_mut().and_then(|shared| shared.remove(task)) else { return NIL };
        self.reorder.slot_mut(slot).state = State::Lost;
        self.outstanding -= 1;
        slot
    }

    /// Drops the stale tasks that are left once all workers have resumed: a worker took each from the queue, and will not
    /// answer it any more.
    pub(super) fn drop_stale(&mut self) {
        while let Some((task, _)) = self.shared.as_ref().and_then(|shared| shared.tasks().next()) {
            self.withdraw(task);
        }
    }
}
