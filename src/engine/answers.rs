//! The answers of this epoch, from which a position for a resume is computed. Any thread may ask at any time.

use std::sync::Arc;

use super::completions::{Incoming, Parcel};
use super::position::Positions;
use super::snapshots::Snapshots;
use crate::error::Result;
use crate::shm::arena::Arena;

/// A worker's state, as it has sent it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Answers of the worker before it.
    pub answers: u64,
    /// True if the payload is the error of an attempt to make a snapshot.
    pub is_error: bool,
    /// The pickled state, or error.
    pub payload: Vec<u8>,
}

/// The answers of the current epoch, and the workers' snapshots.
#[derive(Debug)]
pub struct Answers {
    /// The tasks that have been delivered.
    pub positions: Positions,
    snapshots: Snapshots<Parcel>,
}

impl Answers {
    /// Returns the state at the beginning of an iterator.
    pub(super) fn new(workers: u32) -> Self {
        Self { positions: Positions::new(workers as usize), snapshots: Snapshots::new(workers as usize) }
    }

    /// Forgets the last epoch.
    pub(super) fn begin_epoch(&mut self) {
        self.positions.begin_epoch();
        self.snapshots.begin_epoch();
    }

    /// Notes that a worker has begun the epoch.
    pub(super) fn resumed(&mut self, worker: u32) {
        self.snapshots.resumed(worker);
    }

    /// Releases all snapshots: another iterator may use the arena from now on.
    pub(super) fn drop_snapshots(&mut self) {
        self.snapshots.clear();
    }

    /// Returns true if a worker has sent its first snapshot of this epoch.
    pub(super) fn has_started(&self, worker: u32) -> bool {
        self.snapshots.has_started(worker)
    }

    /// See [`Handle::snapshot`](crate::engine::Handle::snapshot).
    pub(super) fn snapshot(&self, worker: u32, answers: u64) -> Result<Option<Snapshot>> {
        let Some((answers, parcel)) = self.snapshots.at(worker, answers) else { return Ok(None) };
        Ok(Some(Snapshot { answers, is_error: parcel.is_error(), payload: parcel.read()? }))
    }

    /// Keeps a snapshot that has arrived.
    pub(super) fn keep(&mut self, arena: &Arc<Arena>, incoming: Incoming) {
        let settled = self.positions.settled(incoming.worker);
        let parcel = Parcel::new(arena, incoming);
        self.snapshots.keep(incoming.worker, incoming.entry.task, parcel, settled);
    }
}
