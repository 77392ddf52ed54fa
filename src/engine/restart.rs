//! Replacement of a dead worker's process.

use std::time::Duration;

use super::process::Process;
use super::{DeathReport, Engine};
use crate::config::TIED_EXIT;
use crate::error::{Error, Result};
use crate::id::WorkerId;
use crate::scheduler::{Death, Event};
use crate::shm::block::CONSUMER;
use crate::shm::layout::WorkerState;
use crate::sync::Ordering;
use crate::sys::pidfd::ExitStatus;
use crate::wire::{TaskEntry, TaskKind};

/// What is known of a process that has died, for reports. Its slot and its status page may have been emptied since.
#[derive(Clone, Copy, Debug)]
pub(super) struct Remains {
    pid: i32,
    status: Option<ExitStatus>,
    /// The task that it had taken last, whether it had begun it, and the place of the sample in it.
    task: u64,
    has_begun: bool,
    place: Option<u64>,
    generation: u32,
    stalled: bool,
}

impl<T, B: Send + 'static, E> Engine<T, B, E> {
    /// Whether workers that die may be replaced.
    pub fn restarts(&self) -> bool {
        self.restarts
    }

    /// Reports a worker's death to the scheduler.
    pub(super) fn died(&mut self, worker: u32) -> Result<()> {
        let mut held = Vec::new();
        while let Some(task) = self.queue.as_mut().and_then(|queue| queue.lost_with(worker)) {
            held.push(task);
        }
        if self.restarts {
            let remains = self.remains_of(worker);
            self.remains.insert(worker, remains);
        }
        self.event(Event::WorkerDied { worker: WorkerId(worker), held })?;
        if self.queue.is_some() {
            // It may have taken a wake-up with it, while another task waits and the others sleep.
            self.handle.wake(worker)?;
        }
        self.effects()
    }

    fn remains_of(&self, worker: u32) -> Remains {
        let process = self.handle.process(worker);
        let status = process.as_deref().and_then(Process::status);
        let page = &self.arena().control(worker).status;
        Remains {
            pid: process.as_ref().map_or(0, |process| process.pid),
            status,
            task: page.task.load(Ordering::Relaxed),
            has_begun: page.has_begun(),
            // Once the samples are made, none of them is to blame.
            place: (page.has_begun() && page.state.load(Ordering::Relaxed) == WorkerState::Fetch as u32)
                .then(|| page.place.load(Ordering::Relaxed).checked_sub(1))
                .flatten(),
            generation: self.handle.generation(worker).saturating_sub(1),
            stalled: self.stalls.overdue.was_killed(worker, status),
        }
    }

    /// Details of a death.
    pub fn report(&self, death: Death) -> DeathReport<'_, T> {
        let worker = death.worker.0;
        let remains = self.remains.get(&worker).copied().unwrap_or_else(|| self.remains_of(worker));
        let tasks = || self.scheduler.tasks_of(death.worker);
        let at = tasks().find(|(task, _)| task.0 == remains.task);
        let task = at.or_else(|| tasks().next());
        let first_task = self.scheduler.first_task().0;
        DeathReport {
            worker,
            pid: remains.pid,
            status: remains.status,
            index: task.map(|(_, index)| index),
            task: task.and_then(|(task, _)| task.0.checked_sub(first_task)),
            answers: self.answered[worker as usize],
            has_begun: at.is_some() && remains.has_begun,
            place: at.and(remains.place),
            generation: remains.generation,
            stalled: remains.stalled,
            first_task,
        }
    }

    /// Empties a vacant worker's slot for its next process, see [`Engine::started`]. Its published results count, its leases
    /// stay valid, and the blocks of tasks that it had not taken are released. May be repeated until `started`, once the
    /// process that used the slot meanwhile has ended.
    ///
    /// Errors: [`Error::Usage`] if the worker is not vacant.
    pub fn vacate(&mut self, worker: u32) -> Result<()> {
        // A worker is vacant after its process has left the poll set and its ring has been drained.
        if !self.scheduler.is_vacant(WorkerId(worker)) {
            return Err(Error::usage(format!("worker {worker} is not vacant")));
        }
        if let Some(process) = self.handle.process(worker) {
            self.handle.vacate(worker)?;
            self.handle.meter.keep_worker(&self.handle.arena, worker, process.pid as u32);
        }
        let (arena, region) = (self.arena().clone(), self.allocator.region());
        let withdrawn = |entry| {
            if let Ok(TaskEntry { block: Some(block), .. }) = TaskEntry::from_words(&entry) {
                arena.release(region, block, CONSUMER);
            }
        };
        let result = arena.reset_worker(worker, withdrawn);
        self.sticky(result)?;
        self.stalls.forget(worker);
        Ok(())
    }

    /// Whether the tied result could not be opened because its worker ends, and may be replaced: then it is made again. Call it
    /// before [`Engine::opened`] with an error.
    pub fn lost_tied(&mut self) -> Result<bool> {
        let worker = self.delivery.tied_worker().filter(|_| self.restarts);
        let Some(worker) = worker.filter(|worker| self.handle.exits(*worker, TIED_EXIT)) else {
            return Ok(false);
        };
        if let Some(watched) = self.unwatched.iter().position(|unwatched| *unwatched == worker) {
            self.unwatched.swap_remove(watched);
        } else {
            self.poll.remove(self.handle.token_of(worker))?;
        }
        let result = self.ended(worker);
        self.sticky(result)?;
        Ok(true)
    }

    /// Lets [`Step::Vacant`](super::Step::Vacant) name a vacant worker again after this time.
    pub fn postpone(&mut self, worker: u32, time: Duration) -> Result<()> {
        self.tick();
        let until = self.now.saturating_add(time);
        self.event(Event::Postponed { worker: WorkerId(worker), until })
    }

    /// Makes the death of a vacant worker final.
    pub fn give_up(&mut self, worker: u32) -> Result<()> {
        self.event(Event::GivenUp(WorkerId(worker)))?;
        self.effects()
    }

    /// A vacant worker has a process again.
    pub(super) fn replaced(&mut self, worker: u32) -> Result<()> {
        self.event(Event::WorkerReplaced(WorkerId(worker)))?;
        self.remains.remove(&worker);
        self.handle.answers().resumed(worker);
        let result = self.effects();
        self.sticky(result)
    }

    /// The tag of the task to send again: [`Step::Resend`](super::Step::Resend).
    pub fn unsent(&self) -> Option<&T> {
        self.scheduler.unsent().map(|(_, _, tag)| tag)
    }

    /// Sends the task of [`Engine::unsent`] to its worker. Does not wait for memory, see [`Engine::submit`].
    pub fn resend(&mut self, kind: TaskKind, payload: &[u8]) -> Result<()> {
        self.handle.check_ours()?;
        let Some((worker, task)) = self.scheduler.unsent().map(|(worker, task, _)| (worker, task)) else {
            return Err(Error::usage("no task is to be sent again"));
        };
        let mut entry = self.entry(kind, payload)?;
        entry.task = task.0;
        self.scheduler.resent();
        let pushed = self.push(worker.0, &entry);
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

    fn kill(child: &mut Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn an_event_of_an_earlier_process_says_nothing_about_the_present_one() {
        let arena = Arena::create_sized(1 << 30, 1, 4).unwrap();
        let settings = Settings { restarts: true, ..Settings::torch(1, 4, true) };
        let mut engine = Engine::<u64>::over(arena, settings).unwrap();
        let start = || Command::new("sleep").arg("1000").spawn().unwrap();
        let mut first = start();
        engine.started(0, first.id() as i32).unwrap();
        kill(&mut first);
        engine.wait(None).unwrap();
        let stale = engine.ready.clone();
        assert_eq!(stale.len(), 1);
        engine.after_wait().unwrap();
        engine.vacate(0).unwrap();
        let mut second = start();
        engine.started(0, second.id() as i32).unwrap();
        engine.ready = stale;
        engine.take_notice().unwrap();
        assert!(engine.unwatched.is_empty() && engine.handle.alive() == 1);
        // Its own end is still seen.
        kill(&mut second);
        engine.poll.wait(Some(Duration::from_secs(20)), &mut engine.ready).unwrap();
        assert_eq!(engine.ready.len(), 1);
        engine.take_notice().unwrap();
        engine.poll.wait(Some(Duration::ZERO), &mut engine.ready).unwrap();
        assert!(engine.ready.is_empty());
    }
}
