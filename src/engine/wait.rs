//! Waits for the doorbell and the workers' pidfds, with a deadline.

use std::time::Duration;

use super::core::Engine;
use crate::config::{WAIT_SLICE, YIELD_FOR};
use crate::error::Result;
use crate::scheduler::Event;
use crate::shm::pool;
use crate::sys;
use crate::sys::poll::WaitOutcome;

impl<T, B: Send + 'static, E> Engine<T, B, E> {
    /// Ends a call to `next` that has no answer. If the call was waiting, the timeout starts again in the next call.
    pub fn interrupted(&mut self) {
        if self.delivery.stops_waiting() {
            // This event cannot fail.
            let _ = self.event(Event::WaitEnded);
        }
    }

    /// Waits for a result, death, signal or shutdown, but not past `deadline`, and for at most one [`WAIT_SLICE`].
    pub fn wait(&mut self, deadline: Option<Duration>) -> Result<()> {
        if self.arrives_soon() { Ok(()) } else { self.sleep(deadline) }
    }

    /// Begins a wait by yielding the processor for up to [`YIELD_FOR`]. Returns true if something has arrived;
    /// otherwise the caller continues the wait with [`Engine::sleep`]. Call it without releasing the GIL: if another
    /// Python thread is busy, a thread that has released the GIL waits 5 ms to get it back.
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

    /// If the worker whose result is delivered next is on another machine, receives results that have arrived from it.
    fn receive_now(&self) {
        if self.inbox.has_rings()
            && let Some(worker) = self.scheduler.next_worker()
        {
            self.handle.receive_now(worker.0);
        }
    }

    /// Continues a wait that began with [`Engine::arrives_soon`]. Call it without the GIL.
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

    /// Ends a wait: drains the doorbell and reports dead workers. Check for signals before this call: Ctrl-C also ends
    /// the workers, and KeyboardInterrupt must take precedence over their deaths.
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
