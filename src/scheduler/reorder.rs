//! The slots of all unfinished tasks, and the reorder buffer over them.

use crate::id::{TaskId, WorkerId};
use std::collections::VecDeque;

/// The index that means "no slot" or "no worker".
pub(super) const NIL: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TaskState {
    /// The slot is not in use.
    Free,
    /// The worker has not answered the task.
    Outstanding,
    /// A batch waits for delivery.
    Ready,
    /// An error waits for delivery.
    Failed,
    /// The worker's dataset ended at this task or before it, so the worker will not answer it with a batch.
    Dropped,
    /// The worker died before it answered the task, or the last worker died while it waited in the shared queue.
    Lost,
}

/// A slot and the task in it.
#[derive(Debug)]
pub(super) struct Task<T, R> {
    /// The next slot of the worker's FIFO, or of the free list.
    pub next: u32,
    /// The worker's ID; `NIL` while a task of the shared queue is unanswered.
    pub worker: u32,
    pub task: TaskId,
    pub state: TaskState,
    /// Present while the slot is in use, except for dropped tasks.
    pub tag: Option<T>,
    /// Present while the state is `Ready` or `Failed`.
    pub result: Option<R>,
    /// Bytes of the result.
    pub bytes: u64,
}

/// The slots, and the queue that `next` takes from.
///
/// If results are delivered in order, the queue is the reorder buffer: a task enters it when it is dispatched, so the
/// front is the next task to deliver. Otherwise a task enters it when its result arrives, so a stuck task never blocks
/// the queue.
#[derive(Debug)]
pub(super) struct Reorder<T, R> {
    slots: Vec<Task<T, R>>,
    /// The first slot of the free list. The slot that was freed last is reused first, because it is still cached.
    free: u32,
    /// Slots in delivery order.
    queue: VecDeque<u32>,
}

impl<T, R> Reorder<T, R> {
    /// Creates an empty buffer with memory for `expected` tasks, at most 4,096.
    pub fn new(expected: usize) -> Self {
        let expected = expected.min(4096);
        Self { slots: Vec::with_capacity(expected), free: NIL, queue: VecDeque::with_capacity(expected) }
    }

    /// Puts a dispatched task into a free slot, and returns the slot's index.
    #[inline]
    pub fn insert(&mut self, task: TaskId, worker: u32, tag: T) -> u32 {
        let slot =
            Task { next: NIL, worker, task, state: TaskState::Outstanding, tag: Some(tag), result: None, bytes: 0 };
        if self.free == NIL {
            self.slots.push(slot);
            return self.slots.len() as u32 - 1;
        }
        let index = self.free;
        self.free = self.slots[index as usize].next;
        self.slots[index as usize] = slot;
        index
    }

    #[inline]
    pub fn slot(&self, index: u32) -> &Task<T, R> {
        &self.slots[index as usize]
    }

    #[inline]
    pub fn slot_mut(&mut self, index: u32) -> &mut Task<T, R> {
        &mut self.slots[index as usize]
    }

    /// Frees a slot, and returns its tag and result.
    #[inline]
    pub fn release(&mut self, index: u32) -> (Option<T>, Option<R>) {
        let free = self.free;
        let slot = self.slot_mut(index);
        slot.state = TaskState::Free;
        slot.next = free;
        let held = (slot.tag.take(), slot.result.take());
        self.free = index;
        held
    }

    #[inline]
    pub fn enqueue(&mut self, index: u32) {
        self.queue.push_back(index);
    }

    #[inline]
    pub fn front(&self) -> Option<u32> {
        self.queue.front().copied()
    }

    /// Removes the front of the queue and returns its slot, which stays in use.
    #[inline]
    pub fn pop(&mut self) -> Option<u32> {
        self.queue.pop_front()
    }

    /// Returns all undelivered tasks except dropped ones, in no particular order, with their workers where known.
    pub fn waiting(&self) -> impl Iterator<Item = (TaskId, Option<WorkerId>)> {
        let is_undelivered = |slot: &&Task<T, R>| {
            matches!(slot.state, TaskState::Outstanding | TaskState::Ready | TaskState::Failed | TaskState::Lost)
        };
        let worker = |slot: &Task<T, R>| (slot.worker != NIL).then_some(WorkerId(slot.worker));
        self.slots.iter().filter(is_undelivered).map(move |slot| (slot.task, worker(slot)))
    }

    /// Removes all tasks, and passes each of them, except dropped ones, to `discard` with its tag and result.
    pub fn clear(&mut self, mut discard: impl FnMut(TaskId, Option<T>, Option<R>)) {
        self.queue.clear();
        self.free = NIL;
        for slot in self.slots.drain(..) {
            if slot.state != TaskState::Free && slot.state != TaskState::Dropped {
                discard(slot.task, slot.tag, slot.result);
            }
        }
    }
}
