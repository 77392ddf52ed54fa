//! The replacement of workers. A vacant worker keeps its unanswered tasks, which are sent again to its next process.

use super::reorder::NIL;
use super::workers::{Life, Worker};
use super::{Death, DeliveryOrder, Scheduler};
use crate::error::{Error, Result};
use crate::id::{TaskId, WorkerId};
use std::collections::VecDeque;
use std::time::Duration;

/// A worker whose process has died and may be replaced.
#[derive(Debug)]
struct Vacancy {
    worker: WorkerId,
    /// The time to which the replacement is postponed; `None` if `next` may report the vacancy now.
    due: Option<Duration>,
}

/// The vacant workers, and the replaced ones that still have unsent tasks.
#[derive(Debug, Default)]
pub(super) struct Restarts {
    vacancies: Vec<Vacancy>,
    /// Replaced workers with unsent tasks, in the order of their replacement.
    behind: VecDeque<WorkerId>,
}

impl Restarts {
    /// Returns true if no worker is vacant and no task is unsent.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.vacancies.is_empty() && self.behind.is_empty()
    }

    /// Marks as due the vacancies that were postponed to `now` or earlier.
    #[inline]
    pub fn check(&mut self, now: Duration) {
        for vacancy in &mut self.vacancies {
            vacancy.due = vacancy.due.filter(|due| *due > now);
        }
    }

    /// Records that a worker no longer has unsent tasks.
    pub fn caught_up(&mut self, worker: WorkerId) {
        self.behind.retain(|behind| *behind != worker);
    }

    /// Removes a worker's vacancy. Fails with [`Error::Usage`] if the worker is not vacant.
    fn remove_vacancy(&mut self, worker: WorkerId) -> Result<()> {
        let index = self.vacancies.iter().position(|vacancy| vacancy.worker == worker);
        self.vacancies.remove(index.ok_or_else(|| not_vacant(worker))?);
        Ok(())
    }
}

fn not_vacant(worker: WorkerId) -> Error {
    Error::usage(format!("worker {} is not vacant: it is alive, or its death is final", worker.0))
}

impl<T, R> Scheduler<T, R> {
    /// Makes a worker vacant. Discards its tasks if they belong to an abandoned epoch.
    pub(super) fn on_vacancy(&mut self, worker: WorkerId) {
        self.restarts.caught_up(worker);
        let entry = self.workers.at(worker.0);
        entry.vacant = true;
        entry.unsent = entry.front;
        if entry.resumes > 0 {
            self.discard_fifo(worker);
        }
        self.restarts.vacancies.push(Vacancy { worker, due: None });
    }

    /// Handles [`Event::Postponed`](super::Event::Postponed).
    pub(super) fn on_postponed(&mut self, worker: WorkerId, until: Duration) -> Result<()> {
        if self.shut_down {
            return Ok(());
        }
        let vacancy = self.restarts.vacancies.iter_mut().find(|vacancy| vacancy.worker == worker);
        vacancy.ok_or_else(|| not_vacant(worker))?.due = Some(until);
        Ok(())
    }

    /// Handles the start of a vacant worker's next process. The process begins with the current epoch, so it needs no
    /// resume message.
    pub(super) fn on_replaced(&mut self, worker: WorkerId) -> Result<()> {
        if self.shut_down {
            return Ok(());
        }
        self.restarts.remove_vacancy(worker)?;
        let entry = self.workers.at(worker.0);
        entry.vacant = false;
        if entry.unsent != NIL {
            self.restarts.behind.push_back(worker);
        }
        if std::mem::take(&mut entry.resumes) > 0 {
            self.resuming -= 1;
            if self.resuming == 0 {
                self.drop_stale();
            }
        }
        Ok(())
    }

    /// Makes the death of a vacant worker final.
    pub(super) fn on_given_up(&mut self, worker: WorkerId) -> Result<()> {
        if self.shut_down {
            return Ok(());
        }
        self.restarts.remove_vacancy(worker)?;
        self.workers.at(worker.0).vacant = false;
        self.on_final_death(worker);
        Ok(())
    }

    /// Returns the first vacancy that is due and whose worker the epoch needs.
    pub(super) fn due_vacancy(&self) -> Option<Death> {
        let due = self.restarts.vacancies.iter().filter(|vacancy| vacancy.due.is_none());
        let worker = due.map(|vacancy| vacancy.worker).find(|worker| self.needs(*worker))?;
        Some(Death { worker, lost: self.oldest_task_of(worker).map(|(task, _)| task) })
    }

    /// Returns the earliest time at which a postponed vacancy becomes due. Ignores workers that the epoch does not
    /// need.
    pub(super) fn next_due(&self) -> Option<Duration> {
        let needed = self.restarts.vacancies.iter().filter(|vacancy| self.needs(vacancy.worker));
        needed.filter_map(|vacancy| vacancy.due).min()
    }

    /// Returns true if the epoch needs a new process for a vacant worker.
    fn needs(&self, worker: WorkerId) -> bool {
        let Some(&Worker { front, life, .. }) = self.workers.get(worker.index()) else { return false };
        if self.resuming > 0 {
            return true;
        }
        let bound = (front != NIL).then(|| self.reorder.slot(front).task);
        // Any worker may take a task of the shared queue, so such a task counts for every vacant worker.
        let shared = self.shared.as_ref().and_then(|shared| shared.tasks().next());
        let oldest = bound.into_iter().chain(shared.map(|(task, _)| task)).min();
        if self.first_dead.is_none() {
            return oldest.is_some() || life == Life::Active && !self.ended;
        }
        // After a final death, `next` delivers only the results before the first lost task.
        let precedes = |task| self.first_lost.is_none_or(|death| Some(task) < death.lost);
        self.delivery == DeliveryOrder::InOrder && oldest.is_some_and(precedes)
    }

    /// Returns true if any replaced worker still has unsent tasks.
    #[inline]
    pub(super) fn is_behind(&self) -> bool {
        !self.restarts.behind.is_empty()
    }

    /// Returns the task that [`Decision::Resend`](super::Decision::Resend) asks to send, with its worker and tag.
    pub fn unsent(&self) -> Option<(WorkerId, TaskId, &T)> {
        let worker = *self.restarts.behind.front()?;
        let slot = self.reorder.slot(self.workers.get(worker.index())?.unsent);
        slot.tag.as_ref().map(|tag| (worker, slot.task, tag))
    }

    /// Records that the task of [`Scheduler::unsent`] has been sent.
    pub fn resent(&mut self) {
        let Some(&worker) = self.restarts.behind.front() else { return };
        let entry = self.workers.at(worker.0);
        entry.unsent = self.reorder.slot(entry.unsent).next;
        if entry.unsent == NIL {
            self.restarts.behind.pop_front();
        }
    }

    /// Returns true if the worker's process has died and may be replaced.
    pub fn is_vacant(&self, worker: WorkerId) -> bool {
        self.workers.get(worker.index()).is_some_and(|worker| worker.vacant)
    }

    /// Returns the unanswered tasks that are bound to a worker, oldest first. Tasks of a shared queue become bound when
    /// the worker that holds them dies.
    pub fn tasks_of(&self, worker: WorkerId) -> impl Iterator<Item = (TaskId, &T)> {
        let slot = |slot: u32| (slot != NIL).then(|| self.reorder.slot(slot));
        let first = slot(self.workers.get(worker.index()).map_or(NIL, |worker| worker.front));
        let slots = std::iter::successors(first, move |last| slot(last.next));
        slots.filter_map(|slot| Some((slot.task, slot.tag.as_ref()?)))
    }

    /// Returns true if `task` is the first task of [`Scheduler::tasks_of`].
    #[inline]
    pub fn is_oldest_of(&self, worker: WorkerId, task: TaskId) -> bool {
        let front = self.workers.get(worker.index()).map_or(NIL, |worker| worker.front);
        front != NIL && self.reorder.slot(front).task == task
    }

    /// Inserts a slot into a worker's FIFO, which is sorted by task number.
    pub(super) fn bind(&mut self, worker: u32, slot: u32) {
        let task = self.reorder.slot(slot).task;
        let Worker { front, .. } = *self.workers.at(worker);
        let (mut before, mut after) = (NIL, front);
        while after != NIL && self.reorder.slot(after).task < task {
            (before, after) = (after, self.reorder.slot(after).next);
        }
        let entry = self.reorder.slot_mut(slot);
        (entry.worker, entry.next) = (worker, after);
        if before == NIL {
            self.workers.at(worker).front = slot;
        } else {
            self.reorder.slot_mut(before).next = slot;
        }
        if after == NIL {
            self.workers.at(worker).back = slot;
        }
    }

    /// Discards all tasks in a worker's FIFO. They must be stale tasks that the worker will not answer.
    pub(super) fn discard_fifo(&mut self, worker: WorkerId) {
        let entry = self.workers.at(worker.0);
        entry.unsent = NIL;
        let mut discarded = std::mem::replace(&mut entry.front, NIL);
        while discarded != NIL {
            let next = self.reorder.slot(discarded).next;
            self.discard(discarded);
            discarded = next;
        }
    }

    /// Discards the tasks of an abandoned epoch that no living process has: those of vacant workers, and unsent ones.
    pub(super) fn discard_unsent(&mut self) {
        for vacancy in 0..self.restarts.vacancies.len() {
            self.discard_fifo(self.restarts.vacancies[vacancy].worker);
        }
        for worker in std::mem::take(&mut self.restarts.behind) {
            let Worker { front, unsent, .. } = *self.workers.at(worker.0);
            // Keep the tasks before the first unsent one, because the process will answer them.
            let (mut kept, mut last) = (NIL, front);
            while last != unsent {
                (kept, last) = (last, self.reorder.slot(last).next);
            }
            self.workers.at(worker.0).front = unsent;
            self.discard_fifo(worker);
            if kept != NIL {
                self.reorder.slot_mut(kept).next = NIL;
                let entry = self.workers.at(worker.0);
                (entry.front, entry.back) = (front, kept);
            }
        }
    }

    /// Forgets all vacancies and unsent tasks. Call it when the iterator ends.
    pub(super) fn forget_restarts(&mut self) {
        self.restarts = Restarts::default();
    }
}
