//! Inputs and outputs of the scheduler.

use crate::id::{TaskId, WorkerId};
use std::time::Duration;

/// Selects the worker of the next task, in cyclic order of the active workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dispatch {
    /// The next active worker, whatever its load.
    RoundRobin,
    /// The next active worker below its fair share, `window / active workers`: a slow worker cannot hold all tasks.
    FairShare,
}

/// The order in which results are delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryOrder {
    /// In the order of their tasks.
    InOrder,
    /// In the order of their arrival.
    AsCompleted,
}

/// Settings of a scheduler; [`Settings::torch`] has those of torch's loader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The number of workers, from 1 to [`WORKERS_MAX`](crate::config::WORKERS_MAX).
    pub workers: usize,
    /// Average outstanding tasks per worker, at least 1. All workers together have at most `workers * prefetch_factor`.
    pub prefetch_factor: usize,
    /// Limit of outstanding and ready tasks together, at least `workers * prefetch_factor`.
    pub window: usize,
    /// Selects the worker of the next task.
    pub dispatch: Dispatch,
    /// The order in which results are delivered.
    pub delivery: DeliveryOrder,
    /// Whether the workers survive [`Event::EpochReset`].
    pub persistent: bool,
    /// Longest wait of `next` without any result arriving.
    pub timeout: Option<Duration>,
}

impl Settings {
    /// torch's settings, without persistent workers or a timeout. Only this function interprets torch's `in_order`.
    pub const fn torch(workers: usize, prefetch_factor: usize, in_order: bool) -> Self {
        let (dispatch, delivery) = match in_order {
            true => (Dispatch::RoundRobin, DeliveryOrder::InOrder),
            false => (Dispatch::FairShare, DeliveryOrder::AsCompleted),
        };
        let window = workers.saturating_mul(prefetch_factor);
        Self { workers, prefetch_factor, window, dispatch, delivery, persistent: false, timeout: None }
    }
}

/// Something that has happened.
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
    },
    /// A task has failed. Its error is delivered in its place.
    Failed {
        /// The worker whose ring held the result.
        worker: WorkerId,
        /// The task that the result names.
        task: TaskId,
        /// The error.
        result: R,
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
    WorkerDied(WorkerId),
    /// A persistent loader begins another epoch.
    EpochReset,
    /// The iterator ends for good.
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
    /// Drop a task that will not be delivered.
    Discard {
        /// The task.
        task: TaskId,
        /// The caller's tag; `None` if a shutdown has returned it already.
        tag: Option<T>,
        /// The result; `None` for a task that an exhausted worker skipped.
        result: Option<R>,
    },
}

/// The answer to "what is the next batch?".
#[derive(Debug, PartialEq, Eq)]
pub enum Decision<T, R> {
    /// Submit one more index, if the sampler has one, and ask again.
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
    /// Raise a worker's death, at this and every later call.
    Dead(Death),
    /// The timeout has expired. Nothing is lost: the next call waits again, with the full timeout.
    TimedOut,
    /// The epoch is over.
    End,
    /// Wait for an event, or until this time if given. `None` without a timeout, or before [`Event::WaitBegan`].
    Wait(Option<Duration>),
    /// The scheduler has been shut down.
    Shutdown,
}

/// A worker's death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Death {
    /// The worker.
    pub worker: WorkerId,
    /// The first task that was lost with it, if any.
    pub lost: Option<TaskId>,
}
