//! The engine's side of the shared queue. It records the worker that holds each task.
//!
//! The workers sleep on one futex. A new task wakes one of them. A control message, which travels through the ring of a
//! single worker, wakes all of them, and so does the end of the iterator. If a worker is killed while it sleeps, it
//! remains counted as a sleeper; the only cost is needless wake-ups. If a worker is killed after it was woken for a
//! task, the task is not stranded: the death wakes the other workers, and each of them also polls once per
//! [`IDLE_SLICE`](crate::config::IDLE_SLICE).

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::id::TaskId;
use crate::shm::arena::{Arena, ArenaQueue};
use crate::shm::queue::Submitter;
use crate::shm::ring::Entry;
use crate::wire::{ResultEntry, ResultKind, TaskEntry};

/// The producer's end of the queue. A task's number is also its position in the queue.
#[derive(Debug)]
pub(super) struct SharedQueue(Submitter<ArenaQueue>);

impl SharedQueue {
    /// Returns the queue of an arena, if it has one.
    pub(super) fn of(arena: &Arc<Arena>) -> Option<Self> {
        arena.queue().map(|queue| Self(Submitter::new(queue)))
    }

    /// Puts a task into the queue. The caller must wake a worker afterwards.
    pub(super) fn push(&mut self, entry: &TaskEntry) -> Result<()> {
        match self.0.push(&entry.to_words()) {
            Ok(position) if position == entry.task => Ok(()),
            pushed => Err(Error::corrupt(format!(
                "task {} did not get its position in the shared queue: {pushed:?}",
                entry.task
            ))),
        }
    }

    /// Records a worker's answer. Fails with [`Error::Corrupt`] unless the worker held the task that the answer names.
    pub(super) fn answered(&mut self, worker: u32, entry: &ResultEntry) -> Result<()> {
        if entry.kind == ResultKind::Resumed || self.0.answered(entry.task, worker) {
            return Ok(());
        }
        let holder = self.holder(TaskId(entry.task));
        Err(Error::corrupt(format!("worker {worker} answered task {}, whose holder is {holder:?}", entry.task)))
    }

    /// Returns the worker that holds a task and has not answered it.
    pub(super) fn holder(&self, task: TaskId) -> Option<u32> {
        self.0.holder(task.0)
    }

    /// Returns the oldest task that a worker holds.
    pub(super) fn held_by(&self, worker: u32) -> Option<TaskId> {
        self.0.held_by(worker).map(TaskId)
    }

    /// Returns the oldest task that no worker has taken.
    pub(super) fn oldest_waiting(&self) -> Option<TaskId> {
        self.0.oldest_waiting().map(TaskId)
    }

    /// Removes the oldest task that a dead worker still holds, and returns it.
    pub(super) fn lost_with(&mut self, worker: u32) -> Option<TaskId> {
        let held = self.0.held_by(worker)?;
        self.0.answered(held, worker);
        Some(TaskId(held))
    }

    /// Withdraws a task and returns its entry. Returns `None` if a worker has taken the task.
    pub(super) fn withdraw(&mut self, task: TaskId) -> Option<Entry> {
        self.0.withdraw(task.0)
    }
}
