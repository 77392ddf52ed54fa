//! The times of `next`, for statistics: one look at the clock a batch beside those that the scheduler needs in any case, and
//! one more where `next` works for long.

use std::time::Duration;

use super::Engine;
use crate::config::LONG_NEXT;
use crate::metrics::{Count, Meter};
use crate::shm::layout::MainState;
use crate::sys;

/// Where `next` stands.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// When the `next` that is under way, or was last, began.
    entered: Duration,
    /// When the last `next` of this epoch ended; zero before the first, and between epochs.
    left: Duration,
    /// A `next` is under way; what the begin of an epoch waits for is not counted.
    in_next: bool,
    /// The engine's clock has just been looked at.
    fresh: bool,
    /// No `next` of this epoch has ended.
    is_first: bool,
    /// The epoch has come to its end.
    is_over: bool,
    /// When the wait that is under way began.
    wait_began: Duration,
    /// At its begin later results were there already.
    blocked: bool,
    /// For how long this `next` has waited.
    waited: Duration,
    /// The last `next` worked for long.
    was_long: bool,
}

impl Watch {
    /// Whether the engine need not look at its clock now; once.
    #[inline]
    pub(super) fn take_fresh(&mut self) -> bool {
        std::mem::take(&mut self.fresh)
    }

    /// What a `next` that waits now waits for; `None` outside of `next`.
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

    /// The `next` that is under way tells of the epoch's end: what comes until the next epoch is no training step.
    pub fn epoch_ends(&mut self) {
        self.watch.is_over = true;
    }

    /// A `next` begins.
    #[inline]
    pub fn next_begins(&mut self) {
        self.tick();
        (self.watch.fresh, self.watch.in_next) = (true, true);
        (self.watch.entered, self.watch.waited) = (self.now, Duration::ZERO);
        if !self.watch.left.is_zero() {
            self.handle.meter.add_time(Count::Step, self.now - self.watch.left);
        }
        self.show_next();
    }

    /// The sampler has been asked, since the engine's last step.
    #[inline]
    pub fn sampler_ends(&mut self) {
        if self.watch.was_long {
            let asked = self.now;
            self.tick();
            self.handle.meter.add_time(Count::Sampler, self.now - asked);
        }
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
