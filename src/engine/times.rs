//! The engine's clock, the times of `next`, and the status page that shows them.

use std::sync::Arc;
use std::time::Duration;

use super::page::Page;
use super::watch::Watch;
use crate::metrics::{Count, Meter};
use crate::shm::arena::Arena;
use crate::shm::layout::MainState;
use crate::sys;

/// The time, and what is noted of it.
#[derive(Debug)]
pub(super) struct Times {
    /// The time of the last clock read, one per step.
    now: Duration,
    watch: Watch,
    page: Page,
    meter: Arc<Meter>,
}

impl Times {
    pub(super) fn new(arena: Arc<Arena>, meter: Arc<Meter>) -> Self {
        let page = Page::new(arena, meter.clone());
        Self { now: Duration::ZERO, watch: Watch::default(), page, meter }
    }

    /// The time of the last clock read.
    #[inline]
    pub(super) fn now(&self) -> Duration {
        self.now
    }

    /// Reads the clock.
    #[inline]
    pub(super) fn tick(&mut self) {
        self.now = sys::clock::monotonic();
    }

    /// Reads the clock, unless the engine has just done so.
    #[inline]
    pub(super) fn tick_if_stale(&mut self) {
        if !self.watch.take_fresh() {
            self.tick();
        }
    }

    pub(super) fn epoch_begins(&mut self) {
        self.watch.epoch_begins(&self.meter);
        self.page.show(MainState::Starting, sys::clock::monotonic());
    }

    pub(super) fn epoch_ends(&mut self) {
        self.watch.epoch_ends();
    }

    #[inline]
    pub(super) fn next_begins(&mut self) {
        self.tick();
        self.watch.next_begins(self.now, &self.meter);
        self.page.show_next(self.now);
    }

    #[inline]
    pub(super) fn sampler_ends(&mut self) {
        if self.watch.was_long() {
            let asked = self.now;
            self.tick();
            self.meter.add_time(Count::Sampler, self.now - asked);
        }
    }

    #[inline]
    pub(super) fn blocked_us(&self) -> u64 {
        self.watch.blocked_for().as_micros() as u64
    }

    #[inline]
    pub(super) fn next_ends(&mut self) {
        self.tick();
        let state = self.watch.next_ends(self.now, &self.meter);
        self.page.show_counts(state, self.now);
    }

    /// A wait begins at `start`. `blocked`: later results are ready.
    pub(super) fn wait_begins(&mut self, start: Duration, blocked: bool) {
        self.watch.wait_begins(start, blocked);
        if let Some(state) = self.watch.waiting() {
            self.page.show(state, start);
        }
    }

    /// The wait has ended.
    pub(super) fn wait_ends(&mut self) {
        self.tick();
        self.watch.wait_ends(self.now, &self.meter);
        if self.watch.waiting().is_some() {
            self.page.show_wait_ends();
        }
    }

    /// Shows that an epoch of persistent workers begins with this task.
    pub(super) fn show_epoch(&self, first_task: u64) {
        self.page.show_epoch(first_task);
    }

    /// Shows that an option applies from now on.
    pub(super) fn show_option(&self, option: u32) {
        self.page.show_option(option);
    }

    /// The iterator has ended: nothing is shown any more.
    pub(super) fn end(&mut self) {
        self.page.end();
    }
}
