//! Checks for workers that are stuck.

use std::time::Duration;

use super::core::Engine;
use super::liveness::Liveness;
use super::stalls::overdue::Killed;
use super::stalls::report::{Observation, Stall};
use crate::id::WorkerId;
use crate::trace::Kind;

impl<T, B: Send + 'static, E> Engine<T, B, E> {
    /// Sets the limits of the two [`Phase`](super::stalls::report::Phase)s, and the [`Stall::patience`]. `None` as a
    /// limit means that a worker is never stuck in that phase.
    pub fn set_stall_limits(&mut self, limits: [Option<Duration>; 2], patience: Option<Duration>) {
        self.liveness.stalls.set_limits(limits, patience);
    }

    /// Sets the time on one batch after which a worker counts as stuck and must be killed. `None` means never.
    pub fn set_stall_timeout(&mut self, limit: Option<Duration>) {
        self.liveness.overdue.set_limit(limit);
    }

    /// Returns the report of a stuck worker that has not been reported yet. After each [`Engine::after_wait`], call it
    /// until it returns `None`.
    pub fn stalled(&mut self) -> Option<Stall> {
        let stall = self.find_stalled()?;
        self.handle.trace.mark(Kind::Stalled, stall.worker, stall.task.map_or(0, |task| task.0), 0);
        Some(stall)
    }

    fn find_stalled(&mut self) -> Option<Stall> {
        let now = self.inbox.last_poll();
        if let Some(stall) = self.overdue(now) {
            return Some(stall);
        }
        // If something has arrived, it may be the result of a worker that seems stuck.
        if !self.liveness.stalls.is_check_due(now) || self.inbox.has_arrivals() {
            return None;
        }
        let workers = 0..self.arena().geometry().workers;
        let stall = workers.into_iter().find_map(|worker| {
            let observed = self.observation_of(worker)?;
            self.liveness.stalls.stall_of(worker, &observed, now)
        });
        if stall.is_none() {
            self.liveness.stalls.checked(now);
        }
        stall
    }

    /// Returns the report of a worker that has exceeded the limit of [`Engine::set_stall_timeout`]. Each worker is
    /// reported once per batch.
    pub(super) fn overdue(&mut self, now: Duration) -> Option<Stall> {
        if !self.liveness.overdue.is_check_due(now) {
            return None;
        }
        let mut next = Duration::MAX;
        for worker in 0..self.arena().geometry().workers {
            let observed = self.observation_of(worker);
            let Liveness { stalls, overdue, .. } = &mut self.liveness;
            if overdue.exceeds(worker, observed.as_ref(), now, &mut next)
                && let Some(observed) = observed.filter(|observed| !observed.process.has_exited())
            {
                return Some(overdue.stall_of(worker, &observed, now, stalls.patience()));
            }
        }
        self.liveness.overdue.checked(now, next);
        None
    }

    /// Reads a worker's status page. Returns `None` if the worker owes no answer to a task or message.
    fn observation_of(&self, worker: u32) -> Option<Observation> {
        let oldest = self.oldest_task_of(worker).map(|(task, _)| task);
        if oldest.is_none() && !self.scheduler.is_waited_for(WorkerId(worker)) {
            return None;
        }
        Some(Observation::of(&self.handle.arena, worker, self.handle.process(worker)?, oldest))
    }

    /// Kills a worker that has exceeded the limit, unless it has made progress or ended in the meantime. A local worker
    /// is killed only if it descends from this process.
    pub fn kill(&mut self, stall: &Stall) -> Killed {
        let observed = self.observation_of(stall.worker);
        self.liveness.overdue.kill(stall.worker, observed)
    }
}
