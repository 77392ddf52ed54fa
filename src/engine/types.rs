//! Types that the engine's methods return.

use std::time::Duration;

use super::completions::Incoming;
use crate::scheduler::Death;
use crate::sys::pidfd::ExitStatus;

/// The next step that a call to `next` must take.
#[derive(Debug)]
pub enum Step<T, B = (), E = ()> {
    /// Return a batch, or raise an error in its place.
    Deliver {
        /// The task's tag.
        tag: T,
        /// The result.
        incoming: Incoming,
        /// The batch, if it has been prepared already.
        ready: Option<B>,
    },
    /// Decode a delivered result again, because a signal handler interrupted its decoding.
    Unread(B),
    /// Raise an error that the sampler raised.
    Raise(E),
    /// Open a [`Tied`](crate::wire::ResultKind::Tied) result. Then call [`Engine::opened`](super::Engine::opened) or,
    /// if a signal handler interrupted the attempt,
    /// [`Delivery::open_interrupted`](super::delivery::Delivery::open_interrupted).
    Open {
        /// The result.
        incoming: Incoming,
        /// The state that an interrupted attempt left. The message is then no longer in shared memory.
        ready: Option<B>,
    },
    /// Take one index batch from the sampler and submit it, or call
    /// [`Engine::sampler_ended`](super::Engine::sampler_ended); then ask for the next step.
    Submit,
    /// Decide whether to replace a worker whose process has died; [`Engine::report`](super::Engine::report) returns the
    /// details.
    Vacant(Death),
    /// Send a task of a replaced worker again with [`Engine::resend`](super::Engine::resend).
    Resend,
    /// Raise an error for the death of a worker; [`Engine::report`](super::Engine::report) returns the details.
    Dead(Death),
    /// The epoch is over.
    End,
    /// The timeout has expired. No batch is lost, and `next` may be called again.
    TimedOut,
    /// Wait for an event, until this time at the latest, if one is given.
    Wait(Option<Duration>),
    /// The iterator is shut down.
    Closed,
    /// The pin thread has ended, for this reason, and all its batches are delivered.
    NoPinThread(String),
}

/// Details of a worker's death.
#[derive(Debug)]
pub struct DeathReport<'a, T> {
    /// The worker.
    pub worker: u32,
    /// The ID of the process that died.
    pub pid: i32,
    /// The exit status of the process, if known.
    pub status: Option<ExitStatus>,
    /// The tag of the task that the worker was processing or, if there was none, of its oldest unanswered task.
    pub index: Option<&'a T>,
    /// The ordinal of that task; `None` if there is no such task, or if it belongs to an earlier epoch.
    pub task: Option<u64>,
    /// Number of results, including errors, that this worker's processes have published in this epoch. Counted only if
    /// workers may be replaced.
    pub answers: u64,
    /// True if the process had begun that task. Its start-up and its replay of earlier batches do not count.
    pub has_begun: bool,
    /// The index, within its index batch, of the sample that the process was fetching, if known.
    pub place: Option<u64>,
    /// Number of earlier processes in the worker's slot.
    pub generation: u32,
    /// True if the process was killed because it was stuck.
    pub stalled: bool,
    /// Number of the epoch's first task.
    pub first_task: u64,
}

/// The progress of an epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Number of tasks sent so far.
    pub sent: u64,
    /// Number of this epoch's tasks that a worker will still answer.
    pub outstanding: usize,
    /// Number of each worker's undelivered tasks; with a window but no shared queue, number of its unanswered tasks.
    pub loads: Vec<usize>,
    /// The undelivered tasks in the order of dispatch: the ordinal of each and, if known, its worker.
    pub undelivered: Vec<(u64, Option<u32>)>,
}
