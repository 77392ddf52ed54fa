//! Replacement of a dead worker's process.

use std::time::Duration;

use super::core::Engine;
use crate::config::TIED_EXIT;
use crate::error::{Error, Result};
use crate::id::WorkerId;
use crate::scheduler::Event;
use crate::wire::TaskKind;

impl<T, B: Send + 'static, E> Engine<T, B, E> {
    /// Returns true if workers that die may be replaced.
    pub fn restarts(&self) -> bool {
        self.liveness.restarts()
    }

    /// Empties a vacant worker's slot for its next process, which [`Engine::started`] registers. Results that the dead
    /// process published stay valid, and so do the leases on its blocks. The payloads of tasks that it did not take are
    /// released. The call may be repeated until `started` succeeds. If a failed `started` has filled the slot, the
    /// process in it must have ended.
    ///
    /// Errors: [`Error::Usage`] if the worker is not vacant.
    pub fn vacate(&mut self, worker: u32) -> Result<()> {
        // A worker becomes vacant after its process has been removed from the poll set and its ring has been drained.
        if !self.scheduler.is_vacant(WorkerId(worker)) {
            return Err(Error::usage(format!("worker {worker} is not vacant")));
        }
        if let Some(process) = self.handle.process(worker) {
            self.handle.vacate(worker)?;
            self.handle.meter.keep_worker(&self.handle.arena, worker, process.pid as u32);
        }
        let result = self.outbox.reset_worker(worker);
        self.sticky(result)?;
        self.liveness.forget(worker);
        Ok(())
    }

    /// Returns true if the tied result could not be opened because its worker, which may be replaced, is ending. The
    /// result is then dropped, the death is reported, and the next process produces the result again. Call this if an
    /// attempt to open the result failed, before [`Engine::opened`].
    pub fn lost_tied(&mut self) -> Result<bool> {
        let worker = self.delivery.tied_worker().filter(|_| self.liveness.restarts());
        let Some(worker) = worker.filter(|worker| self.handle.exits_within(*worker, TIED_EXIT)) else {
            return Ok(false);
        };
        self.inbox.unwatch(worker)?;
        let result = self.ended(worker);
        self.sticky(result)?;
        Ok(true)
    }

    /// Postpones the replacement of a vacant worker: [`Step::Vacant`](super::Step::Vacant) names it again after `time`.
    pub fn postpone(&mut self, worker: u32, time: Duration) -> Result<()> {
        self.times.tick();
        let until = self.times.now().saturating_add(time);
        self.event(Event::Postponed { worker: WorkerId(worker), until })
    }

    /// Makes the death of a vacant worker final.
    pub fn give_up(&mut self, worker: u32) -> Result<()> {
        self.event(Event::GivenUp(WorkerId(worker)))?;
        self.perform_actions()
    }

    /// Records that a vacant worker has a process again.
    pub(super) fn replaced(&mut self, worker: u32) -> Result<()> {
        self.event(Event::WorkerReplaced(WorkerId(worker)))?;
        self.liveness.replaced(worker);
        self.handle.answers().resumed(worker);
        let result = self.perform_actions();
        self.sticky(result)
    }

    /// Returns the tag of the task that must be sent again; see [`Step::Resend`](super::Step::Resend).
    pub fn unsent(&self) -> Option<&T> {
        self.scheduler.unsent().map(|(_, _, tag)| tag)
    }

    /// Sends the task of [`Engine::unsent`] to its worker. Does not wait for memory; see [`Engine::submit`].
    pub fn resend(&mut self, kind: TaskKind, payload: &[u8]) -> Result<()> {
        self.handle.check_ours()?;
        let Some((worker, task)) = self.scheduler.unsent().map(|(worker, task, _)| (worker, task)) else {
            return Err(Error::usage("no task needs to be sent again"));
        };
        let mut entry = self.outbox.entry(kind, payload)?;
        entry.task = task.0;
        self.scheduler.resent();
        let pushed = self.outbox.push(worker.0, &entry);
        self.sticky(pushed)
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};
    use std::time::Duration;

    use super::*;
    use crate::scheduler::Settings;
    use crate::shm::arena::Arena;
    use crate::sys::poll::WaitOutcome;

    fn kill(child: &mut Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn an_event_of_an_earlier_process_does_not_affect_the_current_one() {
        let arena = Arena::create_sized(1 << 30, 1, 4).unwrap();
        let settings = Settings { restarts: true, ..Settings::torch(1, 4, true) };
        let mut engine = Engine::<u64>::over(arena, settings).unwrap();
        let start = || Command::new("sleep").arg("1000").spawn().unwrap();
        let mut first = start();
        engine.started(0, first.id() as i32).unwrap();
        kill(&mut first);
        engine.wait(None).unwrap();
        let stale = engine.inbox.take_ready();
        assert_eq!(stale.len(), 1);
        engine.inbox.put_ready(stale.clone());
        engine.after_wait().unwrap();
        engine.vacate(0).unwrap();
        let mut second = start();
        engine.started(0, second.id() as i32).unwrap();
        engine.inbox.put_ready(stale);
        engine.handle_ready().unwrap();
        assert!(!engine.inbox.is_blind() && engine.handle.alive() == 1);
        // The end of the second process is still detected.
        kill(&mut second);
        assert_eq!(engine.inbox.sleep(Duration::from_secs(20)).unwrap(), Some(WaitOutcome::Ready));
        engine.handle_ready().unwrap();
        assert!(engine.inbox.poll_if_due(Duration::MAX).unwrap());
        assert!(engine.inbox.take_ready().is_empty());
    }
}
