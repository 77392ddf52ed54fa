//! What an iterator tells of its workers and its arena, to whoever asks and whenever.

use super::Handle;
use crate::error::Result;
use crate::shm::arena::Usage;
use crate::shm::layout::{StatusPage, Terminated, WorkerState};
use crate::sync::Ordering;
use crate::sys;

/// What a worker says of itself, as it was at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// A `WorkerState`.
    pub state: u32,
    /// The worker's process id, once it has started.
    pub pid: u32,
    /// The current task, or the last one.
    pub task: u64,
    /// Tasks answered so far.
    pub tasks_done: u64,
    /// A [`Terminated`].
    pub terminated: u32,
    /// Nanoseconds in the state.
    pub in_state_ns: u64,
    /// Nanoseconds spent in each state before, by the number of the state.
    pub spent_ns: [u64; WorkerState::COUNT],
}

impl Status {
    /// By a status page, at a time in monotonic nanoseconds.
    pub(super) fn of(page: &StatusPage, now: u64) -> Self {
        Self {
            state: page.state.load(Ordering::Relaxed),
            pid: page.pid.load(Ordering::Relaxed),
            task: page.task.load(Ordering::Relaxed),
            tasks_done: page.tasks_done.load(Ordering::Relaxed),
            terminated: page.terminated.load(Ordering::Relaxed),
            in_state_ns: now.saturating_sub(page.since_ns.load(Ordering::Relaxed)),
            spent_ns: std::array::from_fn(|state| page.spent_ns[state].load(Ordering::Relaxed)),
        }
    }

    /// The names of its state and of what it knows of a SIGTERM.
    pub fn names(&self) -> (&'static str, &'static str) {
        (WorkerState::from_u32(self.state).name(), Terminated::name_of(self.terminated))
    }
}

impl Handle {
    /// What a worker says of itself; after the end of the iterator what it said last, because another iterator may have the
    /// arena by then. `None` where there is no such worker. An error in a forked child, which is not told of the end.
    pub fn status(&self, worker: u32) -> Result<Option<Status>> {
        self.check_ours()?;
        let last = self.last();
        if let Some(last) = &*last {
            return Ok(last.get(worker as usize).copied());
        }
        let page = || &self.arena.control(worker).status;
        let there = worker < self.arena.geometry().workers;
        Ok(there.then(|| Status::of(page(), sys::clock::monotonic_ns())))
    }

    /// What the arena has of memory. Nothing after the end of the iterator, when another one may have it, and in a forked child.
    pub fn usage(&self) -> Usage {
        if !self.is_ours() {
            return Usage::default();
        }
        let last = self.last();
        if last.is_some() { Usage::default() } else { self.arena.usage() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::alloc::Allocator;
    use crate::shm::arena::Arena;
    use crate::shm::block::CONSUMER;

    #[test]
    fn after_the_end_the_arena_of_the_next_iterator_is_not_looked_at() {
        let arena = Arena::create_sized(1 << 30, 2, 4).unwrap();
        let handle = Handle::new(arena.clone()).unwrap();
        let mut allocator = Allocator::new(arena.clone(), 0);
        allocator.allocate(20_000, CONSUMER).unwrap();
        let page = &arena.control(1).status;
        page.state.store(WorkerState::Left as u32, Ordering::Relaxed);
        page.tasks_done.store(7, Ordering::Relaxed);
        assert!(handle.usage().held >= 20_000);
        assert_eq!(handle.status(1).unwrap().unwrap().tasks_done, 7);
        handle.part_with_arena();
        page.state.store(WorkerState::Fetch as u32, Ordering::Relaxed);
        page.tasks_done.store(99, Ordering::Relaxed);
        let last = handle.status(1).unwrap().unwrap();
        assert_eq!((last.names().0, last.tasks_done), (WorkerState::Left.name(), 7));
        assert_eq!(handle.status(1).unwrap().unwrap(), last, "its times stand");
        assert_eq!(handle.status(2).unwrap(), None);
        assert_eq!(handle.usage(), Usage::default());
        assert!(arena.usage().held >= 20_000);
    }
}
