//! Snapshots of worker and arena status, readable from any thread.

use super::Handle;
use crate::error::Result;
use crate::shm::arena::Usage;
use crate::shm::layout::{StatusPage, Terminated, WorkerState};
use crate::sync::Ordering;
use crate::sys;

/// A snapshot of a worker's status page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// A `WorkerState`.
    pub state: u32,
    /// The process id; 0 before the start.
    pub pid: u32,
    /// The current task, or the last one.
    pub task: u64,
    /// Tasks answered so far.
    pub tasks_done: u64,
    /// A [`Terminated`].
    pub terminated: u32,
    /// Nanoseconds in the state.
    pub in_state_ns: u64,
    /// Nanoseconds in each earlier state, by the state's number.
    pub spent_ns: [u64; WorkerState::COUNT],
}

impl Status {
    /// Reads a status page at the monotonic time `now`, in nanoseconds.
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

    /// The names of `state` and `terminated`.
    pub fn names(&self) -> (&'static str, &'static str) {
        (WorkerState::from_u32(self.state).name(), Terminated::name_of(self.terminated))
    }
}

impl Handle {
    /// A worker's status; after the end of the iterator the last one, because another iterator may use the arena. `None` for
    /// an unknown worker. [`Error::Child`](crate::error::Error::Child) in a forked child.
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

    /// The arena's memory. Zero after the end of the iterator and in a forked child.
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
