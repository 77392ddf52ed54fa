//! The answers and snapshots of the current epoch, from which a loader's state is made. Any thread may read them at any
//! time.

use std::sync::Arc;

use super::completions::{Incoming, SnapshotMessage};
use super::position::Positions;
use super::snapshots::Snapshots;
use crate::error::Result;
use crate::shm::arena::Arena;

/// A worker's snapshot, copied out of shared memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Number of the worker's answers before the snapshot.
    pub answers: u64,
    /// True if the worker failed to make the snapshot. The payload is then the error.
    pub is_error: bool,
    /// The pickled state, or the pickled error.
    pub payload: Vec<u8>,
}

/// The answers of the current epoch, and the workers' snapshots.
#[derive(Debug)]
pub struct Answers {
    /// The record of delivered tasks.
    pub positions: Positions,
    snapshots: Snapshots<SnapshotMessage>,
}

impl Answers {
    /// Creates the record for a new iterator, without answers.
    pub(super) fn new(workers: u32) -> Self {
        Self { positions: Positions::new(workers as usize), snapshots: Snapshots::new(workers as usize) }
    }

    /// Begins another epoch: drops the answers and snapshots of the previous one.
    pub(super) fn begin_epoch(&mut self) {
        self.positions.begin_epoch();
        self.snapshots.begin_epoch();
    }

    /// Records that a worker has begun the epoch, so that its later snapshots belong to this epoch.
    pub(super) fn resumed(&mut self, worker: u32) {
        self.snapshots.resumed(worker);
    }

    /// Releases all snapshots. Call it before another iterator may use the arena.
    pub(super) fn drop_snapshots(&mut self) {
        self.snapshots.clear();
    }

    /// Returns true if a worker has sent its first snapshot of this epoch.
    pub(super) fn has_started(&self, worker: u32) -> bool {
        self.snapshots.has_started(worker)
    }

    /// See [`Handle::snapshot`](crate::engine::Handle::snapshot).
    pub(super) fn snapshot(&self, worker: u32, answers: u64) -> Result<Option<Snapshot>> {
        let Some((answers, message)) = self.snapshots.at(worker, answers) else { return Ok(None) };
        Ok(Some(Snapshot { answers, is_error: message.is_error(), payload: message.read()? }))
    }

    /// Keeps a snapshot that has arrived, and releases those that no position needs any longer.
    pub(super) fn keep(&mut self, arena: &Arc<Arena>, incoming: Incoming) {
        let settled = self.positions.settled(incoming.worker);
        let message = SnapshotMessage::new(arena, incoming);
        self.snapshots.keep(incoming.worker, incoming.entry.task, message, settled);
    }
}
