//! How long the parts of a worker's current task have taken.

use std::sync::atomic::{AtomicU32, Ordering};

use super::port::Port;
use crate::shm::layout::WorkerState;
use crate::wire::Timings;

/// The times of one task, summed up as its states end.
#[derive(Debug, Default)]
pub struct Stopwatch {
    fetch_us: AtomicU32,
    collate_us: AtomicU32,
}

impl Stopwatch {
    /// Ends a stretch of time in the dataset; `next` begins.
    pub fn end_fetch(&self, port: &Port, next: WorkerState) {
        self.fetch_us.fetch_add(port.enter(next), Ordering::Relaxed);
    }

    /// Ends a stretch of time in `collate_fn`, which the fetcher has called.
    pub fn end_collate(&self, port: &Port) {
        self.collate_us.fetch_add(port.enter(WorkerState::Fetch), Ordering::Relaxed);
    }

    /// The task's times, as its result is about to be published; the next task starts at zero.
    pub fn take(&self, port: &Port) -> Timings {
        Timings {
            fetch_us: self.fetch_us.swap(0, Ordering::Relaxed),
            collate_us: self.collate_us.swap(0, Ordering::Relaxed),
            pack_us: port.enter(WorkerState::Publish),
        }
    }
}
