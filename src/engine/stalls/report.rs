//! The observed status of workers, and reports of workers that are stuck during their start or on one batch.

use std::sync::Arc;
use std::time::Duration;

use crate::engine::process::Process;
use crate::id::TaskId;
use crate::shm::arena::Arena;
use crate::shm::layout::WorkerState;
use crate::sync::{AtomicU64, Ordering};

/// The phase of an epoch in which a worker is stuck.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The worker's start, before its first batch of an epoch.
    Start,
    /// A batch.
    Item,
}

/// A report of a stuck worker.
#[derive(Clone, Copy, Debug)]
pub struct Stall {
    /// The worker.
    pub worker: u32,
    /// The worker's process ID.
    pub pid: i32,
    /// The phase in which the worker is stuck.
    pub phase: Phase,
    /// The state on the worker's status page.
    pub state: WorkerState,
    /// The worker's current task, or the one that it has not taken. `None` if there is no such task and, if `exceeds`
    /// is set, in a replay during the worker's start.
    pub task: Option<TaskId>,
    /// The time for which the worker has been stuck.
    pub time: Duration,
    /// The maximum wait for the worker's stack dump; `None` if no dump is wanted.
    pub patience: Option<Duration>,
    /// The limit of [`Engine::set_stall_timeout`](crate::engine::Engine::set_stall_timeout), if the worker has exceeded
    /// it. The caller must then call [`Engine::kill`](crate::engine::Engine::kill).
    pub exceeds: Option<Duration>,
}

/// The status of a worker that owes an answer, as read by a check.
pub(in crate::engine) struct Observation {
    pub(in crate::engine) process: Arc<Process>,
    /// The worker's oldest unanswered task.
    pub(in crate::engine) oldest: Option<TaskId>,
    pub(in crate::engine) state: WorkerState,
    /// The worker's current task, or its last one.
    pub(in crate::engine) task: TaskId,
    /// Number of tasks and resume messages that the worker has answered.
    pub(in crate::engine) answers: u64,
    /// The time at which the worker entered its state.
    pub(in crate::engine) since: Duration,
    /// The time at which the worker took `task` or, in a replay, began the current batch.
    pub(in crate::engine) task_since: Duration,
}

impl Observation {
    /// Reads a worker's status page.
    pub(in crate::engine) fn of(arena: &Arena, worker: u32, process: Arc<Process>, oldest: Option<TaskId>) -> Self {
        let page = &arena.control(worker).status;
        let time = |word: &AtomicU64| Duration::from_nanos(word.load(Ordering::Relaxed));
        Self {
            process,
            oldest,
            state: WorkerState::from_u32(page.state.load(Ordering::Relaxed)),
            task: TaskId(page.task.load(Ordering::Relaxed)),
            answers: page.tasks_done.load(Ordering::Relaxed),
            since: time(&page.since_ns),
            task_since: time(&page.task_since_ns),
        }
    }

    /// Returns true if the worker has not yet taken its oldest unanswered task or, without one, the message that begins
    /// an epoch.
    pub(in crate::engine) fn has_task_waiting(&self) -> bool {
        match self.state {
            WorkerState::Idle => true,
            // The worker has published its last batch, and has not taken the next task.
            WorkerState::Publish => self.oldest.is_some_and(|oldest| self.task < oldest),
            _ => false,
        }
    }

    /// Returns true if the worker has answered its oldest task, and the pin thread still holds the answer.
    pub(in crate::engine) fn is_answered(&self) -> bool {
        self.state == WorkerState::Idle && self.answers > 0 && self.oldest.is_some_and(|oldest| self.task >= oldest)
    }
}
