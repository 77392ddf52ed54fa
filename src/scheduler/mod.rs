//! The scheduler, which decides which worker gets each task and what `next` returns.
//!
//! It is a state machine without threads, clock, channels or shared memory. The caller reports events
//! ([`Scheduler::on_event`]), performs effects ([`Scheduler::poll`]), submits index batches ([`Scheduler::submit`]) and
//! asks what to do next ([`Scheduler::next`]). These calls cost amortized O(1). `README.md` in this folder describes
//! the settings, the states and the relation to torch's algorithm, and shows why no task is lost and no wait is
//! endless.

mod bitmap;
mod clock;
mod decisions;
mod early;
mod queue;
mod reorder;
mod restarts;
#[cfg(test)]
mod tests;
mod transitions;
mod types;
mod unanswered;
mod window;
mod workers;

pub use types::{Action, Death, Decision, DeliveryOrder, Dispatch, Event, Placement, Settings, Window};

use crate::config::{TASKS_MAX, WORKERS_MAX};
use crate::error::{Error, Result};
use crate::id::{TaskId, WorkerId};
use clock::Clock;
use early::Early;
use reorder::{NIL, Reorder, TaskState};
use restarts::Restarts;
use std::collections::VecDeque;
use std::time::Duration;
use unanswered::Unanswered;
use window::Bytes;
use workers::{Life, Workers};

/// The scheduler. `T` is the type of the caller's tag on a task (the index batch as a Python object), and `R` that of a
/// result. Each tag is returned exactly once: by a refused `submit`, with a result, or in an [`Action::Discard`]. The
/// scheduler itself never drops a tag, because dropping one could run the user's code.
#[derive(Debug)]
pub struct Scheduler<T, R> {
    workers: Workers,
    reorder: Reorder<T, R>,
    /// The unanswered tasks, if there is a shared queue. Other policies have a FIFO for each worker.
    shared: Option<Unanswered>,
    clock: Clock,
    restarts: Restarts,
    /// Effects that `poll` has not returned yet.
    effects: VecDeque<Action<T, R>>,
    next_task: TaskId,
    /// The first task of this epoch.
    first_task: TaskId,
    /// Number of tasks, of this epoch and of the early one, that a living worker or the next process of a vacant worker
    /// will answer.
    outstanding: u32,
    /// Number of tasks, of this epoch and of the early one, whose results wait for delivery.
    ready: u32,
    /// The next epoch, if it has begun before the end of this one.
    early: Option<Early>,
    /// Maximum of `outstanding`.
    max_tasks: u32,
    /// Maximum of `outstanding + ready`.
    window: u32,
    /// The byte limit of the window, if it has one.
    bytes: Option<Bytes>,
    /// With a shared queue, the maximum number of tasks from the oldest unanswered one to the newest; see
    /// [`Settings::queue_span`].
    span: usize,
    /// True if `next` fills a window. Otherwise it asks for one index batch per delivery, as torch does.
    fills: bool,
    /// True once the sampler has ended in this epoch.
    ended: bool,
    /// The slot whose result is delivered as soon as `next` has asked for index batches.
    staged: Option<u32>,
    /// Number of index batches still to be submitted for exhausted workers, one for each; 0 with a window.
    refills: u32,
    /// Number of workers with unanswered resume messages.
    resuming: u32,
    /// The first worker whose death was final.
    first_dead: Option<WorkerId>,
    /// The lost task with the lowest number, and its worker.
    first_lost: Option<Death>,
    /// The death that `next` raises from now on.
    raised: Option<Death>,
    shut_down: bool,
    delivery: DeliveryOrder,
    persistent: bool,
    /// True if a death makes a worker vacant instead of dead.
    replaces: bool,
}

impl<T, R> Scheduler<T, R> {
    /// Creates a scheduler for newly started workers. Fails with [`Error::Usage`] if the settings exceed its limits.
    pub fn new(settings: Settings) -> Result<Self> {
        let (max_tasks, span, fills) = (settings.max_tasks(), settings.queue_span(), settings.fills());
        let Settings { workers, prefetch_factor, window, dispatch, delivery, persistent, timeout, restarts: replaces } =
            settings;
        let Window { batches, bytes } = window.unwrap_or(Window { batches: max_tasks, bytes: None });
        let limit = TASKS_MAX as usize;
        let fits = workers <= WORKERS_MAX as usize && max_tasks <= limit && (1..=limit).contains(&batches);
        if max_tasks == 0 || !fits {
            return Err(Error::usage(format!(
                "a scheduler needs 1 to {WORKERS_MAX} workers, 1 to {TASKS_MAX} tasks, and a window of 1 to \
                 {TASKS_MAX} batches, but got {workers} workers with a prefetch_factor of {prefetch_factor}, and a \
                 window of {batches} batches"
            )));
        }
        Ok(Self {
            workers: Workers::new(workers, max_tasks as u32, dispatch),
            reorder: Reorder::new(batches),
            shared: (dispatch == Dispatch::SharedQueue).then(Unanswered::default),
            clock: Clock::new(timeout),
            restarts: Restarts::default(),
            effects: VecDeque::new(),
            next_task: TaskId(0),
            first_task: TaskId(0),
            outstanding: 0,
            ready: 0,
            early: None,
            max_tasks: max_tasks as u32,
            window: batches as u32,
            bytes: bytes.map(Bytes::new),
            span,
            fills,
            ended: false,
            staged: None,
            refills: 0,
            resuming: 0,
            first_dead: None,
            first_lost: None,
            raised: None,
            shut_down: false,
            delivery,
            persistent,
            replaces,
        })
    }

    /// Dispatches a task with the tag `tag`. The caller sends the task to the returned [`Placement`]. Call it at the
    /// start of an epoch while [`Scheduler::primes`] returns true, and once per [`Decision::Submit`].
    ///
    /// Changes nothing and returns the tag as the error if no task can be submitted: all workers are exhausted or at
    /// their share, a limit is reached, resume messages are unanswered, a worker is dead, or the iterator has been shut
    /// down.
    #[inline]
    pub fn submit(&mut self, tag: T) -> std::result::Result<(TaskId, Placement), T> {
        if !self.accepts() {
            return Err(tag);
        }
        let task = self.next_task;
        let (slot, placement) = if let Some(shared) = &mut self.shared {
            let slot = self.reorder.insert(task, NIL, tag);
            shared.push(task, slot);
            (slot, Placement::Queue)
        } else {
            let picked = match &self.early {
                Some(early) => Some(((task.0 - early.first.0) % self.workers.len() as u64) as u32),
                None => self.workers.pick(),
            };
            let Some(worker) = picked else { return Err(tag) };
            let slot = self.reorder.insert(task, worker, tag);
            let entry = self.workers.at(worker);
            let back = std::mem::replace(&mut entry.back, slot);
            if entry.front == NIL {
                entry.front = slot;
            } else {
                self.reorder.slot_mut(back).next = slot;
            }
            if entry.vacant || entry.unsent != NIL {
                if entry.unsent == NIL {
                    entry.unsent = slot;
                }
                (slot, Placement::Later)
            } else {
                (slot, Placement::Worker(WorkerId(worker)))
            }
        };
        self.next_task = TaskId(task.0 + 1);
        self.outstanding += 1;
        if !self.count_early_submission(slot) && self.delivery == DeliveryOrder::InOrder {
            self.reorder.enqueue(slot);
        }
        Ok((task, placement))
    }

    /// Returns true if one more index batch is to be submitted at the start of an epoch, after the sampler has been
    /// asked for `asked` index batches. Without a window, the sampler is asked `max_tasks` times, as in torch.
    pub fn primes(&self, asked: usize) -> bool {
        asked < self.max_tasks() && (!self.fills || self.has_room())
    }

    /// Makes the round-robin cycle of this epoch begin with `worker` instead of the first worker. Call it before the
    /// epoch's first submission. Has no effect with a shared queue. Fails with [`Error::Usage`] for an unknown worker.
    pub fn begin_with(&mut self, worker: WorkerId) -> Result<()> {
        self.entry(worker)?;
        self.workers.begin_with(worker.0);
        Ok(())
    }

    /// Returns true if a result is staged, so that `next` delivers it after the last [`Decision::Submit`].
    #[inline]
    pub fn is_staged(&self) -> bool {
        self.staged.is_some()
    }

    /// Processes an event at the monotonic time `now`. After an error, the state is unchanged.
    ///
    /// Fails with [`Error::Corrupt`] for an event that cannot have happened, such as a result for a task that is not
    /// the worker's oldest one (with a shared queue: not an unanswered one). Fails with [`Error::Usage`] for an unknown
    /// worker, for the replacement of a worker that is not vacant, and for an invalid reset.
    #[inline]
    pub fn on_event(&mut self, now: Duration, event: Event<R>) -> Result<()> {
        match event {
            Event::Completed { worker, task, result, bytes } => {
                self.on_result(now, worker, task, result, bytes, TaskState::Ready)?;
            }
            Event::Failed { worker, task, result, bytes } => {
                self.on_result(now, worker, task, result, bytes, TaskState::Failed)?;
            }
            Event::Exhausted { worker, task } => self.on_exhausted(now, worker, task)?,
            Event::Resumed(worker) => self.on_resumed(now, worker)?,
            Event::WorkerDied { worker, held } => self.on_death(worker, held)?,
            Event::WorkerReplaced(worker) => self.on_replaced(worker)?,
            Event::Postponed { worker, until } => self.on_postponed(worker, until)?,
            Event::GivenUp(worker) => self.on_given_up(worker)?,
            Event::Withdrawn(task) => self.on_withdrawn(task)?,
            Event::SamplerEnded => match &mut self.early {
                Some(early) => early.ended = true,
                None => self.ended = true,
            },
            Event::EpochReset => self.on_epoch_reset()?,
            Event::Shutdown => {
                self.forget_all();
                self.shut_down = true;
            }
            Event::WaitBegan => self.clock.start(now),
            Event::WaitEnded => self.clock.stop(),
            Event::Time => {
                self.clock.check(now);
                self.restarts.check(now);
            }
        }
        Ok(())
    }

    /// Returns the next effect to perform.
    #[inline]
    pub fn poll(&mut self) -> Option<Action<T, R>> {
        self.effects.pop_front()
    }

    /// Decides what a call of `next` does now.
    ///
    /// torch advances the sampler before it returns a batch. So `Deliver` and `Raise` come after the `Submit` that
    /// replaces their task or, with a window, after all `Submit`s that fill it. If the sampler raises an error at a
    /// `Submit`, the next call delivers the batch. Pass false as `may_ask` while an error of the sampler waits to be
    /// raised: `next` then does not fill the window.
    // Not an iterator: most decisions are not batches.
    #[allow(clippy::should_implement_trait)]
    #[inline]
    pub fn next(&mut self, may_ask: bool) -> Decision<T, R> {
        if self.shut_down {
            return Decision::Shutdown;
        }
        if let Some(death) = self.raised {
            return self.answer(Decision::Dead(death));
        }
        if self.resuming > 0 && self.first_dead.is_some() {
            return self.raise_death();
        }
        if !self.restarts.is_idle() {
            if let Some(death) = self.due_vacancy() {
                return self.answer(Decision::Vacant(death));
            }
            if self.is_behind() {
                return self.answer(Decision::Resend);
            }
        }
        if self.resuming > 0 {
            return self.wait();
        }
        if self.refills > 0 {
            self.refills -= 1;
            if self.accepts() {
                return self.answer(Decision::Submit);
            }
            self.refills = 0;
        }
        if self.staged.is_none() {
            self.staged = self.take_ready();
            if self.staged.is_some() && !self.fills && self.accepts() {
                return self.answer(Decision::Submit);
            }
        }
        // A call processes no event while a result is staged, so at most `max_tasks` submissions delay its delivery.
        if self.fills && may_ask && self.has_room() {
            return self.answer(Decision::Submit);
        }
        if let Some(slot) = self.staged.take() {
            return self.deliver(slot);
        }
        match self.reorder.front().map(|front| self.reorder.slot(front).state) {
            Some(TaskState::Outstanding) => self.wait(),
            Some(TaskState::Lost) => self.raise_death(),
            Some(_) => unreachable!("`take_ready` has staged a result at the front"),
            None if self.first_dead.is_some() && !self.loses_only_early() => self.raise_death(),
            None if self.outstanding_now() > 0 => self.wait(),
            None => self.answer(Decision::End),
        }
    }

    /// Returns true while resume messages are unanswered. Nothing can be submitted meanwhile.
    pub fn resuming(&self) -> bool {
        self.resuming > 0
    }

    /// Returns the death that `next` raises, now or later, if a worker has died for good.
    pub fn death(&self) -> Option<Death> {
        let idle = self.first_dead.map(|worker| Death { worker, lost: None });
        self.raised.or(self.first_lost).or(idle)
    }

    /// Returns a worker's oldest unanswered task, with its tag. While workers resume, this may be a task of the
    /// abandoned epoch. With a shared queue, only tasks that a dead process of the worker held are considered.
    pub fn oldest_task_of(&self, worker: WorkerId) -> Option<(TaskId, &T)> {
        let front = self.workers.get(worker.index())?.front;
        let slot = (front != NIL).then(|| self.reorder.slot(front))?;
        slot.tag.as_ref().map(|tag| (slot.task, tag))
    }

    /// Returns the tag of an unanswered task of a shared queue. Returns `None` for any other task.
    pub fn tag_of(&self, task: TaskId) -> Option<&T> {
        let slot = self.shared.as_ref()?.get(task)?;
        self.reorder.slot(slot).tag.as_ref()
    }

    /// Returns true if the worker has an unanswered task or resume message, and is not vacant. Ignores tasks that a
    /// living worker has taken from a shared queue, because the scheduler does not know them.
    pub fn is_waited_for(&self, worker: WorkerId) -> bool {
        self.workers.get(worker.index()).is_some_and(|entry| !entry.vacant && (entry.front != NIL || entry.resumes > 0))
    }

    /// Returns the worker whose result is delivered next, if that is known.
    pub fn next_worker(&self) -> Option<WorkerId> {
        let slot = self.reorder.slot(self.reorder.front()?);
        (slot.worker != NIL).then_some(WorkerId(slot.worker))
    }

    /// Returns true if results of this epoch are ready. If this is so while `next` waits, an older task is unanswered.
    pub fn is_blocked(&self) -> bool {
        self.ready > self.early.as_ref().map_or(0, |early| early.ready)
    }

    /// Returns the time at which the timeout expires (while `next` waits) or a vacancy becomes due, whichever comes
    /// first.
    pub fn deadline(&self) -> Option<Duration> {
        self.clock.deadline.into_iter().chain(self.next_due()).min()
    }

    /// Returns the number of tasks of this epoch that a living worker or the next process of a vacant worker will
    /// answer.
    pub fn outstanding(&self) -> usize {
        self.outstanding_now() as usize
    }

    /// Returns the maximum number of outstanding tasks. Without a window, an epoch starts with that many submissions.
    pub fn max_tasks(&self) -> usize {
        self.max_tasks as usize
    }

    /// Returns the number of tasks dispatched in this epoch.
    pub fn dispatched(&self) -> u64 {
        self.end_of_tasks().0 - self.first_task.0
    }

    /// Returns the first task of this epoch.
    pub fn first_task(&self) -> TaskId {
        self.first_task
    }

    /// Returns the number of the worker's undelivered tasks in this epoch (torch's `_workers_num_tasks`). With a
    /// window, counts only its unanswered tasks. With a shared queue, returns 0.
    pub fn load_of(&self, worker: WorkerId) -> usize {
        self.workers.get(worker.index()).map_or(0, |worker| worker.load as usize)
    }

    /// Returns the undelivered tasks of this epoch (the keys of torch's `_task_info`) with their workers, in the order
    /// of dispatch. The worker is `None` for an unanswered task of a shared queue.
    pub fn undelivered(&self) -> Vec<(TaskId, Option<WorkerId>)> {
        let all = self.first_task..self.end_of_tasks();
        let mut tasks: Vec<_> = self.reorder.waiting().filter(|(task, _)| all.contains(task)).collect();
        tasks.sort_unstable();
        tasks
    }

    /// Returns true if the worker's process has ended unexpectedly and will not be replaced.
    pub fn is_dead(&self, worker: WorkerId) -> bool {
        self.workers.get(worker.index()).is_some_and(|worker| worker.life == Life::Dead)
    }

    /// Returns true if the worker takes tasks in this epoch (torch's `_workers_status`).
    pub fn is_active(&self, worker: WorkerId) -> bool {
        self.workers.get(worker.index()).is_some_and(|worker| worker.life == Life::Active)
    }
}
