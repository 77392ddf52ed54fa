//! The transitions of the state machine: one method per event. `queue.rs` contains those of the shared queue, and
//! `restarts.rs` those of vacant workers.

use super::reorder::{NIL, TaskState};
use super::workers::{Life, Worker};
use super::{Action, Death, DeliveryOrder, Scheduler};
use crate::error::{Error, Result};
use crate::id::{TaskId, WorkerId};
use std::time::Duration;

impl<T, R> Scheduler<T, R> {
    /// Handles the result of an unanswered task: stores it for delivery, or discards it if the task is stale. Without a
    /// shared queue, the task must be its worker's oldest one.
    #[inline]
    pub(super) fn on_result(
        &mut self,
        now: Duration,
        worker: WorkerId,
        task: TaskId,
        result: R,
        bytes: u64,
        state: TaskState,
    ) -> Result<()> {
        if self.shut_down {
            // The shutdown has already returned the tag, but the caller must still free the memory of the result.
            self.effects.push_back(Action::Discard { task, tag: None, result: Some(result) });
            return Ok(());
        }
        let slot = self.take_answered(worker, task)?;
        // A result of the early epoch does not restart the timeout of the current one.
        if task < self.end_of_tasks() {
            self.clock.result_arrived(now);
        }
        if task < self.first_task {
            let (tag, _) = self.reorder.release(slot);
            self.effects.push_back(Action::Discard { task, tag, result: Some(result) });
            return Ok(());
        }
        self.outstanding -= 1;
        self.ready += 1;
        let is_early = self.count_early_result(task, slot);
        if self.fills && self.shared.is_none() && !is_early {
            self.workers.unload(worker.0);
        }
        if let Some(window) = &mut self.bytes {
            window.add(bytes);
        }
        let entry = self.reorder.slot_mut(slot);
        entry.state = state;
        entry.result = Some(result);
        entry.worker = worker.0;
        entry.bytes = bytes;
        if self.delivery == DeliveryOrder::AsCompleted && !is_early {
            self.reorder.enqueue(slot);
        }
        Ok(())
    }

    /// Handles the end of a worker's dataset. Drops the worker's remaining tasks, which the worker skips.
    pub(super) fn on_exhausted(&mut self, now: Duration, worker: WorkerId, task: TaskId) -> Result<()> {
        if self.shut_down {
            return Ok(());
        }
        if self.shared.is_some() {
            return Err(self.impossible(worker, task));
        }
        let stale = task < self.first_task;
        let slot = self.take_answered(worker, task)?;
        self.clock.result_arrived(now);
        self.drop_task(slot, stale);
        self.restarts.caught_up(worker);
        let entry = self.workers.at(worker.0);
        entry.unsent = NIL;
        let mut dropped = std::mem::replace(&mut entry.front, NIL);
        // Amortized O(1): each iteration is paid for by a submission.
        while dropped != NIL {
            let next = self.reorder.slot(dropped).next;
            self.drop_task(dropped, stale);
            dropped = next;
        }
        if stale {
            return Ok(());
        }
        self.refills += u32::from(!self.fills);
        if self.persistent {
            self.workers.deactivate(worker.0, Life::Exhausted);
        } else {
            self.workers.deactivate(worker.0, Life::Retired);
            self.effects.push_back(Action::Retire(worker));
        }
        Ok(())
    }

    /// Handles a worker's answer to a resume message. It is the worker's last answer in the abandoned epoch.
    pub(super) fn on_resumed(&mut self, now: Duration, worker: WorkerId) -> Result<()> {
        if self.shut_down {
            return Ok(());
        }
        let entry = self.entry(worker)?;
        let has_tasks = entry.front != NIL && self.shared.is_none();
        if entry.resumes == 0 || has_tasks || entry.vacant || entry.life == Life::Dead {
            return Err(Error::corrupt(format!(
                "worker {} cannot have resumed: it {}, and has {} unanswered resume messages and {} earlier unanswered tasks",
                worker.0,
                if entry.vacant || entry.life == Life::Dead { "has died" } else { "is alive" },
                entry.resumes,
                if has_tasks { "some" } else { "no" },
            )));
        }
        self.discard_fifo(worker);
        self.clock.result_arrived(now);
        let entry = self.workers.at(worker.0);
        entry.resumes -= 1;
        if entry.resumes > 0 {
            // Another reset followed the one that the worker has just answered. Send its message now.
            self.effects.push_back(Action::Resume(worker));
            return Ok(());
        }
        self.resuming -= 1;
        if self.resuming == 0 {
            self.drop_stale();
        }
        Ok(())
    }

    /// Handles the end of a worker's process. Ignores the exit of a retired worker, which is expected.
    pub(super) fn on_death(&mut self, worker: WorkerId, held: Vec<TaskId>) -> Result<()> {
        let entry = self.entry(worker)?;
        if self.shut_down || entry.vacant || matches!(entry.life, Life::Dead | Life::Retired) {
            return Ok(());
        }
        self.bind_held(worker, held)?;
        if self.replaces {
            self.on_vacancy(worker);
        } else {
            self.on_final_death(worker);
        }
        Ok(())
    }

    /// Makes a worker dead and its tasks lost.
    pub(super) fn on_final_death(&mut self, worker: WorkerId) {
        let Worker { front, resumes, .. } = *self.workers.at(worker.0);
        self.workers.deactivate(worker.0, Life::Dead);
        self.first_dead.get_or_insert(worker);
        // Before the worker has resumed, its tasks are stale, so nothing of this epoch is lost.
        if resumes == 0 && front != NIL {
            self.lose_fifo(worker, front);
        }
        if self.workers.active() == 0 {
            self.lose_queue();
        }
    }

    fn lose_fifo(&mut self, worker: WorkerId, front: u32) {
        self.note_loss(worker, self.reorder.slot(front).task);
        // The slots stay in the FIFO, so that `oldest_task_of` finds them.
        let mut lost = front;
        while lost != NIL {
            let slot = self.reorder.slot_mut(lost);
            slot.state = TaskState::Lost;
            lost = slot.next;
            let task = slot.task;
            self.count_lost(task);
        }
    }

    fn note_loss(&mut self, worker: WorkerId, task: TaskId) {
        if self.first_lost.is_none_or(|first| Some(task) < first.lost) {
            self.first_lost = Some(Death { worker, lost: Some(task) });
        }
    }

    /// Abandons the epoch, and begins another one: discards results that have arrived, makes outstanding tasks stale,
    /// and sends resume messages. Fails with [`Error::Usage`] unless the workers are persistent and each is alive or
    /// vacant.
    pub(super) fn on_epoch_reset(&mut self) -> Result<()> {
        if !self.persistent || self.shut_down || self.first_dead.is_some() {
            return Err(Error::usage("only persistent workers that are alive can begin another epoch"));
        }
        let count = self.workers.len() as u32;
        if let Some(slot) = self.staged.take() {
            self.discard(slot);
        }
        while let Some(slot) = self.reorder.pop() {
            match self.reorder.slot(slot).state {
                TaskState::Ready | TaskState::Failed => self.discard(slot),
                TaskState::Dropped => drop(self.reorder.release(slot)),
                // The task stays, as a stale one, in its worker's FIFO or among the unanswered tasks of the shared
                // queue.
                TaskState::Outstanding => {}
                TaskState::Lost | TaskState::Free => {
                    unreachable!("no worker is dead, and the queue contains no free slots")
                }
            }
        }
        self.discard_early();
        self.discard_unsent();
        self.workers.begin_epoch();
        let unanswered = self.unanswered();
        self.effects.extend(unanswered.into_iter().map(Action::Withdraw));
        for worker in 0..count {
            let entry = self.workers.at(worker);
            entry.resumes = entry.resumes.saturating_add(1);
            // A worker that has not answered the previous message gets the new one after its answer.
            if entry.resumes == 1 {
                self.resuming += 1;
                // The next process of a vacant worker begins with this epoch.
                if !entry.vacant {
                    self.effects.push_back(Action::Resume(WorkerId(worker)));
                }
            }
        }
        if let Some(bytes) = &mut self.bytes {
            bytes.begin_epoch();
        }
        self.first_task = self.next_task;
        self.outstanding = 0;
        self.ready = 0;
        self.refills = 0;
        self.ended = false;
        self.clock.stop();
        Ok(())
    }

    /// Discards all tasks, for a shutdown.
    pub(super) fn forget_all(&mut self) {
        let effects = &mut self.effects;
        self.reorder.clear(|task, tag, result| effects.push_back(Action::Discard { task, tag, result }));
        for worker in 0..self.workers.len() as u32 {
            let entry = self.workers.at(worker);
            (entry.front, entry.unsent) = (NIL, NIL);
        }
        self.forget_restarts();
        if let Some(shared) = &mut self.shared {
            shared.clear();
        }
        self.staged = None;
        self.early = None;
        self.outstanding = 0;
        self.ready = 0;
        self.refills = 0;
        self.resuming = 0;
        self.clock.stop();
    }

    #[inline]
    pub(super) fn entry(&self, worker: WorkerId) -> Result<&Worker> {
        let entry = self.workers.get(worker.index());
        entry.ok_or_else(|| Error::usage(format!("there is no worker {}", worker.0)))
    }

    /// Removes `task`, which the worker has answered, from the unanswered tasks, and returns its slot. Fails with
    /// [`Error::Corrupt`] if the worker cannot have answered it.
    #[inline]
    fn take_answered(&mut self, worker: WorkerId, task: TaskId) -> Result<u32> {
        if self.shared.is_none() {
            return self.take_oldest(worker, task);
        }
        let entry = self.entry(worker)?;
        if entry.front != NIL && self.is_oldest_of(worker, task) {
            return self.take_oldest(worker, task);
        }
        let lives = entry.life != Life::Dead && !entry.vacant;
        let slot = self.shared.as_mut().filter(|_| lives).and_then(|shared| shared.remove(task));
        slot.ok_or_else(|| self.impossible(worker, task))
    }

    /// Removes the front of the worker's FIFO and returns its slot. Fails with [`Error::Corrupt`] if the front is not
    /// `task`, or has not been sent.
    #[inline]
    fn take_oldest(&mut self, worker: WorkerId, task: TaskId) -> Result<u32> {
        let Worker { front, unsent, life, .. } = *self.entry(worker)?;
        if front == NIL || front == unsent || life == Life::Dead || self.reorder.slot(front).task != task {
            return Err(self.impossible(worker, task));
        }
        self.workers.at(worker.0).front = self.reorder.slot(front).next;
        Ok(front)
    }

    #[cold]
    pub(super) fn impossible(&self, worker: WorkerId, task: TaskId) -> Error {
        let held = match self.oldest_task_of(worker) {
            Some((held, _)) => format!("the oldest task that it holds is {}", held.0),
            None if self.shared.is_some() => "it cannot hold that task".to_string(),
            None => "it holds no task".to_string(),
        };
        Error::corrupt(format!("worker {} reports on task {}, but {held}", worker.0, task.0))
    }

    /// Drops a task that its exhausted worker will not answer. A slot in the reorder buffer stays there until `next`
    /// skips it.
    fn drop_task(&mut self, slot: u32, stale: bool) {
        let entry = self.reorder.slot_mut(slot);
        let task = entry.task;
        let tag = entry.tag.take();
        entry.state = TaskState::Dropped;
        self.effects.push_back(Action::Discard { task, tag, result: None });
        if stale || self.delivery == DeliveryOrder::AsCompleted {
            self.reorder.release(slot);
        }
        if !stale {
            self.outstanding -= 1;
        }
    }

    /// Releases a slot, and discards its tag and its result, if it has one.
    pub(super) fn discard(&mut self, slot: u32) {
        let task = self.reorder.slot(slot).task;
        let (tag, result) = self.reorder.release(slot);
        self.effects.push_back(Action::Discard { task, tag, result });
    }
}
