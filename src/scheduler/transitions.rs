//! The transitions of the state machine: one method per event, and the ends of `next`.

use super::reorder::{NIL, State};
use super::workers::{Life, Worker};
use super::{Action, Death, Decision, DeliveryOrder, Scheduler};
use crate::error::{Error, Result};
use crate::id::{TaskId, WorkerId};
use std::time::Duration;

impl<T, R> Scheduler<T, R> {
    /// Whether any task can be submitted.
    #[inline]
    pub(super) fn accepts(&self) -> bool {
        self.outstanding < self.max_tasks
            && self.outstanding + self.ready < self.window
            && self.resuming == 0
            && self.first_dead.is_none()
            && !self.shut_down
    }

    /// Stores the result of its worker's oldest task, and refuses any other.
    #[inline]
    pub(super) fn on_result(
        &mut self,
        now: Duration,
        worker: WorkerId,
        task: TaskId,
        result: R,
        state: State,
    ) -> Result<()> {
        if self.shut_down {
            // The shutdown has returned the tag, but the result still names memory to free.
            self.effects.push_back(Action::Discard { task, tag: None, result: Some(result) });
            return Ok(());
        }
        let stale = self.entry(worker)?.resumes > 0;
        let slot = self.take_oldest(worker, task)?;
        self.clock.result_arrived(now);
        if stale {
            let (tag, _) = self.reorder.release(slot);
            self.effects.push_back(Action::Discard { task, tag, result: Some(result) });
            return Ok(());
        }
        self.outstanding -= 1;
        self.ready += 1;
        let entry = self.reorder.slot_mut(slot);
        entry.state = state;
        entry.result = Some(result);
        if self.delivery == DeliveryOrder::AsCompleted {
            self.reorder.enqueue(slot);
        }
        Ok(())
    }

    /// Handles the end of a worker's dataset. The worker skips its remaining tasks.
    pub(super) fn on_exhausted(&mut self, now: Duration, worker: WorkerId, task: TaskId) -> Result<()> {
        if self.shut_down {
            return Ok(());
        }
        let stale = self.entry(worker)?.resumes > 0;
        let slot = self.take_oldest(worker, task)?;
        self.clock.result_arrived(now);
        self.drop_task(slot, stale);
        let entry = self.workers.at(worker.0);
        let mut rest = std::mem::replace(&mut entry.front, NIL);
        // Amortised O(1): each iteration is paid for by a submission.
        while rest != NIL {
            let next = self.reorder.slot(rest).next;
            self.drop_task(rest, stale);
            rest = next;
        }
        if stale {
            return Ok(());
        }
        self.refills += 1;
        if self.persistent {
            self.workers.deactivate(worker.0, Life::Exhausted);
        } else {
            self.workers.deactivate(worker.0, Life::Retired);
            self.effects.push_back(Action::Retire(worker));
        }
        Ok(())
    }

    /// Handles a worker's last message of the abandoned epoch.
    pub(super) fn on_resumed(&mut self, now: Duration, worker: WorkerId) -> Result<()> {
        if self.shut_down {
            return Ok(());
        }
        let entry = self.entry(worker)?;
        if entry.resumes == 0 || entry.front != NIL || entry.life == Life::Dead {
            return Err(Error::corrupt(format!(
                "worker {} says that it has resumed, with {} resume messages unanswered and {} before them",
                worker.0,
                entry.resumes,
                if entry.front == NIL { "no task" } else { "tasks" },
            )));
        }
        self.workers.at(worker.0).resumes -= 1;
        self.resuming -= 1;
        self.clock.result_arrived(now);
        Ok(())
    }

    /// Handles the end of a worker's process. Exits of retired workers are expected and ignored.
    pub(super) fn on_death(&mut self, worker: WorkerId) -> Result<()> {
        if self.shut_down || matches!(self.entry(worker)?.life, Life::Dead | Life::Retired) {
            return Ok(());
        }
        let Worker { front, resumes, .. } = *self.entry(worker)?;
        self.workers.deactivate(worker.0, Life::Dead);
        self.first_dead.get_or_insert(worker);
        // Stale tasks are no loss.
        if resumes > 0 || front == NIL {
            return Ok(());
        }
        let lost = self.reorder.slot(front).task;
        if self.first_lost.is_none_or(|first| Some(lost) < first.lost) {
            self.first_lost = Some(Death { worker, lost: Some(lost) });
        }
        // The slots stay in the FIFO for `oldest_task_of`.
        let mut rest = front;
        while rest != NIL {
            let slot = self.reorder.slot_mut(rest);
            slot.state = State::Lost;
            rest = slot.next;
            self.outstanding -= 1;
        }
        Ok(())
    }

    /// Abandons the epoch: discards results that have arrived, and makes outstanding tasks stale.
    pub(super) fn on_epoch_reset(&mut self) -> Result<()> {
        if !self.persistent || self.shut_down || self.first_dead.is_some() {
            return Err(Error::usage("an epoch is reset only for persistent workers that are alive"));
        }
        let count = self.workers.len() as u32;
        if let Some(slot) = self.staged.take() {
            self.discard(slot);
        }
        while let Some(slot) = self.reorder.pop() {
            match self.reorder.slot(slot).state {
                State::Ready | State::Failed => self.discard(slot),
                State::Dropped => drop(self.reorder.release(slot)),
                // Stays in its worker's FIFO as a stale task.
                State::Outstanding => {}
                State::Lost | State::Free => {
                    unreachable!("no worker has died, and the queue holds slots in use")
                }
            }
        }
        self.workers.begin_epoch();
        for worker in 0..count {
            // A worker that has not answered the last message has received no task since: one answer serves both.
            if self.workers.at(worker).resumes == 0 {
                self.workers.at(worker).resumes = 1;
                self.resuming += 1;
                self.effects.push_back(Action::Resume(WorkerId(worker)));
            }
        }
        self.first_task = self.next_task;
        self.outstanding = 0;
        self.ready = 0;
        self.refills = 0;
        self.clock.stop();
        Ok(())
    }

    /// Discards all tasks.
    pub(super) fn forget_all(&mut self) {
        let effects = &mut self.effects;
        self.reorder.clear(|task, tag, result| effects.push_back(Action::Discard { task, tag, result }));
        for worker in 0..self.workers.len() as u32 {
            self.workers.at(worker).front = NIL;
        }
        self.staged = None;
        self.outstanding = 0;
        self.ready = 0;
        self.refills = 0;
        self.resuming = 0;
        self.clock.stop();
    }

    /// Delivers the result in `slot`.
    #[inline]
    pub(super) fn deliver(&mut self, slot: u32) -> Decision<T, R> {
        let entry = self.reorder.slot(slot);
        let (task, worker, failed) = (entry.task, WorkerId(entry.worker), entry.state == State::Failed);
        match self.reorder.release(slot) {
            (Some(tag), Some(result)) if failed => self.answer(Decision::Raise { task, worker, tag, result }),
            (Some(tag), Some(result)) => self.answer(Decision::Deliver { task, worker, tag, result }),
            _ => unreachable!("a slot that is ready holds its tag and its result"),
        }
    }

    /// Raises a death, now and at each later call.
    pub(super) fn raise_death(&mut self) -> Decision<T, R> {
        self.raised = self.death();
        match self.raised {
            Some(death) => self.answer(Decision::Dead(death)),
            None => unreachable!("a death is raised only after a worker has died"),
        }
    }

    /// Waits, or reports that the timeout has expired.
    pub(super) fn wait(&mut self) -> Decision<T, R> {
        debug_assert!(self.outstanding + self.resuming > 0, "nothing can end this wait");
        if self.clock.expired {
            return self.answer(Decision::TimedOut);
        }
        Decision::Wait(self.clock.deadline)
    }

    /// Answers `next`, which stops the timeout.
    #[inline]
    pub(super) fn answer(&mut self, step: Decision<T, R>) -> Decision<T, R> {
        self.clock.stop();
        step
    }

    #[inline]
    fn entry(&self, worker: WorkerId) -> Result<&Worker> {
        let entry = self.workers.get(worker.index());
        entry.ok_or_else(|| Error::usage(format!("there is no worker {}", worker.0)))
    }

    /// Pops the front of the worker's FIFO, which must be `task`.
    #[inline]
    fn take_oldest(&mut self, worker: WorkerId, task: TaskId) -> Result<u32> {
        let Worker { front, life, .. } = *self.entry(worker)?;
        if front == NIL || life == Life::Dead || self.reorder.slot(front).task != task {
            return Err(self.impossible(worker, task));
        }
        self.workers.at(worker.0).front = self.reorder.slot(front).next;
        Ok(front)
    }

    #[cold]
    fn impossible(&self, worker: WorkerId, task: TaskId) -> Error {
        let held = match self.oldest_task_of(worker) {
            Some((held, _)) => format!("the oldest task that it holds is {}", held.0),
            None => "it holds no task".to_string(),
        };
        Error::corrupt(format!("worker {} reports on task {}, but {held}", worker.0, task.0))
    }

    /// Drops a task that its exhausted worker will not answer. `next` skips its place in the reorder buffer.
    fn drop_task(&mut self, slot: u32, stale: bool) {
        let entry = self.reorder.slot_mut(slot);
        let task = entry.task;
        let tag = entry.tag.take();
        entry.state = State::Dropped;
        self.effects.push_back(Action::Discard { task, tag, result: None });
        if stale || self.delivery == DeliveryOrder::AsCompleted {
            self.reorder.release(slot);
        }
        if !stale {
            self.outstanding -= 1;
        }
    }

    /// Discards a result that has arrived.
    fn discard(&mut self, slot: u32) {
        let task = self.reorder.slot(slot).task;
        let (tag, result) = self.reorder.release(slot);
        self.effects.push_back(Action::Discard { task, tag, result });
    }
}
