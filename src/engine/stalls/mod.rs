//! Detection of workers that are stuck during their start or on one batch, for the log. [`overdue`] finds the workers
//! that must be killed.
//!
//! The main process checks the status pages a few times per second while it waits for results. The checks need no
//! thread and cost nothing per batch.

pub mod overdue;
pub mod report;
mod stack;

use std::time::Duration;

use self::report::{Observation, Phase, Stall};
use crate::config::STALL_CHECK;
use crate::id::TaskId;
use crate::shm::layout::WorkerState;

/// The state of a worker at the last check.
#[derive(Clone, Copy, Debug, Default)]
struct WatchedWorker {
    /// The worker's oldest unanswered task.
    task: Option<TaskId>,
    /// Time of the first check that found this task.
    seen: Duration,
    /// The last report: the phase, the task, and whether the task was still waiting for the worker.
    reported: Option<(Phase, Option<TaskId>, bool)>,
}

/// The limits, and the results of the checks.
#[derive(Debug)]
pub(super) struct Stalls {
    /// Time in each phase after which a worker counts as stuck, indexed by [`Phase`]; `None` means never.
    limits: [Option<Duration>; 2],
    /// See [`Stall::patience`].
    patience: Option<Duration>,
    /// Time of the last check that found no further stall.
    last_check: Duration,
    watched: Box<[WatchedWorker]>,
}

impl Stalls {
    pub(super) fn new(workers: u32) -> Self {
        let watched = vec![WatchedWorker::default(); workers as usize].into();
        Self { limits: [None; 2], patience: None, last_check: Duration::ZERO, watched }
    }

    /// Resets a worker's state for its next process.
    pub(super) fn forget(&mut self, worker: u32) {
        self.watched[worker as usize] = WatchedWorker::default();
    }

    /// Sets the limits of the phases and the [`Stall::patience`]. `None` as a limit means that a worker is never stuck
    /// in that phase.
    pub(super) fn set_limits(&mut self, limits: [Option<Duration>; 2], patience: Option<Duration>) {
        (self.limits, self.patience) = (limits, patience);
    }

    /// See [`Stall::patience`].
    pub(super) fn patience(&self) -> Option<Duration> {
        self.patience
    }

    /// Returns true if a check is due.
    pub(super) fn is_check_due(&self, now: Duration) -> bool {
        now.saturating_sub(self.last_check) >= STALL_CHECK
    }

    /// Records that a check has found no further stall.
    pub(super) fn checked(&mut self, now: Duration) {
        self.last_check = now;
    }

    /// Returns a report if the worker is stuck. Each stall is reported once.
    pub(super) fn stall_of(&mut self, worker: u32, observed: &Observation, now: Duration) -> Option<Stall> {
        let Observation { process, oldest, state, task, .. } = observed;
        let (oldest, waits) = (*oldest, observed.has_task_waiting());
        let watched = &mut self.watched[worker as usize];
        if watched.task != oldest || watched.seen.is_zero() {
            (watched.task, watched.seen) = (oldest, now);
        }
        let (phase, task, since) = match *state {
            WorkerState::Left => return None,
            WorkerState::Starting if observed.answers == 0 => (Phase::Start, oldest, process.started),
            WorkerState::Starting => (Phase::Start, oldest, observed.since),
            _ if observed.is_answered() => return None,
            _ if waits => (Phase::Item, oldest, watched.seen),
            _ => (Phase::Item, Some(*task), observed.task_since),
        };
        // Limit the time to the age of the process, because the page may be damaged.
        let time = now.saturating_sub(since.max(process.started));
        let limit = self.limits[phase as usize]?;
        // A worker that does not take a task is reported again if it later takes the task but does not finish it.
        if time < limit || watched.reported == Some((phase, task, waits)) || process.has_exited() {
            return None;
        }
        watched.reported = Some((phase, task, waits));
        let (pid, patience) = (process.pid, self.patience);
        Some(Stall { worker, pid, phase, state: *state, task, time, patience, exceeds: None })
    }
}
