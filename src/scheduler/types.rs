//! Inputs and outputs of the scheduler.

use crate::config::{QUEUE_SPAN, QUEUE_SPAN_MAX, TASKS_MAX};
use crate::id::{TaskId, WorkerId};
use std::time::Duration;

/// The policy that selects the worker of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dispatch {
    /// The next active worker in cyclic order, whatever its load.
    RoundRobin,
    /// The next active worker in cyclic order below its fair share, `max_tasks / active workers`: a slow worker cannot
    /// hold all tasks.
    FairShare,
    /// The task waits in the shared queue until a worker takes it. Only for map-style datasets.
    SharedQueue,
}

/// The destination of a submitted task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// To this worker.
    Worker(WorkerId),
    /// Nowhere yet: the worker's process is being replaced, and [`Decision::Resend`] sends the task later.
    Later,
    /// To the shared queue.
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

/// The limits of outstanding and ready tasks together, and so of the lead of submissions over deliveries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Number of tasks, at least 1.
    pub batches: usize,
    /// Number of bytes: those of the ready results, plus the size of the largest result so far for each outstanding
    /// task. A single task may exceed it.
    pub bytes: Option<u64>,
}

impl Window {
    /// Creates a window of `batches` tasks, or as many as the engine has room for.
    pub fn of_batches(batches: usize) -> Self {
        Self { batches: batches.min(TASKS_MAX as usize), bytes: None }
    }

    /// Creates a window of `bytes` bytes for `max_tasks` outstanding tasks. The number of small results is limited,
    /// too.
    pub fn of_bytes(bytes: u64, max_tasks: usize) -> Self {
        Self { batches: Self::of_batches(max_tasks.max(QUEUE_SPAN)).batches, bytes: Some(bytes) }
    }
}

/// Settings of a scheduler; [`Settings::torch`] has those of torch's loader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The number of workers, from 1 to [`WORKERS_MAX`](crate::config::WORKERS_MAX).
    pub workers: usize,
    /// Average number of outstanding tasks per worker, at least 1. All workers together have at most `workers *
    /// prefetch_factor`.
    pub prefetch_factor: usize,
    /// The window, which `next` fills. `None` submits one index batch per delivery, as torch does. A shared queue
    /// always has a window, by default of `workers * prefetch_factor` tasks.
    pub window: Option<Window>,
    /// Selects the worker of a task.
    pub dispatch: Dispatch,
    /// The order in which results are delivered.
    pub delivery: DeliveryOrder,
    /// True if the workers survive [`Event::EpochReset`].
    pub persistent: bool,
    /// The longest wait of `next` during which no result arrives.
    pub timeout: Option<Duration>,
    /// True if a worker whose process dies may be replaced: its death then makes it vacant.
    pub restarts: bool,
}

impl Settings {
    /// torch's settings, without persistent workers, a timeout or restarts. Only this function interprets torch's
    /// `in_order`.
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

    /// Returns the limit of outstanding tasks.
    pub fn max_tasks(&self) -> usize {
        self.workers.saturating_mul(self.prefetch_factor)
    }

    /// Returns true if `next` fills a window, instead of submitting one index batch per delivery.
    pub fn fills(&self) -> bool {
        self.window.is_some() || self.dispatch == Dispatch::SharedQueue
    }

    /// Returns the limit of the tasks from the oldest unanswered one of a shared queue to the newest. It bounds the
    /// scheduler's table of them, not the slots of the queue, which hold waiting tasks only.
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
        /// Its size in bytes, for [`Window::bytes`].
        bytes: u64,
    },
    /// A task has failed. Its error is delivered in its place.
    Failed {
        /// The worker whose ring held the result.
        worker: WorkerId,
        /// The task that the result names.
        task: TaskId,
        /// The error.
        result: R,
        /// Its size in bytes, for [`Window::bytes`].
        bytes: u64,
    },
    /// A worker's iterable dataset ended. The worker skips its remaining tasks.
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
        /// The tasks that it had taken from the shared queue and not answered; none under the other policies, which
        /// bind tasks to workers.
        held: Vec<TaskId>,
    },
    /// A vacant worker has a new process, which begins with the current epoch and has none of its tasks.
    WorkerReplaced(WorkerId),
    /// A vacant worker is not to be replaced before a certain time.
    Postponed {
        /// The worker.
        worker: WorkerId,
        /// The time at which [`Decision::Vacant`] names it again.
        until: Duration,
    },
    /// A vacant worker is not replaced: its death is final.
    GivenUp(WorkerId),
    /// The shared queue has given back a task of an abandoned epoch, which no worker will answer.
    Withdrawn(TaskId),
    /// The sampler has ended. With a window it is not asked again in this epoch; without one it is asked at each
    /// delivery, as in torch.
    SamplerEnded,
    /// A persistent loader begins another epoch.
    EpochReset,
    /// The iterator ends.
    Shutdown,
    /// `next` begins to wait, which starts the timeout. Sent once per call, not once per slice.
    WaitBegan,
    /// `next` stops waiting without an answer, because a signal handler has raised. Stops the timeout.
    WaitEnded,
    /// Time has passed.
    Time,
}

/// An effect that the caller performs, whether or not a batch is requested.
#[derive(Debug, PartialEq, Eq)]
pub enum Action<T, R> {
    /// Ask the worker to leave. Its exit is not a death.
    Retire(WorkerId),
    /// Send the worker a resume message.
    Resume(WorkerId),
    /// Withdraw a task of an abandoned epoch from the shared queue, and report [`Event::Withdrawn`] if no worker has
    /// taken it.
    Withdraw(TaskId),
    /// Drop a task that will not be delivered.
    Discard {
        /// The task.
        task: TaskId,
        /// The caller's tag; `None` if a shutdown has returned it already.
        tag: Option<T>,
        /// The result; `None` for a task that an exhausted worker skipped, or that was withdrawn.
        result: Option<R>,
    },
}

/// The decision of the scheduler about the current call of `next`.
#[derive(Debug, PartialEq, Eq)]
pub enum Decision<T, R> {
    /// Submit one more index batch and ask again, or report [`Event::SamplerEnded`].
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
    /// up ([`Event::GivenUp`]), and ask again. The decision is repeated until then. `lost` is the oldest task that is
    /// bound to the worker.
    Vacant(Death),
    /// Send the task of [`Scheduler::unsent`](super::Scheduler::unsent) to its worker, report
    /// [`Scheduler::resent`](super::Scheduler::resent), and ask again.
    Resend,
    /// Raise a worker's death, at this and every later call.
    Dead(Death),
    /// The timeout has expired. Nothing is lost: the next call waits again, with the full timeout.
    TimedOut,
    /// The epoch is over.
    End,
    /// Wait for an event, or until this time if given: the end of the timeout, if that runs ([`Event::WaitBegan`]), or
    /// the time to which a replacement is postponed.
    Wait(Option<Duration>),
    /// The scheduler has been shut down.
    Shutdown,
}

/// A worker's death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Death {
    /// The worker.
    pub worker: WorkerId,
    /// The first task that was lost with it, if any. A task that was still waiting in the shared queue is not lost.
    pub lost: Option<TaskId>,
}
