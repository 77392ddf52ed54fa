//! A worker's side of a trace.

use std::sync::{Arc, Mutex};

use super::event::{Event, Kind};
use crate::shm::arena::{Arena, ArenaRing};
use crate::shm::layout::WorkerState;
use crate::shm::ring::Producer;
use crate::sync::{Ordering, lock};

/// The lowest [`Recorder::level`] at which samples are recorded.
const SAMPLES: u32 = 2;

/// The writer of a worker's events into its ring.
#[derive(Debug)]
pub struct Recorder {
    arena: Arc<Arena>,
    worker: u32,
    state: Mutex<Recording>,
}

#[derive(Debug, Default)]
struct Recording {
    /// The producer's end of the ring, created for the first event.
    ring: Option<Producer<ArenaRing>>,
    /// The time at which the current sample began, and its index.
    sample: Option<(u64, u64)>,
}

impl Recorder {
    /// Returns the recorder of a worker.
    pub fn new(arena: Arc<Arena>, worker: u32) -> Self {
        Self { arena, worker, state: Mutex::default() }
    }

    /// Returns the level of detail to record; 0 means that nothing is recorded.
    #[inline]
    fn level(&self) -> u32 {
        self.arena.header().trace.0.load(Ordering::Relaxed)
    }

    /// Returns true if events are to be recorded.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.level() != 0
    }

    /// Records the time spent in a state that the worker now leaves. `replays` is true if the worker is replaying
    /// earlier batches. A sample that is still in progress is discarded.
    pub fn spent(&self, state: WorkerState, (begin, length): (u64, u64), task: u64, replays: bool) {
        let Some(kind) = Kind::of_state(state, replays) else { return };
        let mut inner = lock(&self.state);
        // A sample that is still in progress has failed.
        inner.sample = None;
        self.push(&mut inner, Event { kind, who: self.worker, begin, length, number: task, extra: 0 });
    }

    /// Records the time until a batch is published. Call it just before the main process can receive the batch: a trace
    /// then has each batch that is published and delivered while it is on, and none that was delivered before.
    pub fn published(&self, (begin, length): (u64, u64), task: u64) {
        let event = Event { kind: Kind::Publish, who: self.worker, begin, length, number: task, extra: 0 };
        self.push(&mut lock(&self.state), event);
    }

    /// Returns true if samples are to be recorded.
    #[inline]
    pub fn has_samples(&self) -> bool {
        self.level() >= SAMPLES
    }

    /// Ends the current sample, if there is one, and starts the sample `index` unless that is `None`.
    pub fn sample(&self, index: Option<u64>, now: u64, task: u64) {
        let mut inner = lock(&self.state);
        if let Some((begin, extra)) = inner.sample.take() {
            let (length, number) = (now.saturating_sub(begin), task);
            let event = Event { kind: Kind::Sample, who: self.worker, begin, length, number, extra };
            self.push(&mut inner, event);
        }
        inner.sample = index.map(|index| (now, index));
    }

    fn push(&self, inner: &mut Recording, event: Event) {
        let ring = inner.ring.get_or_insert_with(|| Producer::new(self.arena.trace_ring(self.worker)));
        if ring.push(&event.to_entry()).is_err() {
            let lost = &self.arena.trace_head(self.worker).lost.0;
            lost.store(lost.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        }
    }
}
