//! A copy of a worker's status page.

use crate::shm::layout::{StatusPage, Terminated, WorkerState};
use crate::sync::Ordering;

/// A copy of a worker's status page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// The number of a [`WorkerState`].
    pub state: u32,
    /// The process ID; 0 before the start.
    pub pid: u32,
    /// The current task, or the last one.
    pub task: u64,
    /// Number of tasks and resume messages answered so far.
    pub tasks_done: u64,
    /// The number of a [`Terminated`].
    pub terminated: u32,
    /// Nanoseconds that the worker has been in its current state.
    pub in_state_ns: u64,
    /// Nanoseconds spent in each state before the current one was entered, indexed by the state's number.
    pub spent_ns: [u64; WorkerState::COUNT],
}

impl Status {
    /// Reads a status page at the monotonic time `now`, in nanoseconds.
    pub(super) fn of(page: &StatusPage, now: u64) -> Self {
        Self {
            state: page.state.load(Ordering::Relaxed),
            pid: page.pid.load(Ordering::Relaxed),
            task: page.task.load(Ordering::Relaxed),
            tasks_done: page.tasks_done.load(Ordering::Relaxed),
            terminated: page.terminated.load(Ordering::Relaxed),
            in_state_ns: now.saturating_sub(page.since_ns.load(Ordering::Relaxed)),
            spent_ns: std::array::from_fn(|state| page.spent_ns[state].load(Ordering::Relaxed)),
        }
    }

    /// Returns the names of `state` and `terminated`.
    pub fn names(&self) -> (&'static str, &'static str) {
        (WorkerState::from_u32(self.state).name(), Terminated::name_of(self.terminated))
    }
}
