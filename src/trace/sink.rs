//! The destination of a trace's events: one file, or two files that take turns.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;

use super::event::{Event, Kind};
use crate::config::{TRACE_BUFFER, TRACE_FLUSH};
use crate::error::Result;
use crate::shm::caretaker;
use crate::sync::lock;
use crate::sys;

/// The age in nanoseconds at which buffered events are written without waiting for the caretaker.
const OVERDUE: u64 = 2 * TRACE_FLUSH.as_nanos() as u64;

/// The writer of the events of all loaders in a process. If there are two files, they take turns: after `turn`
/// nanoseconds the older file is emptied and becomes the current one. Together they therefore hold at least the events
/// of the last `turn` nanoseconds.
#[derive(Debug)]
pub struct Sink {
    turn: u64,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// The files, each with its index in the argument of [`Sink::new`]; the last is the current one.
    files: Vec<(usize, File)>,
    buffer: Vec<u8>,
    /// The time at which the current file's turn started; 0 before the first event.
    since: u64,
    /// The time of the last flush; 0 before the first event.
    flushed: u64,
    /// The latest epoch event of each source. Every turn of a file but the very first starts with these events.
    epochs: BTreeMap<u32, Event>,
    /// By source, the activity that [`Sink::begin`] has announced.
    begun: BTreeMap<u32, Event>,
    /// Number of events that could not be written, or were lost because a ring was full.
    lost: u64,
    ended: bool,
}

#[derive(Debug)]
struct File {
    fd: OwnedFd,
    /// Bytes written.
    len: u64,
}

impl Sink {
    /// Creates a sink that writes to `files`, which must be empty.
    pub fn new(files: Vec<OwnedFd>, turn: u64) -> Self {
        let files = files.into_iter().map(|fd| File { fd, len: 0 }).enumerate().collect();
        Self { turn, inner: Mutex::new(Inner { files, ..Inner::default() }) }
    }

    /// Notes that an activity of `source` begins, which is put when it ends.
    pub fn begin(&self, source: u32, event: Event) {
        lock(&self.inner).begun.insert(source, event);
    }

    /// Appends an event of `source`, unless the sink has ended.
    pub fn put(&self, source: u32, event: Event) {
        let inner = &mut *lock(&self.inner);
        if inner.ended {
            return;
        }
        inner.buffer.extend_from_slice(&event.to_bytes(source));
        if event.kind == Kind::Epoch {
            inner.epochs.insert(source, event);
        }
        if !inner.begun.is_empty() {
            inner.begun.remove(&source);
        }
        let end = event.begin.saturating_add(event.length);
        if inner.since == 0 {
            (inner.since, inner.flushed) = (end, end);
        }
        let turns = inner.files.len() > 1 && end.saturating_sub(inner.since) > self.turn;
        // The caretaker cannot have a thread now, or could not start one after a fork.
        let is_overdue = end.saturating_sub(inner.flushed) > OVERDUE;
        if is_overdue {
            caretaker::restart();
        }
        if turns || is_overdue || inner.buffer.len() >= TRACE_BUFFER {
            inner.flush(end);
        }
        if turns {
            inner.since = end;
            inner.files.rotate_left(1);
            if let Some((_, file)) = inner.files.last_mut() {
                // Truncate the file now: if the program is killed, older events must not follow the new ones. If the
                // system refuses, the older events stay.
                let _ = sys::memfd::set_len(&file.fd, 0);
                file.len = 0;
            }
            let epochs = inner.epochs.iter().flat_map(|(source, epoch)| epoch.to_bytes(*source));
            inner.buffer.extend(epochs);
        }
    }

    /// Counts events that were lost before they reached the sink.
    pub fn count_lost(&self, events: u64) {
        lock(&self.inner).lost += events;
    }

    /// Writes the buffered events. Returns the records of the activities that [`Sink::begin`] has announced and that
    /// last until `now`, or `None` if the sink has ended.
    pub fn flush(&self, now: u64) -> Option<Vec<u8>> {
        let inner = &mut *lock(&self.inner);
        inner.flush(now);
        let until_now = |event: Event| Event { length: now.saturating_sub(event.begin), ..event };
        let begun = inner.begun.iter().flat_map(|(source, event)| until_now(*event).to_bytes(*source));
        (!inner.ended).then(|| begun.collect())
    }

    /// Writes the buffered events; later ones are ignored. Returns the number of lost events, and the index and length
    /// in bytes of each file, the current file last.
    pub fn end(&self) -> (u64, Vec<(usize, u64)>) {
        let inner = &mut *lock(&self.inner);
        inner.flush(0);
        inner.ended = true;
        (inner.lost, inner.files.iter().map(|(number, file)| (*number, file.len)).collect())
    }
}

impl Inner {
    fn flush(&mut self, now: u64) {
        self.flushed = self.flushed.max(now);
        let written = match self.files.last_mut() {
            Some((_, file)) => file.append(&self.buffer),
            None => Ok(()),
        };
        if written.is_err() {
            self.lost += (self.buffer.len() / Event::LEN) as u64;
        }
        self.buffer.clear();
    }
}

impl File {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        sys::sealed::write_at(self.fd.as_fd(), bytes, self.len)?;
        self.len += bytes.len() as u64;
        Ok(())
    }
}
