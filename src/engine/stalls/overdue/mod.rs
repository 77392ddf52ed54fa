//! Detection of workers that spend more than a limit (`stall_timeout`) on one batch. They are killed, and count as
//! dead.
//!
//! The time on a batch starts when the worker takes the task or, in a replay, when it begins the batch. The worker's
//! start does not count. If the worker is idle while a task waits for it, the time starts with the first check that
//! finds the task waiting.
//!
//! A worker is killed only if the main process has watched it on that batch for at least half of the limit. The main
//! process and its workers may be suspended and resumed together; the workers then have that much time to finish. For
//! the same reason, a long gap between two checks restarts this period.

use std::time::Duration;

use super::report::{Observation, Phase, Stall};
use crate::config::{KILLED_STACK, STALL_CHECK, STALL_PAUSE, WAIT_SLICE};
use crate::id::TaskId;
use crate::shm::layout::WorkerState;
use crate::sys;
use crate::sys::pidfd::ExitStatus;

/// The outcome of [`Engine::kill`](crate::engine::Engine::kill).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Killed {
    /// The worker was sent SIGKILL or, on another machine, a request to end.
    Yes,
    /// The worker was not signaled, because it does not descend from this process.
    No,
    /// The worker has made progress or ended in the meantime.
    Continued,
}

/// The work that a check finds a worker doing. If two checks find different work, the worker has made progress in
/// between.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Work {
    /// Nothing to which the limit applies.
    #[default]
    Nothing,
    /// A task (or, with `None`, a batch of a replay during the start), and the time at which the worker took or began
    /// it.
    Batch(Option<TaskId>, Duration),
    /// A task (or, with `None`, the message that begins an epoch) that the worker has not taken.
    Late(Option<TaskId>),
}

impl Work {
    fn of(observed: &Observation) -> Self {
        match observed.state {
            WorkerState::Left => Self::Nothing,
            // During its start a worker fetches batches only in a replay.
            WorkerState::Starting if observed.task_since <= observed.since => Self::Nothing,
            WorkerState::Starting => Self::Batch(None, observed.task_since),
            _ if observed.is_answered() => Self::Nothing,
            _ if observed.has_task_waiting() => Self::Late(observed.oldest),
            // Limit the time to the age of the process, because the page may be damaged.
            _ => Self::Batch(Some(observed.task), observed.task_since.max(observed.process.started)),
        }
    }

    fn task(self) -> Option<TaskId> {
        match self {
            Self::Nothing => None,
            Self::Batch(task, _) | Self::Late(task) => task,
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Watched {
    work: Work,
    /// The time of the first check that found this work.
    seen: Duration,
    /// True if the worker has been reported for this work.
    reported: bool,
    /// True if the worker's process was killed because of the limit.
    killed: bool,
}

impl Watched {
    /// Returns the time at which the worker exceeds the limit. Returns `None` if the limit does not apply to its work,
    /// or if the worker has already been reported or killed.
    fn due(&self, limit: Duration, watching_since: Duration) -> Option<Duration> {
        let seen = self.seen.max(watching_since);
        match self.work {
            _ if self.reported || self.killed => None,
            Work::Nothing => None,
            Work::Batch(_, since) => Some((since + limit).max(seen + limit / 2)),
            Work::Late(_) => Some(seen + limit),
        }
    }
}

/// The limit, and the results of the checks.
#[derive(Debug)]
pub(in crate::engine) struct Overdue {
    /// The limit; `None` if no worker is ever killed.
    limit: Option<Duration>,
    /// Time of the last completed check.
    last_check: Duration,
    /// Start of the current period without a long gap between checks.
    watching_since: Duration,
    /// The earliest time at which a worker exceeds the limit if it makes no progress.
    due: Duration,
    watched: Box<[Watched]>,
}

impl Overdue {
    pub(in crate::engine) fn new(workers: u32) -> Self {
        let (zero, watched) = (Duration::ZERO, vec![Watched::default(); workers as usize].into());
        Self { limit: None, last_check: zero, watching_since: zero, due: Duration::MAX, watched }
    }

    /// Resets a worker's state for its next process.
    pub(in crate::engine) fn forget(&mut self, worker: u32) {
        self.watched[worker as usize] = Watched::default();
    }

    /// Returns true if a worker that ended with exit status `status` was killed because of the limit. `None` is an
    /// unknown status.
    pub(in crate::engine) fn was_killed(&self, worker: u32, status: Option<ExitStatus>) -> bool {
        let by_sigkill = matches!(status, None | Some(ExitStatus::Signal(libc::SIGKILL)));
        by_sigkill && self.watched[worker as usize].killed
    }

    /// Returns the maximum length of a wait that begins now. The wait ends in time for the next check. It is at most
    /// half of the limit, so that no more time than that passes before a check sees that a worker has taken a task.
    #[inline]
    pub(in crate::engine) fn slice(&self, now: Duration) -> Duration {
        match self.limit {
            None => Duration::MAX,
            Some(limit) => self.due.saturating_sub(now).min(limit / 2).max(Duration::from_millis(1)),
        }
    }

    /// Returns true if a check is due. After a long gap since the last check, also restarts the period for which the
    /// workers have been watched.
    pub(in crate::engine) fn is_check_due(&mut self, now: Duration) -> bool {
        if self.limit.is_none() {
            return false;
        }
        let gap = now.saturating_sub(self.last_check);
        if gap > WAIT_SLICE + STALL_PAUSE {
            self.watching_since = now;
        }
        gap >= STALL_CHECK || now >= self.due
    }

    /// Sets the time on one batch after which a worker must be killed. `None` means never.
    pub(in crate::engine) fn set_limit(&mut self, limit: Option<Duration>) {
        self.limit = limit;
    }

    /// Checks a worker, given its current status. Returns true if the worker exceeds the limit, but only once per
    /// batch. If it would exceed the limit later, lowers `next` to that time.
    pub(in crate::engine) fn exceeds(
        &mut self,
        worker: u32,
        observed: Option<&Observation>,
        now: Duration,
        next: &mut Duration,
    ) -> bool {
        let Some(limit) = self.limit else { return false };
        let work = observed.map_or(Work::Nothing, Work::of);
        let watched = &mut self.watched[worker as usize];
        if watched.work != work {
            *watched = Watched { work, seen: now, reported: false, killed: watched.killed };
        }
        let Some(due) = watched.due(limit, self.watching_since) else { return false };
        if due > now {
            *next = (*next).min(due);
            return false;
        }
        watched.reported = true;
        true
    }

    /// Records that a check has found no further overdue worker, and that the earliest one may exceed the limit at
    /// `next`.
    pub(in crate::engine) fn checked(&mut self, now: Duration, next: Duration) {
        (self.last_check, self.due) = (now.max(self.last_check), next);
    }

    /// Returns the report of a worker that exceeds the limit.
    pub(in crate::engine) fn stall_of(
        &self,
        worker: u32,
        observed: &Observation,
        now: Duration,
        patience: Option<Duration>,
    ) -> Stall {
        let Watched { work, seen, .. } = self.watched[worker as usize];
        let since = if let Work::Batch(_, since) = work { since } else { seen };
        Stall {
            worker,
            pid: observed.process.pid,
            phase: Phase::Item,
            state: observed.state,
            task: work.task(),
            time: now.saturating_sub(since),
            patience: patience.map(|patience| patience.min(KILLED_STACK)),
            exceeds: self.limit,
        }
    }

    /// Kills a worker that exceeds the limit, unless its current status `observed` shows that it has made progress or
    /// ended.
    pub(in crate::engine) fn kill(&mut self, worker: u32, observed: Option<Observation>) -> Killed {
        // No checks ran during the stack dump. Do not count that time as a gap.
        self.last_check = self.last_check.max(sys::clock::monotonic());
        let watched = &mut self.watched[worker as usize];
        let same = |observed: &Observation| Work::of(observed) == watched.work && !observed.process.has_exited();
        let Some(observed) = observed.filter(same) else { return Killed::Continued };
        if !observed.process.descends && observed.process.link.is_none() {
            return Killed::No;
        }
        watched.killed = true;
        observed.process.signal(libc::SIGKILL);
        Killed::Yes
    }
}

#[cfg(test)]
mod tests;
