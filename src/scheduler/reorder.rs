//! The slots of all tasks that are not done with, and the reorder buffer over them.

use crate::id::{TaskId, WorkerId};
use std::collections::VecDeque;

/// No slot.
pub(super) const NIL: u32 = u32::MAX;

/// What is known of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The slot is not in use.
    Free,
    /// The task is with its worker.
    Outstanding,
    /// Its data have arrived and wait for their turn.
    Ready,
    /// Its error has arrived and waits for its turn.
    Failed,
    /// Its worker was exhausted before it: there will be no answer, and nothing is to be delivered.
    Dropped,
    /// Its worker died with it.
    Lost,
}

/// One task.
#[derive(Debug)]
pub(super) struct Task<T, R> {
    /// The next slot of the worker's FIFO, or of the free list.
    pub next: u32,
    /// The worker that the task went to.
    pub worker: u32,
    /// The sequence number of the task.
    pub task: TaskId,
    /// What is known of the task.
    pub state: State,
    /// What the caller keeps of the task; there while the slot is in use, but for dropped tasks.
    pub tag: Option<T>,
    /// The result; there while the state is `Ready` or `Failed`.
    pub result: Option<R>,
}

/// The slots, and the queue that `next` takes from.
///
/// In order, the queue is the reorder buffer: a task enters it when it is dispatched, so its front is the task
/// that must be delivered next, arrived or not. Out of order a task enters it when its result arrives; so
/// nothing is kept for what was delivered past a stuck worker, however much that is.
#[derive(Debug)]
pub(super) struct Reorder<T, R> {
    /// All slots that were ever in use at one time; their number is bounded by the tasks in flight.
    slots: Vec<Task<T, R>>,
    /// The front of the free list. Last in, first out, because that slot is still in the cache.
    free: u32,
    /// Slots in the order of delivery.
    queue: VecDeque<u32>,
}

impl<T, R> Reorder<T, R> {
    /// Nothing yet; room for a first window of `expected` tasks.
    pub fn new(expected: usize) -> Self {
        let expected = expected.min(4096);
        Self { slots: Vec::with_capacity(expected), free: NIL, queue: VecDeque::with_capacity(expected) }
    }

    /// A slot for a task that has just been dispatched.
    #[inline]
    pub fn insert(&mut self, task: TaskId, worker: u32, tag: T) -> u32 {
        let slot = Task { next: NIL, worker, task, state: State::Outstanding, tag: Some(tag), result: None };
        if self.free == NIL {
            self.slots.push(slot);
            return self.slots.len() as u32 - 1;
        }
        let index = self.free;
        self.free = self.slots[index as usize].next;
        self.slots[index as usize] = slot;
        index
    }

    /// The slot with that number.
    #[inline]
    pub fn slot(&self, index: u32) -> &Task<T, R> {
        &self.slots[index as usize]
    }

    /// The slot with that number, to be changed.
    #[inline]
    pub fn slot_mut(&mut self, index: u32) -> &mut Task<T, R> {
        &mut self.slots[index as usize]
    }

    /// Puts the slot onto the free list and gives back what it held.
    #[inline]
    pub fn release(&mut self, index: u32) -> (Option<T>, Option<R>) {
        let free = self.free;
        let slot = self.slot_mut(index);
        slot.state = State::Free;
        slot.next = free;
        let held = (slot.tag.take(), slot.result.take());
        self.free = index;
        held
    }

    /// The slot enters the queue at its back.
    #[inline]
    pub fn enqueue(&mut self, index: u32) {
        self.queue.push_back(index);
    }

    /// The slot at the front of the queue.
    #[inline]
    pub fn front(&self) -> Option<u32> {
        self.queue.front().copied()
    }

    /// Takes the front out of the queue; its slot stays in use.
    #[inline]
    pub fn pop(&mut self) -> Option<u32> {
        self.queue.pop_front()
    }

    /// Every task that has not been handed out and will be, in no order.
    pub fn waiting(&self) -> impl Iterator<Item = (TaskId, WorkerId)> {
        let held = |slot: &&Task<T, R>| {
            matches!(slot.state, State::Outstanding | State::Ready | State::Failed | State::Lost)
        };
        self.slots.iter().filter(held).map(|slot| (slot.task, WorkerId(slot.worker)))
    }

    /// Empties everything, and gives what each slot in use held to `give`.
    pub fn clear(&mut self, mut give: impl FnMut(TaskId, Option<T>, Option<R>)) {
        self.queue.clear();
        self.free = NIL;
        for slot in self.slots.drain(..) {
            if slot.state != State::Free && slot.state != State::Dropped {
                give(slot.task, slot.tag, slot.result);
            }
        }
    }
}
