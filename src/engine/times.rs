//! The engine's clock, and the places where its times are recorded: statistics, the status page and the trace.

use std::sync::Arc;
use std::time::Duration;

use super::page::Page;
use super::watch::Watch;
use crate::metrics::{Count, Meter};
use crate::shm::arena::Arena;
use crate::shm::layout::MainState;
use crate::sys;
use crate::trace::{Kind, MAIN, Source};

/// The engine's clock, and the places where its times are recorded.
#[derive(Debug)]
pub(super) struct Times {
    /// The time of the last clock read. The clock is read once per step.
    now: Duration,
    watch: Watch,
    page: Page,
    meter: Arc<Meter>,
    trace: Arc<Source>,
    /// The task that the current call to `next` delivers, plus one; 0 if it has delivered none.
    delivered: u64,
}

impl Times {
    pub(super) fn new(arena: Arc<Arena>, meter: Arc<Meter>, trace: Arc<Source>) -> Self {
        let page = Page::new(arena, meter.clone());
        Self { now: Duration::ZERO, watch: Watch::default(), page, meter, trace, delivered: 0 }
    }

    /// Returns the time of the last clock read.
    #[inline]
    pub(super) fn now(&self) -> Duration {
        self.now
    }

    /// Reads the clock.
    #[inline]
    pub(super) fn tick(&mut self) {
        self.now = sys::clock::monotonic();
    }

    /// Reads the clock, unless it has just been read at the start of this call to `next` or at the end of a wait.
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
        if let Some(left) = self.watch.next_begins(self.now, &self.meter) {
            self.trace.slice(Kind::Step, MAIN, left, self.now, 0);
        }
        self.delivered = 0;
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
        let (entered, state) = self.watch.next_ends(self.now, &self.meter);
        if state == MainState::Between {
            self.trace.last_next(entered, self.now);
        } else {
            self.trace.slice(Kind::Next, MAIN, entered, self.now, self.delivered);
        }
        self.trace.empty_if_due(self.now);
        self.page.show_counts(state, self.now);
    }

    /// Records that a wait begins at `start`. `blocked` is true if later results are ready.
    pub(super) fn wait_begins(&mut self, start: Duration, blocked: bool) {
        self.watch.wait_begins(start, blocked);
        if let Some(state) = self.watch.waiting() {
            self.page.show(state, start);
        }
    }

    /// Records that the wait has ended.
    pub(super) fn wait_ends(&mut self) {
        self.tick();
        let began = self.watch.wait_ends(self.now, &self.meter);
        if self.watch.waiting().is_some() {
            self.trace.slice(Kind::Waiting, MAIN, began, self.now, 0);
            self.page.show_wait_ends();
        }
    }

    /// Records that the current call to `next` delivers a task.
    #[inline]
    pub(super) fn delivers(&mut self, task: u64) {
        self.delivered = task + 1;
    }

    /// Shows on the status page that an epoch of persistent workers begins with the task `first_task`.
    pub(super) fn show_epoch(&self, first_task: u64) {
        self.page.show_epoch(first_task);
    }

    /// Shows on the status page that an early epoch begins with the task `first_task`.
    pub(super) fn show_early(&self, first_task: u64) {
        self.page.show_early(first_task);
    }

    /// Adds an option to those that the status page shows.
    pub(super) fn show_option(&self, option: u32) {
        self.page.show_option(option);
    }

    /// Stops writing to the status page, because the iterator has ended.
    pub(super) fn end(&mut self) {
        self.page.end();
    }
}
