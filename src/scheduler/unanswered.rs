//! The unanswered tasks of a shared queue, indexed by task number.

use super::reorder::NIL;
use crate::id::TaskId;
use std::collections::VecDeque;

/// The slots of all tasks from the oldest unanswered one to the newest. Task numbers are contiguous, so a lookup is a
/// single indexing operation.
#[derive(Debug, Default)]
pub(super) struct Unanswered {
    /// The number of the task at the front.
    first: u64,
    /// The slot of each task, or `NIL` if the task has been answered. The front is never `NIL`.
    slots: VecDeque<u32>,
}

impl Unanswered {
    /// Adds a task. Its number must follow that of the newest task, if any.
    #[inline]
    pub fn push(&mut self, task: TaskId, slot: u32) {
        if self.slots.is_empty() {
            self.first = task.0;
        }
        debug_assert_eq!(task.0, self.first + self.span() as u64, "numbers are contiguous");
        self.slots.push_back(slot);
    }

    #[inline]
    fn index(&self, task: TaskId) -> Option<usize> {
        let index = usize::try_from(task.0.checked_sub(self.first)?).ok()?;
        self.slots.get(index).filter(|slot| **slot != NIL).map(|_| index)
    }

    /// Returns the slot of an unanswered task.
    #[inline]
    pub fn get(&self, task: TaskId) -> Option<u32> {
        self.index(task).map(|index| self.slots[index])
    }

    /// Removes an unanswered task and returns its slot. Amortized O(1): each step over an answered task is paid for by
    /// that task's answer.
    #[inline]
    pub fn remove(&mut self, task: TaskId) -> Option<u32> {
        let index = self.index(task)?;
        let slot = std::mem::replace(&mut self.slots[index], NIL);
        while self.slots.front() == Some(&NIL) {
            self.slots.pop_front();
            self.first += 1;
        }
        Some(slot)
    }

    /// Returns the number of tasks from the oldest unanswered one to the newest.
    #[inline]
    pub fn span(&self) -> usize {
        self.slots.len()
    }

    /// Returns all unanswered tasks with their slots, oldest first.
    pub fn tasks(&self) -> impl Iterator<Item = (TaskId, u32)> {
        let tasks = (self.first..).map(TaskId).zip(self.slots.iter().copied());
        tasks.filter(|(_, slot)| *slot != NIL)
    }

    /// Removes all tasks.
    pub fn clear(&mut self) {
        self.slots.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_are_found_by_their_numbers_until_they_are_answered() {
        let mut tasks = Unanswered::default();
        (5..9).for_each(|task| tasks.push(TaskId(task), task as u32 * 10));
        assert_eq!([4, 5, 8, 9].map(|task| tasks.get(TaskId(task))), [None, Some(50), Some(80), None]);
        assert_eq!((tasks.remove(TaskId(6)), tasks.remove(TaskId(6))), (Some(60), None));
        assert_eq!(tasks.span(), 4, "the oldest task is unanswered");
        assert_eq!((tasks.remove(TaskId(5)), tasks.span()), (Some(50), 2));
        assert_eq!((tasks.get(TaskId(5)), tasks.get(TaskId(7))), (None, Some(70)));
        assert_eq!(tasks.tasks().collect::<Vec<_>>(), [(TaskId(7), 70), (TaskId(8), 80)]);
        assert_eq!((tasks.remove(TaskId(8)), tasks.span()), (Some(80), 2));
        tasks.push(TaskId(9), 90);
        assert_eq!((tasks.remove(TaskId(7)), tasks.span()), (Some(70), 1));
        assert_eq!(tasks.remove(TaskId(9)), Some(90));
        assert_eq!((tasks.span(), tasks.remove(TaskId(u64::MAX))), (0, None));
        // If no task is unanswered, the numbers need not continue from the last one.
        tasks.push(TaskId(20), 1);
        assert_eq!((tasks.get(TaskId(10)), tasks.get(TaskId(20))), (None, Some(1)));
    }
}
