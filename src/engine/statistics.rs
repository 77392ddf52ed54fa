//! Measurement of the time spent in `next`, for statistics.

use super::core::Engine;

impl<T, B: Send + 'static, E> Engine<T, B, E> {
    /// Records that an epoch begins.
    pub fn epoch_begins(&mut self) {
        self.times.epoch_begins();
    }

    /// Records that the current call to `next` ends the epoch, so that the time until the next epoch is not counted as
    /// a training step.
    pub fn epoch_ends(&mut self) {
        self.times.epoch_ends();
    }

    /// Records that a call to `next` begins.
    #[inline]
    pub fn next_begins(&mut self) {
        self.times.next_begins();
    }

    /// Records the end of a draw that began when [`Engine::step`] returned.
    #[inline]
    pub fn sampler_ends(&mut self) {
        self.times.sampler_ends();
    }

    /// Returns how many microseconds the current call to `next` has waited while later batches were ready.
    #[inline]
    pub fn blocked_us(&self) -> u64 {
        self.times.blocked_us()
    }

    /// Records that a call to `next` ends, with an answer or an error.
    #[inline]
    pub fn next_ends(&mut self) {
        self.times.next_ends();
    }
}
