//! Waiting for the doorbell and the workers' pidfds, with a deadline.

use std::time::Duration;

use super::core::Engine;
use crate::config::{WAIT_SLICE, YIELD_FOR};
use crate::error::Result;
use crate::scheduler::Event;
use crate::shm::pool;
use crate::sys;
use crate::sys::poll::WaitOutcome;

impl<T, B: Send + 'static, E> Engine<T, B, E> {
    /// Ends a wait without an answer. The next call waits with the full timeout.
    pub fn interrupted(&mut self) {
        if self.delivery.stops_waiting() {
            // Cannot fail.
            let _ = self.event(Event::WaitEnded);
        }
    }

    /// Waits for a result, death, signal or shutdown, but at most until `deadline` and for one slice.
    pub fn wait(&mut self, deadline: Option<Duration>) -> Result<()> {
        if self.arrives_soon() { Ok(()) } else { self.sleep(deadline) }
    }

    /// Begins a wait by yielding the processor for a moment. Returns true if something has arrived; otherwise continue
    /// with [`Engine::sleep`]. Call it with the GIL: if another Python thread is busy, a thread that releases the GIL
    /// waits 5 ms to get it back.
    pub fn arrives_soon(&mut self) -> bool {
        self.inbox.wait_begins();
        let start = sys::clock::monotonic();
        self.times.wait_begins(start, self.scheduler.is_blocked());
        loop {
            self.receive_now();
            if self.inbox.has_arrivals() {
                return true;
            }
            if sys::clock::monotonic() - start > YIELD_FOR {
                return false;
            }
            sys::clock::yield_now();
        }
    }

    /// Receives the results that have arrived from the next worker, if it is on another machine.
    fn receive_now(&self) {
        if self.inbox.has_rings()
            && let Some(worker) = self.scheduler.next_worker()
        {
            self.handle.receive_now(worker.0);
        }
    }

    /// Continues a wait that [`Engine::arrives_soon`] has begun. Call it without the GIL.
    pub fn sleep(&mut self, deadline: Option<Duration>) -> Result<()> {
        let start = sys::clock::monotonic();
        self.handle.on_duty();
        let limit = deadline.map_or(WAIT_SLICE, |deadline| deadline.saturating_sub(start).min(WAIT_SLICE));
        match self.inbox.sleep(limit.min(self.liveness.overdue.slice(start)))? {
            Some(WaitOutcome::Interrupted | WaitOutcome::TimedOut) => pool::trim(),
            Some(WaitOutcome::Ready) | None => {}
        }
        Ok(())
    }

    /// Drains the doorbell and reports dead workers after a wait. Check signals first, because Ctrl-C ends workers too.
    pub fn after_wait(&mut self) -> Result<()> {
        self.times.wait_ends();
        self.inbox.wait_ends(self.times.now());
        let result = self.handle_ready();
        self.sticky(result)
    }

    pub(super) fn handle_ready(&mut self) -> Result<()> {
        let ready = self.inbox.take_ready();
        for &token in &ready {
            if let Some(worker) = self.inbox.ended_by(token)? {
                self.ended(worker)?;
            }
        }
        self.inbox.put_ready(ready);
        self.inbox.unwatched_ends().into_iter().try_for_each(|worker| self.ended(worker))
    }
}
