//! What the engine answers.

use std::time::Duration;

use super::completions::Incoming;
use crate::id::TaskId;

/// What `next` has to do now.
#[derive(Debug)]
pub enum Step<T, B = ()> {
    /// Hand out a batch, or raise the error that stands in its place.
    Deliver {
        /// The task's tag.
        tag: T,
        /// The result.
        incoming: Incoming,
        /// The batch, if it was made ready when it came.
        ready: Option<B>,
    },
    /// Open a result that has just come ([`ResultKind::Tied`](crate::wire::ResultKind::Tied)), and give it to [`Engine::opened`](super::Engine::opened).
    Open(Incoming),
    /// Submit one more index, and ask again.
    Submit,
    /// Raise the death of a worker.
    Dead {
        /// The worker.
        worker: u32,
        /// The first task that was lost with it.
        lost: Option<TaskId>,
    },
    /// The epoch is at its end.
    End,
    /// The timeout has expired; nothing is lost.
    TimedOut,
    /// Nothing yet: wait, until this time at the most.
    Wait(Option<Duration>),
    /// Somebody has shut the iterator down.
    Closed,
    /// The pin thread has ended, and why; what it had handed on was delivered.
    NoPinThread(String),
}

/// Where an epoch stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Tasks sent.
    pub sent: u64,
    /// Tasks without a result.
    pub outstanding: usize,
    /// Tasks not delivered, by worker.
    pub loads: Vec<usize>,
    /// The number in the epoch and the worker of each task that was not delivered, in the order of their numbers.
    pub undelivered: Vec<(u64, u32)>,
}
