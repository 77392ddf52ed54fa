//! Times of `next`, for statistics. They cost one more clock read per batch, and a second one if `next` works for long.

use std::time::Duration;

use super::Engine;
use crate::config::LONG_NEXT;
use crate::metrics::{Count, Meter};
use crate::shm::layout::MainState;
use crate::sys;

#[derive(Debug, Default)]
pub(super) struct Watch {
    /// Begin of the current or last `next`.
    entered: Duration,
    /// End of the last `next` of this epoch; zero before the first, and between epochs.
    left: Duration,
    /// A `next` runs; waits at the begin of an epoch are not counted.
    in_next: bool,
    /// The engine has just read its clock.
    fresh: bool,
    /// No `next` of this epoch has ended.
    is_first: bool,
    /// The epoch has ended.
    is_over: bool,
    /// Begin of the current wait.
    wait_began: Duration,
    /// Later results were ready when the wait began.
    blocked: bool,
    /// Time that this `next` has waited.
    waited: Duration,
    /// Part of it that counts as [`Count::Blocked`].
    blocked_for: Duration,
    /// The last `next` worked for long.
    was_long: bool,
}

impl Watch {
    /// Whether the engine may skip one clock read.
    #[inline]
    pub(super) fn take_fresh(&mut self) -> bool {
        std::mem::take(&mut self.fresh)
    }

    /// The state of a `next` that waits; `None` outside of `next`.
    pub(super) fn waiting(&self) -> Option<MainState> {
        self.in_next.then_some(if self.is_first { MainState::First } else { MainState::Waiting })
    }

    pub(super) fn wait_begins(&mut self, now: Duration, blocked: bool) {
        (self.wait_began, self.blocked) = (now, blocked);
    }

    pub(super) fn wait_ends(&mut self, now: Duration, meter: &Meter) {
        let time = now - self.wait_began;
        self.waited += time;
        self.fresh = true;
        match (self.in_next, self.is_first) {
            (false, _) => {}
            (true, true) => meter.add_time(Count::First, time),
            (true, false) => {
                meter.add_time(Count::Waited, time);
                if self.blocked {
                    self.blocked_for += time;
                    meter.add_time(Count::Blocked, time);
                }
            }
        }
    }
}

impl<T, B: Send + 'static, E> Engine<T, B, E> {
    /// An epoch begins.
    pub fn epoch_begins(&mut self) {
        self.handle.meter.add(Count::Epochs, 1);
        (self.watch.left, self.watch.is_first, self.watch.is_over) = (Duration::ZERO, true, false);
        self.show(MainState::Starting, sys::clock::monotonic());
    }

    /// The current `next` ends the epoch: the time until the next epoch is no training step.
    pub fn epoch_ends(&mut self) {
        self.watch.is_over = true;
    }

    /// A `next` begins.
    #[inline]
    pub fn next_begins(&mut self) {
        self.tick();
        (self.watch.fresh, self.watch.in_next) = (true, true);
        self.watch.entered = self.now;
        (self.watch.waited, self.watch.blocked_for) = (Duration::ZERO, Duration::ZERO);
        if !self.watch.left.is_zero() {
            self.handle.meter.add_time(Count::Step, self.now - self.watch.left);
        }
        self.show_next();
    }

    /// A draw ends, which began with the engine's last step.
    #[inline]
    pub fn sampler_ends(&mut self) {
        if self.watch.was_long {
            let asked = self.now;
            self.tick();
            self.handle.meter.add_time(Count::Sampler, self.now - asked);
        }
    }

    /// Microseconds that this `next` has waited with later batches ready.
    #[inline]
    pub fn blocked_us(&self) -> u64 {
        self.watch.blocked_for.as_micros() as u64
    }

    /// A `next` ends, with an answer or an error.
    #[inline]
    pub fn next_ends(&mut self) {
        self.tick();
        let time = self.now - self.watch.entered;
        self.handle.meter.add_time(Count::Next, time);
        self.watch.was_long = time - self.watch.waited > LONG_NEXT;
        self.watch.left = if self.watch.is_over { Duration::ZERO } else { self.now };
        self.watch.is_first = false;
        (self.watch.fresh, self.watch.in_next) = (false, false);
        self.show_counts(if self.watch.is_over { MainState::Between } else { MainState::Step });
    }
}
