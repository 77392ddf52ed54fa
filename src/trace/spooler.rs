//! The files of a trace, and the thread that keeps them up to date.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use super::event::Event;
use super::sink::Sink;
use super::source::Source;
use crate::config::TRACE_FLUSH;
use crate::error::Result;
use crate::shm::caretaker::{self, Duty};
use crate::sync::lock;
use crate::sys;

/// A trace that is being written: its [`Sink`], and the sources of its events. Every [`TRACE_FLUSH`], the caretaker
/// empties the rings of the sources, writes what the sink has buffered, and replaces the list of unfinished activities.
/// So it does not matter for how long the main process is in a training step, or a worker in the dataset.
#[derive(Debug)]
pub struct Spooler {
    sink: Arc<Sink>,
    /// The file of unfinished activities: the time at which they were listed, their count, and their records, which
    /// last until that time.
    unfinished: OwnedFd,
    sources: Mutex<Vec<Weak<Source>>>,
    /// The fork generation of the process that makes the trace.
    generation: u64,
}

impl Spooler {
    /// Creates a trace that writes to these files, which must be empty; `files` and `turn` are those of [`Sink::new`].
    pub fn new(files: Vec<OwnedFd>, unfinished: OwnedFd, turn: u64) -> Arc<Self> {
        let sink = Arc::new(Sink::new(files, turn));
        let generation = sys::fork::generation();
        let spooler = Arc::new(Self { sink, unfinished, sources: Mutex::default(), generation });
        let weak = Arc::downgrade(&spooler);
        caretaker::start(Duty::Trace, Arc::new(move || weak.upgrade()?.write_out()));
        spooler
    }

    /// Appends an event; see [`Sink::put`]. Does nothing in a forked child.
    pub fn put(&self, source: u32, event: Event) {
        if self.generation == sys::fork::generation() {
            self.sink.put(source, event);
        }
    }

    /// Notes that an activity begins; see [`Sink::begin`]. Does nothing in a forked child.
    pub fn begin(&self, source: u32, event: Event) {
        if self.generation == sys::fork::generation() {
            self.sink.begin(source, event);
        }
    }

    /// Adds the events of a source to the trace; see [`Source::begin`].
    pub fn follow(&self, source: &Arc<Source>, number: u32, level: u32, epoch: (u64, u64)) -> Result<()> {
        source.begin(self.sink.clone(), number, level, epoch)?;
        lock(&self.sources).push(Arc::downgrade(source));
        Ok(())
    }

    /// Ends the trace; see [`Sink::end`]. Call it after the sources have ended.
    pub fn end(&self) -> (u64, Vec<(usize, u64)>) {
        caretaker::stop(Duty::Trace);
        self.sink.end()
    }

    /// Writes all events up to now, and the activities that are in progress. Returns the time until the next call, or
    /// `None` once the trace has ended.
    pub(super) fn write_out(&self) -> Option<Duration> {
        let mut all = lock(&self.sources);
        all.retain(|source| source.strong_count() > 0);
        let sources: Vec<_> = all.iter().filter_map(Weak::upgrade).collect();
        drop(all);
        sources.iter().for_each(|source| source.empty());
        let now = sys::clock::monotonic_ns();
        let mut unfinished = self.sink.flush(now)?;
        unfinished.extend(sources.iter().flat_map(|source| source.unfinished(now)));
        let header = [now, (unfinished.len() / Event::LEN) as u64].map(u64::to_le_bytes);
        // A failure has no consequence as long as the program is not killed.
        let _ = sys::sealed::write_at(self.unfinished.as_fd(), &[header.as_flattened(), &unfinished].concat(), 0);
        Some(TRACE_FLUSH)
    }
}
