//! Results of the engine's calls.

use std::time::Duration;

use super::completions::Incoming;
use crate::scheduler::Death;
use crate::sys::pidfd::ExitStatus;

/// The next step of a call of `next`.
#[derive(Debug)]
pub enum Step<T, B = (), E = ()> {
    /// Return a batch, or raise the error in its place.
    Deliver {
        /// The task's tag.
        tag: T,
        /// The result.
        incoming: Incoming,
        /// The batch, if it has been prepared already.
        ready: Option<B>,
    },
    /// Decode a result again: a signal handler has interrupted its decoding.
    Unread(B),
    /// Raise an error of the sampler.
    Raise(E),
    /// Open a [`Tied`](crate::wire::ResultKind::Tied) result, and call [`Engine::opened`](super::Engine::opened), or if
    /// interrupted [`Delivery::open_interrupted`](super::delivery::Delivery::open_interrupted).
    Open {
        /// The result.
        incoming: Incoming,
        /// The state of an interrupted attempt. The message in shared memory is gone then.
        ready: Option<B>,
    },
    /// Submit one more index batch, or report [`Engine::sampler_ended`](super::Engine::sampler_ended), and ask again.
    Submit,
    /// Ask whether to replace a worker whose process has died; see [`Engine::report`](super::Engine::report).
    Vacant(Death),
    /// Send a task of a replaced worker again: [`Engine::resend`](super::Engine::resend).
    Resend,
    /// Raise the death of a worker; see [`Engine::report`](super::Engine::report).
    Dead(Death),
    /// The epoch is over.
    End,
    /// The timeout has expired; nothing is lost.
    TimedOut,
    /// Wait for an event, at most until this time.
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
    /// Its process id.
    pub pid: i32,
    /// Its exit status, if known.
    pub status: Option<ExitStatus>,
    /// The tag of the task that it was processing, or otherwise of its first unanswered task of this epoch.
    pub index: Option<&'a T>,
    /// The ordinal of that task.
    pub task: Option<u64>,
    /// Number of results of this epoch, including errors, that processes of this worker have published.
    pub answers: u64,
    /// True if it had begun that task. Its start, and batches that it replays before the task, do not count.
    pub has_begun: bool,
    /// The place of the sample that it was fetching within its index batch, if known.
    pub place: Option<u64>,
    /// Number of earlier processes in the worker's slot.
    pub generation: u32,
    /// True if it was killed because it was stuck.
    pub stalled: bool,
    /// Number of the epoch's first task.
    pub first_task: u64,
}

/// Progress of an epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Number of tasks sent.
    pub sent: u64,
    /// Number of tasks without a result.
    pub outstanding: usize,
    /// Number of undelivered tasks of each worker.
    pub loads: Vec<usize>,
    /// The undelivered tasks in order, each with its ordinal and, if known, its worker.
    pub undelivered: Vec<(u64, Option<u32>)>,
}
