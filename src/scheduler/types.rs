//! What goes into the scheduler and what comes out of it.

use crate::id::{TaskId, WorkerId};
use std::time::Duration;

/// What a scheduler is made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The number of workers, 1 to 262,144. The arena of an engine has room for 65,536.
    pub workers: usize,
    /// Tasks in flight for each worker, on average; at least 1.
    pub prefetch_factor: usize,
    /// Whether batches are delivered in the order of their tasks, or as they arrive.
    pub in_order: bool,
    /// Whether the workers live through [`Event::EpochReset`].
    pub persistent: bool,
    /// How long `next` may wait without any result arriving.
    pub timeout: Option<Duration>,
}

/// Something that has happened.
#[derive(Debug)]
pub enum Event<R> {
    /// A worker has finished a task.
    Completed {
        /// The worker whose ring held the result.
        worker: WorkerId,
        /// The task that it names.
        task: TaskId,
        /// The batch.
        result: R,
    },
    /// A task has ended in an error, which is delivered at its place.
    Failed {
        /// The worker whose ring held the result.
        worker: WorkerId,
        /// The task that it names.
        task: TaskId,
        /// The error.
        result: R,
    },
    /// A worker's iterable dataset ended at this task. The worker skips the tasks that it still holds.
    Exhausted {
        /// The worker.
        worker: WorkerId,
        /// The task at which the dataset ended.
        task: TaskId,
    },
    /// A worker has answered a resume message.
    Resumed {
        /// The worker.
        worker: WorkerId,
    },
    /// A worker's process has ended, and its completion ring has been drained.
    WorkerDied {
        /// The worker.
        worker: WorkerId,
    },
    /// A persistent loader is iterated again.
    EpochReset,
    /// The iterator ends for good.
    Shutdown,
    /// `next` begins to wait: the clock of the timeout starts. Once for each call of the user, not for each slice.
    WaitBegan,
    /// `next` gives up waiting without an answer, for a signal's handler has raised: the clock stands.
    WaitEnded,
    /// Nothing has happened, but time has passed.
    Time,
}

/// An effect that has to happen whether or not anybody asks for a batch.
#[derive(Debug, PartialEq, Eq)]
pub enum Action<T, R> {
    /// Tell the worker to leave; it is not needed any more, and its end is no death.
    Retire {
        /// The worker.
        worker: WorkerId,
    },
    /// Send the worker a resume message.
    Resume {
        /// The worker.
        worker: WorkerId,
    },
    /// Nobody will ask for this task any more.
    Discard {
        /// The task.
        task: TaskId,
        /// What the caller kept of the task; `None` if that has been handed back before (after a shutdown).
        tag: Option<T>,
        /// The result, if there is one. A task that its exhausted worker skipped has none.
        result: Option<R>,
    },
}

/// The answer to "what is the next batch?".
#[derive(Debug, PartialEq, Eq)]
pub enum Step<T, R> {
    /// Submit one more index, if the sampler has one, and ask again.
    Submit,
    /// This is the next batch.
    Deliver {
        /// The task.
        task: TaskId,
        /// The worker that made the batch.
        worker: WorkerId,
        /// What the caller kept of the task.
        tag: T,
        /// The batch.
        result: R,
    },
    /// This error stands where the next batch should be; the batches after it can be had.
    Raise {
        /// The task.
        task: TaskId,
        /// The worker that reported the error.
        worker: WorkerId,
        /// What the caller kept of the task.
        tag: T,
        /// The error.
        result: R,
    },
    /// A worker's death is what comes next, now and at each later call.
    Dead(Death),
    /// The timeout has expired. Nothing is lost: the next call goes on waiting, with a new clock.
    TimedOut,
    /// The epoch is over.
    End,
    /// Nothing can be said before something happens; until the deadline, if there is one.
    Wait {
        /// When [`Event::Time`] will find the timeout expired. `None` without a timeout, or before `WaitBegan`.
        deadline: Option<Duration>,
    },
    /// The scheduler has been shut down.
    Shutdown,
}

/// The death of a worker, as it is raised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Death {
    /// The worker.
    pub worker: WorkerId,
    /// The first task that was lost with it, if one was.
    pub lost: Option<TaskId>,
}
