//! Messages to the workers: tasks and control messages, sent through the workers' rings or the shared queue.

use std::sync::Arc;

use super::handle::Handle;
use super::queue::SharedQueue;
use crate::config::SMALL_MESSAGE;
use crate::error::{Error, Result};
use crate::id::TaskId;
use crate::shm::alloc::Allocator;
use crate::shm::arena::ArenaRing;
use crate::shm::block::CONSUMER;
use crate::shm::ring::Producer;
use crate::wire::{self, ResultEntry, TaskEntry, TaskKind};

/// The producers' ends of the rings, and the main process's region for payloads.
#[derive(Debug)]
pub(super) struct Outbox {
    handle: Arc<Handle>,
    /// The workers' rings, for tasks and control messages; with a shared queue, for control messages only.
    tasks: Vec<Producer<ArenaRing>>,
    /// The shared queue, if there is one.
    queue: Option<SharedQueue>,
    /// The main process's region, for index batches.
    allocator: Allocator,
    /// Payload of the message that begins the epoch in the workers.
    epoch: Vec<u8>,
    /// The kind of that message.
    epoch_kind: TaskKind,
    /// For each worker, the fill positions of its ring after the last two messages that began an epoch early, the older
    /// one first.
    early: Vec<[u32; 2]>,
}

impl Outbox {
    pub(super) fn new(handle: Arc<Handle>) -> Self {
        let arena = &handle.arena;
        let tasks: Vec<_> =
            (0..arena.geometry().workers).map(|worker| Producer::new(arena.task_ring(worker))).collect();
        Self {
            early: tasks.iter().map(|ring| [ring.published(); 2]).collect(),
            tasks,
            queue: SharedQueue::of(arena),
            allocator: Allocator::new(arena.clone(), arena.geometry().main_region()),
            epoch: Vec::new(),
            epoch_kind: TaskKind::Resume,
            handle,
        }
    }

    /// Returns an entry for task 0 whose payload is inline or, if it is too long, in a new block. The caller sets the
    /// task number. Does not wait for memory.
    pub(super) fn entry(&mut self, kind: TaskKind, payload: &[u8]) -> Result<TaskEntry> {
        if let Some(entry) = TaskEntry::inline(0, kind, payload) {
            return Ok(entry);
        }
        let len = payload.len() as u64;
        if len <= SMALL_MESSAGE {
            self.allocator.trust(SMALL_MESSAGE);
        }
        let block = self.allocator.allocate(len, CONSUMER)?;
        let memory = self.handle.arena.block_memory(self.allocator.region(), block, len)?;
        // SAFETY: the block has `len` bytes and belongs to this process until it is published.
        unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), memory.as_ptr(), payload.len()) };
        Ok(TaskEntry::in_block(0, kind, block, len))
    }

    /// Releases the payload block of an entry that will not be sent.
    pub(super) fn release_payload(&self, entry: &TaskEntry) {
        if let Some(block) = entry.block {
            self.handle.arena.release(self.allocator.region(), block, CONSUMER);
        }
    }

    /// Sends an entry to a worker through its ring, and wakes the worker.
    pub(super) fn push(&mut self, worker: u32, entry: &TaskEntry) -> Result<()> {
        let pushed = self.tasks[worker as usize].push(&entry.to_words());
        pushed.map_err(|_| Error::corrupt("a submission ring is full, but it must have room for all tasks"))?;
        self.handle.wake(worker)
    }

    /// Puts an entry into the shared queue, and wakes a worker.
    pub(super) fn push_shared(&mut self, entry: &TaskEntry) -> Result<()> {
        match &mut self.queue {
            Some(queue) => queue.push(entry)?,
            None => unreachable!("the scheduler and the arena agree on whether there is a shared queue"),
        }
        self.handle.wake_one()
    }

    /// Sends a control message to a worker.
    pub(super) fn control(&mut self, worker: u32, kind: TaskKind, payload: &[u8]) -> Result<()> {
        let entry = self.entry(kind, payload)?;
        self.push(worker, &entry)
    }

    /// Prepares the message that begins another epoch; [`Outbox::resume`] sends it. `rewinds` is true if it replaces an
    /// epoch that began early.
    pub(super) fn begin_epoch(&mut self, first_task: u64, message: &[u8], rewinds: bool) {
        self.epoch = wire::epoch_payload(first_task, message);
        self.epoch_kind = if rewinds { TaskKind::Rewind } else { TaskKind::Resume };
    }

    /// Returns the entries that begin an epoch early, one for each worker. Returns `None` if a worker has not yet taken
    /// its second-to-last early entry, because its ring could overflow. Does not wait for memory.
    pub(super) fn early_entries(&mut self, first_task: u64, message: &[u8]) -> Result<Option<Vec<TaskEntry>>> {
        let mut rings = self.tasks.iter_mut().zip(&self.early);
        if rings.any(|(ring, [filled, _])| !ring.has_taken(*filled)) {
            return Ok(None);
        }
        let payload = wire::epoch_payload(first_task, message);
        let mut entries = Vec::with_capacity(self.tasks.len());
        for _ in 0..self.tasks.len() {
            match self.entry(TaskKind::Early, &payload) {
                Ok(entry) => entries.push(entry),
                Err(error) => {
                    entries.iter().for_each(|entry| self.release_payload(entry));
                    return Err(error);
                }
            }
        }
        Ok(Some(entries))
    }

    /// Sends the entries that begin an epoch early, one to each worker.
    pub(super) fn push_early(&mut self, entries: &[TaskEntry]) -> Result<()> {
        for (worker, entry) in (0..).zip(entries) {
            self.push(worker, entry)?;
            let [_, last] = self.early[worker as usize];
            self.early[worker as usize] = [last, self.tasks[worker as usize].published()];
        }
        Ok(())
    }

    /// Sends a worker the message that [`Outbox::begin_epoch`] prepared.
    pub(super) fn resume(&mut self, worker: u32) -> Result<()> {
        let payload = std::mem::take(&mut self.epoch);
        let sent = self.control(worker, self.epoch_kind, &payload);
        self.epoch = payload;
        sent
    }

    /// Withdraws a task of an abandoned epoch from the shared queue, and releases its payload. Returns false if a
    /// worker has already taken the task.
    pub(super) fn withdraw(&mut self, task: TaskId) -> Result<bool> {
        let Some(words) = self.queue.as_mut().and_then(|queue| queue.withdraw(task)) else {
            return Ok(false);
        };
        self.release_payload(&TaskEntry::from_words(&words)?);
        Ok(true)
    }

    /// Empties the rings, the status page and the return stack of a worker whose process has ended, and releases the
    /// payloads of tasks that it had not taken.
    pub(super) fn reset_worker(&self, worker: u32) -> Result<()> {
        let withdrawn = |entry| {
            if let Ok(entry) = TaskEntry::from_words(&entry) {
                self.release_payload(&entry);
            }
        };
        self.handle.arena.reset_worker(worker, withdrawn)
    }

    /// Returns the shared queue, if there is one.
    pub(super) fn queue(&self) -> Option<&SharedQueue> {
        self.queue.as_ref()
    }

    /// Records an answer to a task of the shared queue; see [`SharedQueue::answered`]. Does nothing without a shared
    /// queue.
    pub(super) fn answered(&mut self, worker: u32, entry: &ResultEntry) -> Result<()> {
        self.queue.as_mut().map_or(Ok(()), |queue| queue.answered(worker, entry))
    }

    /// Removes and returns the tasks of the shared queue that a worker held when it died.
    pub(super) fn lost_with(&mut self, worker: u32) -> Vec<TaskId> {
        let Some(queue) = &mut self.queue else { return Vec::new() };
        std::iter::from_fn(|| queue.lost_with(worker)).collect()
    }
}
