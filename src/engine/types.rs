//! What the engine answers.

use std::time::Duration;

use super::completions::Incoming;
use crate::scheduler::Death;
use crate::sys::pidfd::ExitStatus;

/// What `next` has to do now.
#[derive(Debug)]
pub enum Step<T, B = (), E = ()> {
    /// Hand out a batch, or raise the error that stands in its place.
    Deliver {
        /// The task's tag.
        tag: T,
        /// The result.
        incoming: Incoming,
        /// The batch, if it was made ready when it came.
        ready: Option<B>,
    },
    /// Read a result once more: a signal handler had cut off its decoding.
    Unread(B),
    /// Raise an error of the sampler.
    Raise(E),
    /// Open a result that has just come ([`ResultKind::Tied`](crate::wire::ResultKind::Tied)), and give it to
    /// [`Engine::opened`](super::Engine::opened), or what is left of it to
    /// [`Delivery::open_interrupted`](super::delivery::Delivery::open_interrupted).
    Open {
        /// The result.
        incoming: Incoming,
        /// What an interrupted attempt has left. The message in shared memory is gone then.
        ready: Option<B>,
    },
    /// Submit one more index, and ask again.
    Submit,
    /// Raise the death of a worker; see [`Engine::report`](super::Engine::report).
    Dead(Death),
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

/// All that is known of a worker's death.
#[derive(Debug)]
pub struct DeathReport<'a, T> {
    /// The worker.
    pub worker: u32,
    /// Its process id.
    pub pid: i32,
    /// How it ended, where the kernel tells.
    pub status: Option<ExitStatus>,
    /// The index of the first task that it had not answered.
    pub index: Option<&'a T>,
    /// No batch that is older is undelivered.
    pub oldest: bool,
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
