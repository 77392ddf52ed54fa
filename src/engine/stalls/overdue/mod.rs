//! Workers that are in one batch for longer than a limit (`stall_timeout`). They are killed, and count as dead.
//!
//! The time in a batch counts from the moment at which the worker took it. A batch that it makes again counts from its
//! beginning. A start does not count. An idle worker counts only while a task waits for it, from the first check that
//! finds the task waiting.
//!
//! A worker is killed only if the main process has watched it in that batch for half of the limit. A job may be
//! suspended and continued as a whole: its workers then have that time to finish. For the same reason a gap between two
//! checks restarts the watch.

use std::time::Duration;

use super::report::{Phase, Shown, Stall};
use crate::config::{KILLED_STACK, STALL_CHECK, STALL_PAUSE, WAIT_SLICE};
use crate::id::TaskId;
use crate::shm::layout::WorkerState;
use crate::sys;
use crate::sys::pidfd::ExitStatus;

/// The outcome of [`Engine::kill`](crate::engine::Engine::kill).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Killed {
    /// It has sent SIGKILL.
    Yes,
    /// The worker does not descend from this process, which does not signal it.
    No,
    /// The worker has continued or ended in the meantime.
    WentOn,
}

/// The work of a worker. The worker has continued once this differs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Work {
    /// Nothing that counts.
    #[default]
    Nothing,
    /// A task, or a batch of a replay, since this time.
    Batch(Option<TaskId>, Duration),
    /// It lets a task wait, or the message that begins an epoch.
    Late(Option<TaskId>),
}

impl Work {
    fn of(shown: &Shown) -> Self {
        match shown.state {
            WorkerState::Left => Self::Nothing,
            // Within the start, only a replay has batches.
            WorkerState::Starting if shown.task_since <= shown.since => Self::Nothing,
            WorkerState::Starting => Self::Batch(None, shown.task_since),
            _ if shown.is_answered() => Self::Nothing,
            _ if shown.is_waited_for() => Self::Late(shown.oldest),
            // At most the age of the process, because the page may be damaged.
            _ => Self::Batch(Some(shown.task), shown.task_since.max(shown.process.started)),
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
    /// Time of the first check that found it at this work.
    seen: Duration,
    /// It was reported at this work.
    reported: bool,
    /// This process was killed.
    killed: bool,
}

impl Watched {
    /// Returns the time at which the worker exceeds the limit. `None` if it does nothing that counts, or was reported.
    fn due(&self, limit: Duration, watching: Duration) -> Option<Duration> {
        let seen = self.seen.max(watching);
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
    /// `None`: no worker is killed.
    limit: Option<Duration>,
    /// Time of the last check.
    looked: Duration,
    /// Time since which the checks have followed each other without a gap.
    watching: Duration,
    /// Time at which the first worker will exceed the limit, if it does not continue.
    due: Duration,
    watched: Box<[Watched]>,
}

impl Overdue {
    pub(in crate::engine) fn new(workers: u32) -> Self {
        let (zero, watched) = (Duration::ZERO, vec![Watched::default(); workers as usize].into());
        Self { limit: None, looked: zero, watching: zero, due: Duration::MAX, watched }
    }

    /// Forgets a worker's process.
    pub(in crate::engine) fn forget(&mut self, worker: u32) {
        self.watched[worker as usize] = Watched::default();
    }

    /// Returns true if a worker that ended with this status was killed for the limit.
    pub(in crate::engine) fn was_killed(&self, worker: u32, status: Option<ExitStatus>) -> bool {
        let by_it = matches!(status, None | Some(ExitStatus::Signal(libc::SIGKILL)));
        by_it && self.watched[worker as usize].killed
    }

    /// Returns the longest wait that begins now. A task that is taken during the wait is seen within half of its limit.
    #[inline]
    pub(in crate::engine) fn slice(&self, now: Duration) -> Duration {
        match self.limit {
            None => Duration::MAX,
            Some(limit) => self.due.saturating_sub(now).min(limit / 2).max(Duration::from_millis(1)),
        }
    }

    /// Returns true if the workers are to be checked now.
    pub(in crate::engine) fn begins_check(&mut self, now: Duration) -> bool {
        if self.limit.is_none() {
            return false;
        }
        let gap = now.saturating_sub(self.looked);
        if gap > WAIT_SLICE + STALL_PAUSE {
            self.watching = now;
        }
        gap >= STALL_CHECK || now >= self.due
    }

    /// Sets the time in one batch after which a worker is to be killed; `None`: never.
    pub(in crate::engine) fn set_limit(&mut self, limit: Option<Duration>) {
        self.limit = limit;
    }

    /// Returns true if a worker that shows this exceeds the limit, once for each batch. If it will exceed it later,
    /// lowers `next` to that time.
    pub(in crate::engine) fn exceeds(
        &mut self,
        worker: u32,
        shown: Option<&Shown>,
        now: Duration,
        next: &mut Duration,
    ) -> bool {
        let Some(limit) = self.limit else { return false };
        let work = shown.map_or(Work::Nothing, Work::of);
        let watched = &mut self.watched[worker as usize];
        if watched.work != work {
            *watched = Watched { work, seen: now, reported: false, killed: watched.killed };
        }
        let Some(due) = watched.due(limit, self.watching) else { return false };
        if due > now {
            *next = (*next).min(due);
            return false;
        }
        watched.reported = true;
        true
    }

    /// Notes that a check has found no other worker, and that the next one exceeds the limit at `next`.
    pub(in crate::engine) fn checked(&mut self, now: Duration, next: Duration) {
        (self.looked, self.due) = (now.max(self.looked), next);
    }

    /// Returns the report of a worker that exceeds the limit.
    pub(in crate::engine) fn stall_of(
        &self,
        worker: u32,
        shown: &Shown,
        now: Duration,
        patience: Option<Duration>,
    ) -> Stall {
        let Watched { work, seen, .. } = self.watched[worker as usize];
        let since = if let Work::Batch(_, since) = work { since } else { seen };
        Stall {
            worker,
            pid: shown.process.pid,
            phase: Phase::Item,
            state: shown.state,
            task: work.task(),
            time: now.saturating_sub(since),
            patience: patience.map(|patience| patience.min(KILLED_STACK)),
            exceeds: self.limit,
        }
    }

    /// Kills a worker that exceeds the limit, and that shows this now.
    pub(in crate::engine) fn kill(&mut self, worker: u32, shown: Option<Shown>) -> Killed {
        // The stack dump took some time, in which nothing was checked.
        self.looked = self.looked.max(sys::clock::monotonic());
        let watched = &mut self.watched[worker as usize];
        let same = |shown: &Shown| Work::of(shown) == watched.work && !shown.process.has_exited();
        let Some(shown) = shown.filter(same) else { return Killed::WentOn };
        if !shown.process.descends && shown.process.link.is_none() {
            return Killed::No;
        }
        watched.killed = true;
        shown.process.signal(libc::SIGKILL);
        Killed::Yes
    }
}

#[cfg(test)]
mod tests;
