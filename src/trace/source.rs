//! The main process's side of a trace: the events of one iterator.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::event::{Event, Kind, MAIN};
use super::sink::Sink;
use crate::config::TRACE_DRAIN;
use crate::error::Result;
use crate::shm::arena::{Arena, ArenaRing};
use crate::shm::layout::{MainState, NOT_BEGUN, PERSISTENT, REMOTE, StatusPage, WorkerState};
use crate::shm::ring::Consumer;
use crate::sync::{AtomicU32, Ordering, lock};
use crate::sys;

/// The collector of one iterator's events: those of its workers, and those of the loop that uses it. It passes them to
/// a [`Sink`], and does nothing in a forked child.
///
/// The loop, the pin thread and the caretaker use it at the same time.
#[derive(Debug)]
pub struct Source {
    arena: Arc<Arena>,
    /// Nonzero while a trace is on.
    on: AtomicU32,
    traced: Mutex<Option<Traced>>,
}

#[derive(Debug)]
struct Traced {
    sink: Arc<Sink>,
    /// The ID of this source in the trace.
    number: u32,
    /// The rings, indexed by worker.
    rings: Vec<Consumer<ArenaRing>>,
    /// The time at which the rings were last emptied.
    emptied: Duration,
    /// Number of events that the workers had lost before this trace.
    lost: u64,
    /// The start, in nanoseconds, of the `next` that ended the epoch and now ends the workers.
    ending: Option<u64>,
}

impl Source {
    /// Returns the source of an iterator that uses this arena.
    pub fn new(arena: Arc<Arena>) -> Self {
        Self { arena, on: AtomicU32::new(0), traced: Mutex::default() }
    }

    /// Returns true if a trace is on.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed) != 0 && self.arena.is_ours()
    }

    /// Starts a trace in which this source has the ID `number`; a trace in progress ends first. `task` is the current
    /// epoch's first task, and `epoch` is the count of epochs. Fails if there is no memory for the rings. Call it only
    /// while the iterator uses the arena.
    pub fn begin(&self, sink: Arc<Sink>, number: u32, level: u32, (task, epoch): (u64, u64)) -> Result<()> {
        self.end();
        self.arena.populate_traces()?;
        let rings = (0..self.workers()).map(|worker| Consumer::new(self.arena.trace_ring(worker)));
        let mut rings: Vec<_> = rings.collect();
        // Drop the entries that an earlier trace left behind.
        rings.iter_mut().for_each(|ring| while let Ok(Some(_)) = ring.pop() {});
        let lost = self.lost();
        *lock(&self.traced) = Some(Traced { sink, number, rings, emptied: Duration::ZERO, lost, ending: None });
        self.on.store(1, Ordering::Relaxed);
        self.mark(Kind::Epoch, MAIN, task, epoch);
        self.arena.header().trace.0.store(level, Ordering::Relaxed);
        Ok(())
    }

    /// Ends the trace, if one is on. Call it before the iterator gives up its arena.
    pub fn end(&self) {
        if !self.arena.is_ours() {
            return;
        }
        let Some(mut traced) = lock(&self.traced).take() else { return };
        self.on.store(0, Ordering::Relaxed);
        self.arena.header().trace.0.store(0, Ordering::Relaxed);
        if let Some(begin) = traced.ending {
            let length = sys::clock::monotonic_ns().saturating_sub(begin);
            let next = Event { kind: Kind::Next, who: MAIN, begin, length, number: 0, extra: 0 };
            traced.sink.put(traced.number, next);
        }
        traced.empty();
        traced.sink.count_lost(self.lost().wrapping_sub(traced.lost));
    }

    fn workers(&self) -> u32 {
        self.arena.geometry().workers
    }

    fn lost(&self) -> u64 {
        let lost = |worker| self.arena.trace_head(worker).lost.0.load(Ordering::Relaxed);
        (0..self.workers()).map(lost).fold(0, u64::wrapping_add)
    }

    /// Records a span of time, if a trace is on.
    #[inline]
    pub fn slice(&self, kind: Kind, who: u32, begin: Duration, end: Duration, number: u64) {
        if self.is_on() {
            let (begin, length) = (begin.as_nanos() as u64, end.saturating_sub(begin).as_nanos() as u64);
            self.put(Event { kind, who, begin, length, number, extra: 0 });
        }
    }

    /// Records the `next` that ends an epoch, if a trace is on. It lasts until `end` if the workers outlive the epoch, or
    /// else until their end, because the iterator ends them before `next` returns.
    pub fn last_next(&self, begin: Duration, end: Duration) {
        if !self.is_on() {
            return;
        }
        if self.arena.header().main.options.load(Ordering::Relaxed) & PERSISTENT != 0 {
            self.slice(Kind::Next, MAIN, begin, end, 0);
        } else if let Some(traced) = &mut *lock(&self.traced) {
            traced.ending = Some(begin.as_nanos() as u64);
        }
    }

    /// Records an instant, if a trace is on.
    pub fn mark(&self, kind: Kind, who: u32, number: u64, extra: u64) {
        if self.is_on() {
            self.put(Event { kind, who, begin: sys::clock::monotonic_ns(), length: 0, number, extra });
        }
    }

    /// Records a worker's death, preceded by the events in its ring and by an event for the state in which it died. There
    /// is none for [`WorkerState::Publish`]: the worker itself records it, and may already have done so.
    pub fn died(&self, worker: u32) {
        if !self.is_on() {
            return;
        }
        self.empty();
        if let Some(event) = self.activity_of(worker, sys::clock::monotonic_ns()) {
            self.put(event);
        }
        self.mark(Kind::Died, worker, self.arena.control(worker).status.task.load(Ordering::Relaxed), 0);
    }

    /// Returns an event for the state in which a worker has been until `now`.
    fn activity_of(&self, worker: u32, now: u64) -> Option<Event> {
        let StatusPage { state, since_ns, task, place, .. } = &self.arena.control(worker).status;
        let state = WorkerState::from_u32(state.load(Ordering::Relaxed));
        let replays = place.load(Ordering::Relaxed) == NOT_BEGUN;
        let (kind, begin) = (Kind::of_state(state, replays)?, since_ns.load(Ordering::Relaxed));
        // The times on the status page of a remote worker come from the other machine's clock.
        let is_remote = self.arena.header().main.options.load(Ordering::Relaxed) & REMOTE != 0;
        let (length, number) = (now.saturating_sub(begin), task.load(Ordering::Relaxed));
        (begin != 0 && !is_remote).then_some(Event { kind, who: worker, begin, length, number, extra: 0 })
    }

    /// Returns the records of the activities of the loop and the workers that last until `now`.
    pub(super) fn unfinished(&self, now: u64) -> Vec<u8> {
        // While the lock is held, the iterator keeps its arena.
        let traced = lock(&self.traced);
        let Some(Traced { number: source, ending, .. }) = &*traced else { return Vec::new() };
        let main = &self.arena.header().main;
        let (since, wait) = (main.since_ns.load(Ordering::Relaxed), main.wait_since_ns.load(Ordering::Relaxed));
        let loops = match MainState::from_u32(main.state.load(Ordering::Relaxed)) {
            // The thread of the loop may be about to change the page.
            MainState::First | MainState::Waiting if wait >= since => {
                vec![(Kind::Waiting, wait), (Kind::Next, since)]
            }
            MainState::First | MainState::Waiting | MainState::Next => vec![(Kind::Next, since)],
            MainState::Step => vec![(Kind::Step, since)],
            MainState::Between => ending.iter().map(|begin| (Kind::Next, *begin)).collect(),
            MainState::Unused | MainState::Starting => vec![],
        };
        let loops = loops.into_iter().map(|(kind, begin)| {
            let length = now.saturating_sub(begin);
            Event { kind, who: MAIN, begin, length, number: 0, extra: 0 }
        });
        let workers = (0..self.workers()).filter_map(|worker| self.activity_of(worker, now));
        loops.chain(workers).flat_map(|event| event.to_bytes(*source)).collect()
    }

    /// Passes the events in the rings to the sink, unless that was done within the last [`TRACE_DRAIN`].
    #[inline]
    pub fn empty_if_due(&self, now: Duration) {
        if self.is_on()
            && let Some(traced) = &mut *lock(&self.traced)
            && now.saturating_sub(traced.emptied) >= TRACE_DRAIN
        {
            traced.emptied = now;
            traced.empty();
        }
    }

    /// Passes the events in the rings to the sink.
    pub(super) fn empty(&self) {
        if let Some(traced) = &mut *lock(&self.traced) {
            traced.empty();
        }
    }

    fn put(&self, event: Event) {
        if let Some(traced) = &*lock(&self.traced) {
            traced.sink.put(traced.number, event);
        }
    }
}

impl Traced {
    fn empty(&mut self) {
        for (worker, ring) in self.rings.iter_mut().enumerate() {
            // A ring that a broken worker has damaged yields no more events.
            while let Ok(Some(entry)) = ring.pop() {
                if let Some(event) = Event::of_entry(&entry, worker as u32) {
                    self.sink.put(self.number, event);
                }
            }
        }
    }
}
