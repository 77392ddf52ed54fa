//! The times of a worker's current task.

use std::sync::atomic::{AtomicU32, Ordering};

use super::port::Port;
use crate::shm::layout::WorkerState;
use crate::wire::Timings;

/// Sums of one task's times, by phase.
#[derive(Debug, Default)]
pub struct Stopwatch {
    fetch_us: AtomicU32,
    collate_us: AtomicU32,
}

impl Stopwatch {
    /// Ends an interval in the dataset, and enters the state `next`.
    pub fn end_fetch(&self, port: &Port, next: WorkerState) {
        self.fetch_us.fetch_add(port.enter(next), Ordering::Relaxed);
    }

    /// Ends an interval in `collate_fn`, and enters [`WorkerState::Fetch`] again.
    pub fn end_collate(&self, port: &Port) {
        self.collate_us.fetch_add(port.enter(WorkerState::Fetch), Ordering::Relaxed);
    }

    /// Returns the task's times and resets them. Call it just before the task's result is published.
    pub fn take(&self, port: &Port) -> Timings {
        Timings {
            fetch_us: self.fetch_us.swap(0, Ordering::Relaxed),
            collate_us: self.collate_us.swap(0, Ordering::Relaxed),
            pack_us: port.enter(WorkerState::Publish),
        }
    }
}
