//! Times of calls to `next`, for statistics. Measuring them costs one additional clock read per batch, and another in a
//! call that follows a long one.

use std::time::Duration;

use crate::config::LONG_NEXT;
use crate::metrics::{Count, Meter};
use crate::shm::layout::MainState;

/// A stopwatch for calls to `next`.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// Start of the current or last call to `next`.
    entered: Duration,
    /// End of the last call of this epoch; zero before the end of the first call, and between epochs.
    left: Duration,
    /// True during a call to `next`. Waits outside of one, at the start of an epoch, are not counted.
    in_next: bool,
    /// True if the engine has just read its clock, so that the next clock read may be skipped.
    fresh: bool,
    /// True until the first call of this epoch has ended.
    is_first: bool,
    /// True once the epoch has ended.
    is_over: bool,
    /// Start of the current wait.
    wait_began: Duration,
    /// True if later results were ready when the wait began.
    blocked: bool,
    /// Time for which the current call has waited.
    waited: Duration,
    /// The part of that time that counts as [`Count::Blocked`].
    blocked_for: Duration,
    /// True if the last call, without its waits, took longer than [`LONG_NEXT`].
    was_long: bool,
}

impl Watch {
    /// Returns true if the engine may skip the next clock read. Clears the flag.
    #[inline]
    pub(super) fn take_fresh(&mut self) -> bool {
        std::mem::take(&mut self.fresh)
    }

    /// Returns the main process's state during a wait in `next`. Returns `None` outside of `next`.
    pub(super) fn waiting(&self) -> Option<MainState> {
        self.in_next.then_some(if self.is_first { MainState::First } else { MainState::Waiting })
    }

    pub(super) fn wait_begins(&mut self, now: Duration, blocked: bool) {
        (self.wait_began, self.blocked) = (now, blocked);
    }

    /// Records that the wait ends. Returns the time at which it began.
    pub(super) fn wait_ends(&mut self, now: Duration, meter: &Meter) -> Duration {
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
        self.wait_began
    }

    /// Records that an epoch begins.
    pub(super) fn epoch_begins(&mut self, meter: &Meter) {
        meter.add(Count::Epochs, 1);
        (self.left, self.is_first, self.is_over) = (Duration::ZERO, true, false);
    }

    /// Records that the current call ends the epoch, so that the time until the next epoch is not counted as a training
    /// step.
    pub(super) fn epoch_ends(&mut self) {
        self.is_over = true;
    }

    /// Records that a call begins. Returns the time at which the previous call of this epoch ended, or `None` for the
    /// first call.
    #[inline]
    pub(super) fn next_begins(&mut self, now: Duration, meter: &Meter) -> Option<Duration> {
        (self.fresh, self.in_next) = (true, true);
        self.entered = now;
        (self.waited, self.blocked_for) = (Duration::ZERO, Duration::ZERO);
        let left = (!self.left.is_zero()).then_some(self.left)?;
        meter.add_time(Count::Step, now - left);
        Some(left)
    }

    /// Returns true if draws in the current call must be measured, because the last call was long.
    #[inline]
    pub(super) fn was_long(&self) -> bool {
        self.was_long
    }

    /// Returns the time for which the current call has waited while later batches were ready.
    #[inline]
    pub(super) fn blocked_for(&self) -> Duration {
        self.blocked_for
    }

    /// Records that a call ends, with an answer or an error. Returns the time at which it began, and the new state of
    /// the main process.
    #[inline]
    pub(super) fn next_ends(&mut self, now: Duration, meter: &Meter) -> (Duration, MainState) {
        let time = now - self.entered;
        meter.add_time(Count::Next, time);
        if !self.is_first {
            meter.note_wait(self.waited);
        }
        self.was_long = time - self.waited > LONG_NEXT;
        self.left = if self.is_over { Duration::ZERO } else { now };
        self.is_first = false;
        (self.fresh, self.in_next) = (false, false);
        (self.entered, if self.is_over { MainState::Between } else { MainState::Step })
    }
}
