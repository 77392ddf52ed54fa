//! Times of `next`, for statistics.

use super::core::Engine;

impl<T, B: Send + 'static, E> Engine<T, B, E> {
    /// Notes that an epoch begins.
    pub fn epoch_begins(&mut self) {
        self.times.epoch_begins();
    }

    /// Notes that the current `next` ends the epoch: the time until the next epoch is not a training step.
    pub fn epoch_ends(&mut self) {
        self.times.epoch_ends();
    }

    /// Notes that a `next` begins.
    #[inline]
    pub fn next_begins(&mut self) {
        self.times.next_begins();
    }

    /// Notes the end of a draw that began with the engine's last step.
    #[inline]
    pub fn sampler_ends(&mut self) {
        self.times.sampler_ends();
    }

    /// Returns the microseconds that this `next` has waited while later batches were ready.
    #[inline]
    pub fn blocked_us(&self) -> u64 {
        self.times.blocked_us()
    }

    /// Notes that a `next` ends, with an answer or an error.
    #[inline]
    pub fn next_ends(&mut self) {
        self.times.next_ends();
    }
}
