//! What is known of the answers of this epoch, for positions to resume from. Any thread may ask at any time.

use std::sync::MutexGuard;

use super::completions::{Incoming, Parcel};
use super::position::Positions;
use super::snapshots::Snapshots;
use super::{Engine, Handle};
use crate::error::Result;
use crate::id::WorkerId;
use crate::sync::lock;

/// The answers of the current epoch, and the workers' snapshots.
#[derive(Debug)]
pub struct Answers {
    /// Which tasks have been delivered.
    pub positions: Positions,
    snapshots: Snapshots<Parcel>,
}

impl Answers {
    /// The begin of an iterator.
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
}

impl Handle {
    /// The answers. Locked only briefly: no Python code runs meanwhile, and nothing waits. The bindings hold the GIL then, so
    /// that Python never forks with the lock held; a child checks [`Handle::is_ours`] first.
    pub fn answers(&self) -> MutexGuard<'_, Answers> {
        lock(&self.answers)
    }

    /// The newest snapshot of this epoch that a worker made after at most `answers` of its answers: how many those were,
    /// whether it is an error, and its payload. `None` before there is one, and after the end of the iterator.
    pub fn snapshot(&self, worker: u32, answers: u64) -> Result<Option<(u64, bool, Vec<u8>)>> {
        self.check_ours()?;
        let state = self.answers();
        let Some((count, parcel)) = state.snapshots.at(worker, answers) else { return Ok(None) };
        Ok(Some((count, parcel.is_error(), parcel.read()?)))
    }

    /// Keeps a snapshot that has arrived.
    pub(super) fn keep(&self, incoming: Incoming) {
        let mut state = self.answers();
        let settled = state.positions.settled(incoming.worker);
        let parcel = Parcel::new(&self.arena, incoming);
        state.snapshots.keep(incoming.worker, incoming.entry.task, parcel, settled);
    }
}

impl<T, B: Send + 'static, E> Engine<T, B, E> {
    /// Whether a first snapshot of this epoch is still to come: its worker lives, and nothing has ended the iterator.
    pub fn is_starting(&self) -> bool {
        let goes_on = self.snapshots && !self.has_ended() && self.delivery.is_sound();
        let state = self.handle.answers();
        let has_died = |worker| self.scheduler.is_dead(worker) || self.scheduler.is_vacant(worker);
        let is_awaited = |worker| !state.snapshots.has_started(worker) && !has_died(WorkerId(worker));
        goes_on && (0..self.arena().geometry().workers).any(is_awaited)
    }

    /// Processes new events outside of `next`. Returns a tied result, which must be opened before others are taken:
    /// [`Step::Open`](super::Step::Open).
    pub fn take_news(&mut self) -> Result<Option<(Incoming, Option<B>)>> {
        self.handle.check_ours()?;
        if self.has_ended() || self.delivery.is_broken() {
            return Ok(None);
        }
        self.look()?;
        Ok(self.delivery.tied())
    }

    /// Whether nothing may be taken in any more: the rings may belong to another iterator.
    fn has_ended(&self) -> bool {
        self.finished || self.handle.closing()
    }
}
