//! Workers that are stuck in their start or in one batch: their status, and the report.

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
    /// Before its first batch of an epoch.
    Start,
    /// In a batch.
    Item,
}

/// A stuck worker.
#[derive(Clone, Copy, Debug)]
pub struct Stall {
    /// The worker.
    pub worker: u32,
    /// Its process id.
    pub pid: i32,
    /// The phase in which it is stuck.
    pub phase: Phase,
    /// The state that it reports.
    pub state: WorkerState,
    /// Its current task, or the next one.
    pub task: Option<TaskId>,
    /// The time for which it has been stuck.
    pub time: Duration,
    /// The longest wait for its stack dump; `None` for no dump.
    pub patience: Option<Duration>,
    /// The limit of [`Engine::set_stall_timeout`](crate::engine::Engine::set_stall_timeout), if the worker has exceeded it. Then
    /// call [`Engine::kill`](crate::engine::Engine::kill).
    pub exceeds: Option<Duration>,
}

/// The status page of a worker that is waited for, as read at a check.
pub(in crate::engine) struct Observation {
    pub(in crate::engine) process: Arc<Process>,
    /// Its first unanswered task.
    pub(in crate::engine) oldest: Option<TaskId>,
    pub(in crate::engine) state: WorkerState,
    /// The current task, or the last one.
    pub(in crate::engine) task: TaskId,
    /// Tasks that it has answered.
    pub(in crate::engine) answers: u64,
    /// The time at which the state began.
    pub(in crate::engine) since: Duration,
    /// The time at which it took its task or, in a replay, began the current batch.
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

    /// Returns true if the first unanswered task, or the message that begins an epoch, waits for the worker to take it.
    pub(in crate::engine) fn is_waited_for(&self) -> bool {
        match self.state {
            WorkerState::Idle => true,
            // It has published the previous batch, and has not taken the next task.
            WorkerState::Publish => self.oldest.is_some_and(|oldest| self.task < oldest),
            _ => false,
        }
    }

    /// Returns true if the pin thread holds the worker's answer.
    pub(in crate::engine) fn is_answered(&self) -> bool {
        self.state == WorkerState::Idle && self.answers > 0 && self.oldest.is_some_and(|oldest| self.task >= oldest)
    }
}
