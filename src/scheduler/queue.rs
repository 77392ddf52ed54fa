//! The transitions that only a shared queue has. The worker of a task is unknown until it answers the task or dies.

use super::Scheduler;
use super::reorder::TaskState;
use crate::error::{Error, Result};
use crate::id::{TaskId, WorkerId};

impl<T, R> Scheduler<T, R> {
    /// Handles a stale task that the shared queue has given back.
    pub(super) fn on_withdrawn(&mut self, task: TaskId) -> Result<()> {
        if self.shut_down {
            return Ok(());
        }
        if task >= self.first_task || self.tag_of(task).is_none() {
            return Err(Error::corrupt(format!("the shared queue gave back task {}, which is not stale", task.0)));
        }
        self.withdraw(task);
        Ok(())
    }

    fn withdraw(&mut self, task: TaskId) {
        if let Some(slot) = self.shared.as_mut().and_then(|shared| shared.remove(task)) {
            self.discard(slot);
        }
    }

    /// Binds `held`, the tasks that a worker held when it died, to that worker. Ignores tasks of an earlier epoch.
    /// Fails with [`Error::Corrupt`] if a task is not among the unanswered ones. Without a shared queue, `held` must be
    /// empty.
    pub(super) fn bind_held(&mut self, worker: WorkerId, held: Vec<TaskId>) -> Result<()> {
        let held: Vec<_> = held.into_iter().filter(|task| *task >= self.first_task).collect();
        if let Some(task) = held.iter().find(|task| self.tag_of(**task).is_none()) {
            return Err(self.impossible(worker, *task));
        }
        for task in held {
            if let Some(slot) = self.shared.as_mut().and_then(|shared| shared.remove(task)) {
                self.bind(worker.0, slot);
            }
        }
        Ok(())
    }

    /// Marks the tasks that wait in the shared queue as lost. Call it when the last worker has died.
    pub(super) fn lose_queue(&mut self) {
        for task in self.unanswered() {
            if let Some(slot) = self.shared.as_mut().and_then(|shared| shared.remove(task)) {
                self.reorder.slot_mut(slot).state = TaskState::Lost;
                self.count_lost(task);
            }
        }
    }

    /// Returns the unanswered tasks of this epoch if there is a shared queue; otherwise none.
    pub(super) fn unanswered(&self) -> Vec<TaskId> {
        let tasks = self.shared.iter().flat_map(|shared| shared.tasks()).map(|(task, _)| task);
        tasks.filter(|task| *task >= self.first_task).collect()
    }

    /// Discards the stale tasks that remain in the table after all workers have resumed. Each was taken from the queue
    /// by a worker that will no longer answer it.
    pub(super) fn drop_stale(&mut self) {
        while let Some((task, _)) = self.shared.as_ref().and_then(|shared| shared.tasks().next()) {
            self.withdraw(task);
        }
    }
}
