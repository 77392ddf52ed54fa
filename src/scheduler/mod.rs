//! The pure scheduler decides which worker gets each task and what `next` returns.
//!
//! It is a state machine without thread, clock, channel or shared memory. The caller reports what has happened
//! ([`Scheduler::on_event`]), performs the effects ([`Scheduler::poll`]), submits indices
//! ([`Scheduler::submit`]) and asks for the next batch ([`Scheduler::next`]). Every call costs O(1), whatever the
//! number of workers and of outstanding tasks. The algorithm is that of `_MultiProcessingDataLoaderIter` in
//! torch 2.15; only a worker's death, which is final here, is handled differently. `README.md` beside this file describes
//! the settings and states, and shows why no task is lost and nothing waits for ever.

mod bitmap;
mod clock;
mod reorder;
#[cfg(test)]
mod tests;
mod transitions;
mod types;
mod workers;

pub use types::{Action, Death, Decision, DeliveryOrder, Dispatch, Event, Settings};

use crate::config::{TASKS_MAX, WORKERS_MAX};
use crate::error::{Error, Result};
use crate::id::{TaskId, WorkerId};
use clock::Clock;
use reorder::{NIL, Reorder, State};
use std::collections::VecDeque;
use std::time::Duration;
use workers::{Life, Workers};

/// The scheduler. `T` is what the caller keeps of a task until its result is delivered (the index object), `R` a
/// result. Each tag comes back exactly once: from a refused `submit`, with a batch, or in [`Action::Discard`]; so
/// no tag is ever dropped in here, where its destructor could run foreign code.
#[derive(Debug)]
pub struct Scheduler<T, R> {
    /// Who takes tasks, and the FIFO of each worker.
    workers: Workers,
    /// The tasks, and the queue of those that `next` takes.
    reorder: Reorder<T, R>,
    /// The clock of the timeout.
    clock: Clock,
    /// Effects that `poll` has not handed out yet.
    effects: VecDeque<Action<T, R>>,
    /// The sequence number of the next task.
    next_task: TaskId,
    /// The sequence number of this epoch's first task.
    first_task: TaskId,
    /// Tasks of this epoch that are with a living worker which will answer them.
    outstanding: u32,
    /// Tasks of this epoch whose result waits for delivery.
    ready: u32,
    /// Tasks that may be outstanding together.
    max_tasks: u32,
    /// Tasks that may be outstanding or ready together.
    window: u32,
    /// The slot that is delivered as soon as an index has been submitted in its stead.
    staged: Option<u32>,
    /// Indices to submit in the place of tasks at which a worker's dataset ended.
    refills: u32,
    /// Resume messages that have not been answered yet.
    resuming: u32,
    /// The worker that died first.
    first_dead: Option<WorkerId>,
    /// The first task in sequence order that was lost with a worker.
    first_lost: Option<Death>,
    /// The death that `next` has raised, and will raise from now on.
    raised: Option<Death>,
    /// Whether the iterator has ended for good.
    shut_down: bool,
    /// In which order results are delivered.
    delivery: DeliveryOrder,
    /// Whether the workers live through an epoch's end.
    persistent: bool,
}

impl<T, R> Scheduler<T, R> {
    /// A scheduler for workers that have just been started.
    ///
    /// Refuses ([`Error::Usage`]) no workers, no prefetching, and numbers that do not fit its counters.
    pub fn new(settings: Settings) -> Result<Self> {
        let max_tasks = settings.max_tasks();
        let Settings { workers, prefetch_factor, window, dispatch, delivery, persistent, timeout } = settings;
        let fits = workers <= WORKERS_MAX as usize && window <= TASKS_MAX as usize;
        if max_tasks == 0 || max_tasks > window || !fits {
            return Err(Error::usage(format!(
                "a scheduler takes 1 to {WORKERS_MAX} workers and a window of 1 to {TASKS_MAX} tasks with room for \
                 those of all workers, not {workers} workers with a prefetch_factor of {prefetch_factor} and a \
                 window of {window}"
            )));
        }
        Ok(Self {
            workers: Workers::new(workers, window as u32, dispatch),
            reorder: Reorder::new(window),
            clock: Clock::new(timeout),
            effects: VecDeque::new(),
            next_task: TaskId(0),
            first_task: TaskId(0),
            outstanding: 0,
            ready: 0,
            max_tasks: max_tasks as u32,
            window: window as u32,
            staged: None,
            refills: 0,
            resuming: 0,
            first_dead: None,
            first_lost: None,
            raised: None,
            shut_down: false,
            delivery,
            persistent,
        })
    }

    /// Dispatches one task: the caller sends it to the worker that is named. Expected `max_tasks` times at the start
    /// of an epoch, and once at each [`Decision::Submit`]. If the window is larger than `max_tasks`, the caller may submit
    /// more, at any time.
    ///
    /// The tag is handed back, and nothing else has changed, when no worker can take a task: all are exhausted
    /// or at their share, `max_tasks` are outstanding, the window is full, resume messages are unanswered, a worker has
    /// died, or the iterator has been shut down.
    #[inline]
    pub fn submit(&mut self, tag: T) -> std::result::Result<(TaskId, WorkerId), T> {
        if !self.accepts() {
            return Err(tag);
        }
        let Some(worker) = self.workers.pick() else { return Err(tag) };
        let task = self.next_task;
        self.next_task = TaskId(task.0 + 1);
        self.outstanding += 1;
        let slot = self.reorder.insert(task, worker, tag);
        let entry = self.workers.at(worker);
        let back = std::mem::replace(&mut entry.back, slot);
        if entry.front == NIL {
            entry.front = slot;
        } else {
            self.reorder.slot_mut(back).next = slot;
        }
        if self.delivery == DeliveryOrder::InOrder {
            self.reorder.enqueue(slot);
        }
        Ok((task, WorkerId(worker)))
    }

    /// Whether [`Scheduler::next`] has answered [`Decision::Submit`] for a result that it hands out when it is asked again.
    #[inline]
    pub fn is_staged(&self) -> bool {
        self.staged.is_some()
    }

    /// Takes note of something that has happened at `now`, a monotonic time.
    ///
    /// [`Error::Corrupt`]: a result that its worker cannot have sent, because a worker answers its tasks in the order
    /// in which they were dispatched. [`Error::Usage`]: a worker or a reset that does not exist. After an error
    /// the state is what it was.
    #[inline]
    pub fn on_event(&mut self, now: Duration, event: Event<R>) -> Result<()> {
        match event {
            Event::Completed { worker, task, result } => {
                self.on_result(now, worker, task, result, State::Ready)
            }
            Event::Failed { worker, task, result } => {
                self.on_result(now, worker, task, result, State::Failed)
            }
            Event::Exhausted { worker, task } => self.on_exhausted(now, worker, task),
            Event::Resumed { worker } => self.on_resumed(now, worker),
            Event::WorkerDied { worker } => self.on_death(worker),
            Event::EpochReset => self.on_epoch_reset(),
            Event::Shutdown => {
                self.forget_all();
                self.shut_down = true;
                Ok(())
            }
            Event::WaitBegan => {
                self.clock.start(now);
                Ok(())
            }
            Event::WaitEnded => {
                self.clock.stop();
                Ok(())
            }
            Event::Time => {
                self.clock.look(now);
                Ok(())
            }
        }
    }

    /// The next effect that has to happen, in the order in which they are to happen.
    #[inline]
    pub fn poll(&mut self) -> Option<Action<T, R>> {
        self.effects.pop_front()
    }

    /// What comes next for the one who asks for a batch.
    ///
    /// `Deliver` and `Raise` come after the `Submit` that fills the delivered task's place, as in torch, where the
    /// sampler is advanced before the batch is returned. If the sampler raises there, the batch stays here
    /// and is the answer to the next call.
    // Not an iterator: its answers are steps, most of which are no batches.
    #[allow(clippy::should_implement_trait)]
    #[inline]
    pub fn next(&mut self) -> Decision<T, R> {
        if self.shut_down {
            return Decision::Shutdown;
        }
        if let Some(death) = self.raised {
            return self.answer(Decision::Dead(death));
        }
        if self.resuming > 0 {
            return if self.first_dead.is_some() { self.raise_death() } else { self.wait() };
        }
        if self.refills > 0 {
            self.refills -= 1;
            if self.accepts() {
                return Decision::Submit;
            }
            self.refills = 0;
        }
        if let Some(slot) = self.staged.take() {
            return self.deliver(slot);
        }
        while let Some(front) = self.reorder.front() {
            let slot = self.reorder.slot(front);
            match slot.state {
                State::Ready | State::Failed => {
                    self.workers.unload(slot.worker);
                    self.reorder.pop();
                    self.ready -= 1;
                    if !self.accepts() {
                        // No worker could take an index that is drawn from the sampler now.
                        return self.deliver(front);
                    }
                    self.staged = Some(front);
                    return Decision::Submit;
                }
                State::Outstanding => return self.wait(),
                State::Lost => return self.raise_death(),
                State::Dropped => {
                    self.reorder.pop();
                    self.reorder.release(front);
                }
                State::Free => unreachable!("the queue holds slots in use"),
            }
        }
        if self.first_dead.is_some() {
            self.raise_death()
        } else if self.outstanding > 0 {
            self.wait()
        } else {
            self.answer(Decision::End)
        }
    }

    /// Whether resume messages of an [`Event::EpochReset`] are still unanswered. Nothing can be submitted until
    /// they are answered.
    pub fn resuming(&self) -> bool {
        self.resuming > 0
    }

    /// The death that `next` has raised, or will raise if nothing worse happens before.
    pub fn death(&self) -> Option<Death> {
        let idle = self.first_dead.map(|worker| Death { worker, lost: None });
        self.raised.or(self.first_lost).or(idle)
    }

    /// The oldest task that a worker holds and has not answered, with its tag. For a worker that died it is the first
    /// task that was lost with it; while resuming it is a task of the abandoned epoch.
    pub fn oldest_task_of(&self, worker: WorkerId) -> Option<(TaskId, &T)> {
        let front = self.workers.get(worker.index())?.front;
        let slot = (front != NIL).then(|| self.reorder.slot(front))?;
        slot.tag.as_ref().map(|tag| (slot.task, tag))
    }

    /// Whether the worker has something to answer: a task, or a resume message.
    pub fn is_waited_for(&self, worker: WorkerId) -> bool {
        self.workers.get(worker.index()).is_some_and(|entry| entry.front != NIL || entry.resumes > 0)
    }

    /// Whether results wait for an older task that is not answered yet.
    pub fn is_blocked(&self) -> bool {
        self.ready > 0
    }

    /// When the timeout expires, while `next` waits.
    pub fn deadline(&self) -> Option<Duration> {
        self.clock.deadline()
    }

    /// Tasks of this epoch that are with a living worker and will be answered.
    pub fn outstanding(&self) -> usize {
        self.outstanding as usize
    }

    /// Tasks that may be outstanding together, and so the number of submissions that prime an epoch.
    pub fn max_tasks(&self) -> usize {
        self.max_tasks as usize
    }

    /// The number of tasks that were dispatched in this epoch.
    pub fn dispatched(&self) -> u64 {
        self.next_task.0 - self.first_task.0
    }

    /// The sequence number of this epoch's first task.
    pub fn first_task(&self) -> TaskId {
        self.first_task
    }

    /// Tasks dispatched to the worker in this epoch and not yet delivered (torch's `_workers_num_tasks`).
    pub fn load_of(&self, worker: WorkerId) -> usize {
        self.workers.get(worker.index()).map_or(0, |worker| worker.load as usize)
    }

    /// The tasks of this epoch that have not been delivered, with their workers, in the order of their dispatch (the keys of
    /// torch's `_task_info`). Tasks of an epoch that was abandoned are not among them.
    pub fn undelivered(&self) -> Vec<(TaskId, WorkerId)> {
        let mut tasks: Vec<_> = self.reorder.waiting().filter(|(task, _)| *task >= self.first_task).collect();
        tasks.sort_unstable();
        tasks
    }

    /// Whether the worker's process has ended unexpectedly.
    pub fn is_dead(&self, worker: WorkerId) -> bool {
        self.workers.get(worker.index()).is_some_and(|worker| worker.life == Life::Dead)
    }

    /// Whether the worker takes tasks in this epoch (torch's `_workers_status`).
    pub fn is_active(&self, worker: WorkerId) -> bool {
        self.workers.get(worker.index()).is_some_and(|worker| worker.life == Life::Active)
    }
}
