//! Inputs and outputs of the scheduler.

use crate::config::{QUEUE_SPAN, QUEUE_SPAN_MAX, TASKS_MAX};
use crate::id::{TaskId, WorkerId};
use std::time::Duration;

/// The policy that selects the worker of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dispatch {
    /// The next active worker in cyclic order, whatever its load.
    RoundRobin,
    /// The next active worker in cyclic order whose load is below the fair share, `max_tasks / active workers`, so that
    /// a slow worker cannot hold all tasks.
    FairShare,
    /// The task waits in the shared queue until a worker takes it. Only for map-style datasets.
    SharedQueue,
}

/// The destination of a submitted task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Send the task to this worker.
    Worker(WorkerId),
    /// Do not send the task yet, because its worker is being replaced. A [`Decision::Resend`] will ask for it.
    Later,
    /// Put the task into the shared queue.
    Queue,
}

/// The order in which results are delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryOrder {
    /// In the order of their tasks.
    InOrder,
    /// In the order of their arrival.
    AsCompleted,
}

/// Limits on outstanding and ready tasks together, which determine how far submissions may run ahead of deliveries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Maximum number of tasks, at least 1.
    pub batches: usize,
    /// Maximum number of bytes, if limited. The size of each ready result counts, and for each outstanding task the
    /// size of the largest result so far. A single task may exceed this limit.
    pub bytes: Option<u64>,
}

impl Window {
    /// Creates a window of `batches` tasks, but at most [`TASKS_MAX`].
    pub fn of_batches(batches: usize) -> Self {
        Self { batches: batches.min(TASKS_MAX as usize), bytes: None }
    }

    /// Creates a window of `bytes` bytes for `max_tasks` outstanding tasks. The number of tasks is limited, too, which
    /// matters for small results.
    pub fn of_bytes(bytes: u64, max_tasks: usize) -> Self {
        Self { batches: Self::of_batches(max_tasks.max(QUEUE_SPAN)).batches, bytes: Some(bytes) }
    }
}

/// Settings of a scheduler. [`Settings::torch`] returns those of torch's loader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The number of workers, from 1 to [`WORKERS_MAX`](crate::config::WORKERS_MAX).
    pub workers: usize,
    /// The number of outstanding tasks per worker, at least 1. It limits only the total: all workers together have at
    /// most `workers * prefetch_factor` outstanding tasks.
    pub prefetch_factor: usize,
    /// The window, which `next` fills. With `None`, `next` asks for one index batch per delivery, as torch does. With
    /// `None` and a shared queue, it fills a window of `workers * prefetch_factor` tasks.
    pub window: Option<Window>,
    /// The policy that selects the worker of a task.
    pub dispatch: Dispatch,
    /// The order in which results are delivered.
    pub delivery: DeliveryOrder,
    /// True if the workers survive [`Event::EpochReset`].
    pub persistent: bool,
    /// The longest time that `next` waits for the next result to arrive; `None` for no limit.
    pub timeout: Option<Duration>,
    /// True if a worker whose process has died may be replaced. A death then makes a worker vacant.
    pub restarts: bool,
}

impl Settings {
    /// Returns torch's settings for `in_order`, without persistent workers, timeout or restarts. Only this function
    /// interprets `in_order`.
    pub const fn torch(workers: usize, prefetch_factor: usize, in_order: bool) -> Self {
        let (dispatch, delivery) = match in_order {
            true => (Dispatch::RoundRobin, DeliveryOrder::InOrder),
            false => (Dispatch::FairShare, DeliveryOrder::AsCompleted),
        };
        Self {
            workers,
            prefetch_factor,
            window: None,
            dispatch,
            delivery,
            persistent: false,
            timeout: None,
            restarts: false,
        }
    }

    /// Returns the maximum number of outstanding tasks.
    pub fn max_tasks(&self) -> usize {
        self.workers.saturating_mul(self.prefetch_factor)
    }

    /// Returns true if `next` fills a window. Otherwise it asks for one index batch per delivery.
    pub fn fills(&self) -> bool {
        self.window.is_some() || self.dispatch == Dispatch::SharedQueue
    }

    /// Returns the maximum number of tasks of a shared queue from the oldest unanswered one to the newest. This bounds
    /// the scheduler's table of unanswered tasks, not the slots of the queue, which hold only waiting tasks.
    pub fn queue_span(&self) -> usize {
        let window = self.window.map_or(0, |window| window.batches.min(QUEUE_SPAN_MAX));
        QUEUE_SPAN.max(window).max(self.max_tasks().min(TASKS_MAX as usize))
    }
}

/// An event that the caller reports.
#[derive(Debug)]
pub enum Event<R> {
    /// A worker has finished a task.
    Completed {
        /// The worker whose ring held the result.
        worker: WorkerId,
        /// The task that the result names.
        task: TaskId,
        /// The batch.
        result: R,
        /// The size of the batch in bytes, for [`Window::bytes`].
        bytes: u64,
    },
    /// A worker has failed to make a task's batch. The error is delivered in place of the batch.
    Failed {
        /// The worker whose ring held the result.
        worker: WorkerId,
        /// The task that the result names.
        task: TaskId,
        /// The error.
        result: R,
        /// The size of the error in bytes, for [`Window::bytes`].
        bytes: u64,
    },
    /// A worker's iterable dataset has ended. The worker skips its remaining tasks.
    Exhausted {
        /// The worker.
        worker: WorkerId,
        /// The task at which the dataset ended.
        task: TaskId,
    },
    /// A worker has answered a resume message.
    Resumed(WorkerId),
    /// A worker's process has ended, and its completion ring has been drained.
    WorkerDied {
        /// The worker.
        worker: WorkerId,
        /// The tasks that the worker had taken from the shared queue and not answered. Empty under the other policies,
        /// which bind every task to a worker.
        held: Vec<TaskId>,
    },
    /// A vacant worker has a new process, which begins with the current epoch and has not received any tasks.
    WorkerReplaced(WorkerId),
    /// The replacement of a vacant worker is postponed.
    Postponed {
        /// The worker.
        worker: WorkerId,
        /// The time at which [`Decision::Vacant`] names it again.
        until: Duration,
    },
    /// A vacant worker will not be replaced, so its death is final.
    GivenUp(WorkerId),
    /// The shared queue has given back a task of an abandoned epoch, which no worker will answer.
    Withdrawn(TaskId),
    /// The sampler has ended. With a window, it is not asked again in this epoch. Without a window, it is still asked
    /// at each delivery, as in torch.
    SamplerEnded,
    /// A loader with persistent workers begins another epoch.
    EpochReset,
    /// The iterator ends.
    Shutdown,
    /// `next` begins to wait. Starts the timeout. Reported only at the first of several [`Decision::Wait`]s in a row.
    WaitBegan,
    /// `next` stops waiting without an answer, because a signal handler raised an exception. Stops the timeout.
    WaitEnded,
    /// Time has passed: the timeout may have expired, or a vacancy may be due.
    Time,
}

/// An effect that the caller must perform, even if no call of `next` is in progress.
#[derive(Debug, PartialEq, Eq)]
pub enum Action<T, R> {
    /// Ask the worker to exit. Its exit is not a death.
    Retire(WorkerId),
    /// Send the worker a resume message.
    Resume(WorkerId),
    /// Withdraw a task of an abandoned epoch from the shared queue, and report [`Event::Withdrawn`] if no worker has
    /// taken it.
    Withdraw(TaskId),
    /// Drop a task that will not be delivered, and release its result.
    Discard {
        /// The task.
        task: TaskId,
        /// The caller's tag; `None` if a shutdown has already returned it.
        tag: Option<T>,
        /// The result; `None` if there is none, because the task was dropped, withdrawn, lost or still outstanding.
        result: Option<R>,
    },
}

/// The scheduler's decision on what the current call of `next` must do.
#[derive(Debug, PartialEq, Eq)]
pub enum Decision<T, R> {
    /// Submit one more index batch, or report [`Event::SamplerEnded`]; then ask again.
    Submit,
    /// Return this batch.
    Deliver {
        /// The task.
        task: TaskId,
        /// The worker that made the batch.
        worker: WorkerId,
        /// The caller's tag of the task.
        tag: T,
        /// The batch.
        result: R,
    },
    /// Raise this error in place of a batch. Later batches are still delivered.
    Raise {
        /// The task.
        task: TaskId,
        /// The worker that reported the error.
        worker: WorkerId,
        /// The caller's tag of the task.
        tag: T,
        /// The error.
        result: R,
    },
    /// Replace a vacant worker ([`Event::WorkerReplaced`]), postpone its replacement ([`Event::Postponed`]) or give it
    /// up ([`Event::GivenUp`]), and ask again. The decision is repeated until one of these events is reported. `lost`
    /// is the oldest task that is bound to the worker.
    Vacant(Death),
    /// Send the task of [`Scheduler::unsent`](super::Scheduler::unsent) to its worker, call
    /// [`Scheduler::resent`](super::Scheduler::resent), and ask again.
    Resend,
    /// Raise a worker's death. Every later call gets the same decision.
    Dead(Death),
    /// The timeout has expired. No task is lost. The next call waits again, with the full timeout.
    TimedOut,
    /// The epoch is over.
    End,
    /// Wait for an event, but at most until this time, if there is one: the end of the timeout, which
    /// [`Event::WaitBegan`] starts, or the time to which a replacement is postponed.
    Wait(Option<Duration>),
    /// The scheduler has been shut down.
    Shutdown,
}

/// A worker's death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Death {
    /// The worker.
    pub worker: WorkerId,
    /// The first task that was lost with the worker, if any. Tasks that were still waiting in the shared queue do not
    /// count.
    pub lost: Option<TaskId>,
}
