//! Waiting for the doorbell and the workers' pidfds, with a deadline.

use std::time::Duration;

use super::intake::Intake;
use super::{DOORBELL, Engine};
use crate::config::{BLIND_SLICE, DEATH_CHECK, WAIT_SLICE, YIELD_FOR};
use crate::error::Result;
use crate::scheduler::Event;
use crate::shm::pool;
use crate::sys;
use crate::sys::poll::WaitOutcome;

impl<T, B: Send + 'static, E> Engine<T, B, E> {
    /// Polls for dead workers once per [`DEATH_CHECK`], even if `next` never waits. Returns whether it did.
    #[inline]
    pub(super) fn look_for_deaths(&mut self) -> Result<bool> {
        if self.now - self.looked < DEATH_CHECK {
            return Ok(false);
        }
        self.looked = self.now;
        self.ready.clear();
        self.poll.wait(Some(Duration::ZERO), &mut self.ready)?;
        Ok(true)
    }

    /// Ends a wait without an answer. The next call waits with the full timeout.
    pub fn interrupted(&mut self) {
        if self.delivery.stops_waiting() {
            // Cannot fail.
            let _ = self.event(Event::WaitEnded);
        }
    }

    /// Waits for a result, death, signal or shutdown, at most until `deadline` and for one slice.
    pub fn wait(&mut self, deadline: Option<Duration>) -> Result<()> {
        if self.arrives_soon() { Ok(()) } else { self.sleep(deadline) }
    }

    /// Begins a wait: yields the processor for a moment. Returns whether something has arrived. Call it with the GIL: beside a busy
    /// Python thread, a thread that releases it waits 5 ms to get it back. Otherwise go on with [`Engine::sleep`].
    pub fn arrives_soon(&mut self) -> bool {
        self.ready.clear();
        let start = sys::clock::monotonic();
        self.watch.wait_begins(start, self.scheduler.is_blocked());
        if let Some(state) = self.watch.waiting() {
            self.show(state, start);
        }
        loop {
            self.receive_now();
            if self.has_news() {
                return true;
            }
            if sys::clock::monotonic() - start > YIELD_FOR {
                return false;
            }
            sys::clock::yield_now();
        }
    }

    /// Receives what has arrived from the worker on another machine that is waited for.
    fn receive_now(&self) {
        if let (Some(Intake::Rings(_)), Some(worker)) = (&self.intake, self.scheduler.next_worker()) {
            self.handle.receive_now(worker.0);
        }
    }

    /// The rest of a wait that [`Engine::arrives_soon`] has begun. Call it without the GIL.
    pub fn sleep(&mut self, deadline: Option<Duration>) -> Result<()> {
        let start = sys::clock::monotonic();
        self.handle.on_duty();
        let sleeper = match &self.intake {
            Some(Intake::Thread(link)) => &link.control.sleeper,
            _ => &self.handle.arena.header().doorbell.0,
        };
        sleeper.announce();
        if self.has_news() || self.handle.closing() {
            sleeper.awake();
            return Ok(());
        }
        let limit = deadline.map_or(WAIT_SLICE, |deadline| deadline.saturating_sub(start).min(WAIT_SLICE));
        let blind = self.deaf || !self.unwatched.is_empty();
        let limit = if blind { limit.min(BLIND_SLICE) } else { limit };
        let limit = limit.min(self.stalls.overdue.slice(start));
        let outcome = self.poll.wait(Some(limit), &mut self.ready);
        sleeper.awake();
        match outcome? {
            WaitOutcome::Interrupted | WaitOutcome::TimedOut => pool::trim(),
            WaitOutcome::Ready => {}
        }
        Ok(())
    }

    /// Drains the doorbell and reports dead workers after a wait. Check signals first, because Ctrl-C ends workers too.
    pub fn after_wait(&mut self) -> Result<()> {
        self.tick();
        self.looked = self.now;
        self.watch.wait_ends(self.now, &self.handle.meter);
        if self.watch.waiting().is_some() {
            self.show_wait_ends();
        }
        let result = self.take_notice();
        self.sticky(result)
    }

    pub(super) fn take_notice(&mut self) -> Result<()> {
        let ready = std::mem::take(&mut self.ready);
        for &token in &ready {
            if token == DOORBELL {
                let bell = match &self.intake {
                    Some(Intake::Thread(link)) => &link.control.pickup,
                    _ => &self.handle.doorbell,
                };
                if !bell.drain()? {
                    // Another file has taken its number, and may always be readable.
                    self.poll.remove(DOORBELL)?;
                    self.deaf = true;
                }
            } else {
                let Some((worker, process)) = self.handle.named_by(token) else { continue };
                self.poll.remove(token)?;
                if process.has_exited() {
                    self.ended(worker)?;
                } else {
                    // The pidfd was closed, and another file has taken its number.
                    self.unwatched.push(worker);
                }
            }
        }
        self.ready = ready;
        let ended = |worker: &mut u32| self.handle.process(*worker).is_some_and(|it| it.has_exited());
        let gone: Vec<u32> = self.unwatched.extract_if(.., ended).collect();
        gone.into_iter().try_for_each(|worker| self.ended(worker))
    }
}
