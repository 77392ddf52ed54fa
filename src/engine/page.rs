//! The main process's status page in the arena's header, which `rustloader top` reads. The thread with exclusive access
//! writes it with relaxed stores.

use std::sync::Arc;
use std::time::Duration;

use crate::metrics::{Count, Meter};
use crate::scheduler::{DeliveryOrder, Settings};
use crate::shm::arena::Arena;
use crate::shm::layout::{IN_ORDER, MainPage, MainState, PERSISTENT};
use crate::sync::Ordering;
use crate::sys;

/// Initializes the page of a new iterator.
pub(super) fn open(arena: &Arena, settings: &Settings) {
    let (page, now) = (&arena.header().main, sys::clock::monotonic_ns());
    let prefetch_factor = u32::try_from(settings.prefetch_factor).unwrap_or(u32::MAX);
    let in_order = settings.delivery == DeliveryOrder::InOrder;
    let options = if in_order { IN_ORDER } else { 0 } | if settings.persistent { PERSISTENT } else { 0 };
    page.pid.store(std::process::id(), Ordering::Relaxed);
    page.prefetch_factor.store(prefetch_factor, Ordering::Relaxed);
    page.options.store(options, Ordering::Relaxed);
    page.started_ns.store(now, Ordering::Relaxed);
    page.since_ns.store(now, Ordering::Relaxed);
    page.state.store(MainState::Starting as u32, Ordering::Relaxed);
}

/// Marks the arena as unused.
pub(super) fn close(arena: &Arena) {
    arena.header().main.state.store(MainState::Unused as u32, Ordering::Relaxed);
}

/// The main process's status page, and the counters that it shows.
#[derive(Debug)]
pub(super) struct Page {
    arena: Arc<Arena>,
    meter: Arc<Meter>,
    /// True once another iterator may use the arena.
    has_ended: bool,
}

impl Page {
    pub(super) fn new(arena: Arc<Arena>, meter: Arc<Meter>) -> Self {
        Self { arena, meter, has_ended: false }
    }

    /// Stops writing to the page.
    pub(super) fn end(&mut self) {
        self.has_ended = true;
    }

    /// Returns the page. Returns `None` once another iterator may use the arena, and in a forked child.
    #[inline]
    fn page(&self) -> Option<&MainPage> {
        (!self.has_ended && self.arena.is_ours()).then(|| &self.arena.header().main)
    }

    /// Shows a state that began at `since`.
    #[inline]
    pub(super) fn show(&self, state: MainState, since: Duration) {
        if let Some(page) = self.page() {
            let waits = matches!(state, MainState::First | MainState::Waiting);
            let word = if waits { &page.wait_since_ns } else { &page.since_ns };
            word.store(since.as_nanos() as u64, Ordering::Relaxed);
            page.state.store(state as u32, Ordering::Relaxed);
        }
    }

    /// Shows that a call to `next` begins, and the total time of training steps.
    #[inline]
    pub(super) fn show_next(&self, now: Duration) {
        if let Some(page) = self.page() {
            let step = self.meter.get(Count::Step);
            page.counts[Count::Step as usize].store(step, Ordering::Relaxed);
        }
        self.show(MainState::Next, now);
    }

    /// Shows that a wait has ended, and the counters, which include its time.
    #[inline]
    pub(super) fn show_wait_ends(&self) {
        if let Some(page) = self.page() {
            page.state.store(MainState::Next as u32, Ordering::Relaxed);
            self.meter.show(page);
        }
    }

    /// Shows the counters and the new state at the end of a call to `next`, and marks the counters if this is due.
    #[inline]
    pub(super) fn show_counts(&self, state: MainState, now: Duration) {
        if let Some(page) = self.page() {
            self.meter.show(page);
            self.meter.mark_if_due(&self.arena);
        }
        self.show(state, now);
    }

    /// Shows that an epoch begins with the task `first_task`.
    pub(super) fn show_epoch(&self, first_task: u64) {
        if let Some(page) = self.page() {
            page.epoch_task.store(first_task, Ordering::Relaxed);
            page.early_task.store(0, Ordering::Relaxed);
            page.epoch_batches.store(self.meter.get(Count::Batches), Ordering::Relaxed);
            self.meter.show(page);
        }
    }

    /// Shows that an early epoch begins with the task `first_task`.
    pub(super) fn show_early(&self, first_task: u64) {
        if let Some(page) = self.page() {
            page.early_task.store(first_task, Ordering::Relaxed);
        }
    }

    /// Adds an option, such as [`PINNING`](crate::shm::layout::PINNING), to those that the page shows.
    pub(super) fn show_option(&self, option: u32) {
        if let Some(page) = self.page() {
            page.options.store(page.options.load(Ordering::Relaxed) | option, Ordering::Relaxed);
        }
    }
}
