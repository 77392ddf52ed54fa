//! The events of a trace: their kinds, and their encoding in a ring and in a file.

use crate::numbered::numbered_enum;
use crate::shm::layout::WorkerState;
use crate::shm::ring::Entry;

numbered_enum! {
    /// The kind of an event. The first kinds are the states of a worker, with the numbers of [`WorkerState`].
    pub enum Kind {
        /// A worker before its loop.
        Starting = 0 => "start",
        /// A worker that waits for a task.
        Idle = 1 => "idle",
        /// A worker in the dataset; in the main process, a fetch without workers.
        Fetch = 2 => "fetch",
        /// A worker in `collate_fn`.
        Collate = 3 => "collate",
        /// A worker that encodes a batch.
        Pack = 4 => "pack",
        /// A worker that prepares the publication of a batch.
        Publish = 5 => "publish",
        /// A worker that replays earlier batches.
        Replay = 6 => "replay",
        /// A worker fetches a sample; `extra` is the sample's index.
        Sample = 7 => "sample",
        /// A call of `next` in the main process; `number` is the delivered task plus one.
        Next = 8 => "next",
        /// A wait within a `next`.
        Waiting = 9 => "waiting",
        /// The time between two `next` calls.
        Step = 10 => "step",
        /// The pin thread prepares a batch.
        Pin = 11 => "pin",
        /// An epoch starts; `number` is its first task, and `extra` is the count of epochs.
        Epoch = 12 => "epoch",
        /// A worker's process was started; `number` is its pid, and `extra` is the count of earlier processes in its
        /// slot.
        Started = 13 => "started",
        /// A worker has died.
        Died = 14 => "died",
        /// A worker has been reported as stuck.
        Stalled = 15 => "stalled",
        /// The loader's state was saved; `number` is the count of answers before that.
        Saved = 16 => "saved",
        /// `prefetch_to_device` queues the copy of a batch.
        Copied = 17 => "copy",
    }
}

impl Kind {
    /// Returns the names of all kinds, indexed by the number of the kind.
    pub fn names() -> Vec<&'static str> {
        (0..).map_while(Self::of_number).map(Self::name).collect()
    }

    /// Returns the kind of the event for the time that a worker has spent in a state; `replays` is true if it is
    /// replaying earlier batches. Returns `None` for [`WorkerState::Left`], which never ends, and for
    /// [`WorkerState::Publish`], whose event is recorded before the state ends: see
    /// [`published`](super::Recorder::published).
    pub(super) fn of_state(state: WorkerState, replays: bool) -> Option<Self> {
        match state {
            WorkerState::Left | WorkerState::Publish => None,
            WorkerState::Fetch | WorkerState::Collate if replays => Some(Self::Replay),
            _ => Self::of_number(state as u32),
        }
    }
}

/// [`Event::who`] of the loop in the main process.
pub const MAIN: u32 = 0xff_ffff;
/// [`Event::who`] of the pin thread.
pub const PINNER: u32 = 0xff_fffe;

/// An event of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The kind of the event.
    pub kind: Kind,
    /// The worker, [`MAIN`] or [`PINNER`].
    pub who: u32,
    /// CLOCK_MONOTONIC time, in nanoseconds, at which the event began.
    pub begin: u64,
    /// Duration in nanoseconds.
    pub length: u64,
    /// A task, or another number whose meaning depends on the kind.
    pub number: u64,
    /// A second number whose meaning depends on the kind.
    pub extra: u64,
}

impl Event {
    /// Bytes of a record in the file.
    pub const LEN: usize = 40;

    /// Encodes the event as an entry of a worker's ring.
    pub(super) fn to_entry(self) -> Entry {
        [u64::from(self.kind as u32), self.begin, self.length, self.number, self.extra, 0, 0, 0]
    }

    /// Decodes an event of worker `who`. Returns `None` if the entry is not an event.
    pub(super) fn of_entry(entry: &Entry, who: u32) -> Option<Self> {
        let [kind, begin, length, number, extra, ..] = *entry;
        let kind = Kind::of_number(u32::try_from(kind).ok()?)?;
        Some(Self { kind, who, begin, length, number, extra })
    }

    /// Encodes the event as a record of the file: little-endian words, the first of which holds `source` (32 bits),
    /// `who` (24) and `kind` (8).
    pub(super) fn to_bytes(self, source: u32) -> [u8; Self::LEN] {
        let first = u64::from(source) << 32 | u64::from(self.who) << 8 | u64::from(self.kind as u32);
        let mut bytes = [0; Self::LEN];
        let words = [first, self.begin, self.length, self.number, self.extra];
        for (bytes, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
            *bytes = word.to_le_bytes();
        }
        bytes
    }
}
