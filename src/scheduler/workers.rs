//! The table of workers. [`Workers::pick`] implements the round-robin and fair-share policies; early tasks bypass it.

use super::Dispatch;
use super::bitmap::Bitmap;
use super::reorder::NIL;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// The worker takes tasks.
    Active,
    /// The worker's iterable dataset has ended in this epoch.
    Exhausted,
    /// The worker's iterable dataset has ended, and the worker, which is not persistent, has been asked to exit.
    Retired,
    /// The worker's process has ended unexpectedly and will not be replaced.
    Dead,
}

/// A worker's entry in the table. It is small, because events access the entries in random order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Worker {
    /// Slot of the oldest outstanding task, the front of the worker's FIFO; `NIL` if there is none. With a shared
    /// queue, the FIFO holds only tasks that a process of the worker held when it died.
    pub front: u32,
    /// Slot of the newest outstanding task. Valid only if `front` is not `NIL`.
    pub back: u32,
    /// Slot of the first outstanding task that has not been sent to the worker's current process. `NIL` unless an
    /// earlier process of the worker has died.
    pub unsent: u32,
    /// Number of undelivered tasks of this epoch (torch's `_workers_num_tasks`); with a window, number of unanswered
    /// ones.
    pub load: u32,
    /// Number of unanswered resume messages, of which only the oldest has been sent. While it is above 0, all results
    /// from the worker are stale.
    pub resumes: u8,
    pub life: Life,
    /// True if the worker's process has died and may be replaced.
    pub vacant: bool,
    /// True if [`Workers::full`] lists the worker.
    pub listed: bool,
}

/// All workers, and the round-robin cursor.
#[derive(Debug)]
pub(super) struct Workers {
    table: Vec<Worker>,
    /// The active workers whose load is below `cap`.
    open: Bitmap,
    /// Workers whose load has reached `cap` since `cap` last grew. Only these are checked when it grows again. Each was
    /// added by a submission, so the checks cost amortized O(1) per submission.
    full: Vec<u32>,
    /// The first candidate for the next `pick`.
    cursor: u32,
    /// Number of active workers.
    active: u32,
    /// Maximum load of one worker: the fair share. It only grows within an epoch.
    cap: u32,
    max_tasks: u32,
    dispatch: Dispatch,
}

impl Workers {
    pub fn new(count: usize, max_tasks: u32, dispatch: Dispatch) -> Self {
        let fresh = Worker {
            front: NIL,
            back: NIL,
            unsent: NIL,
            load: 0,
            resumes: 0,
            life: Life::Active,
            vacant: false,
            listed: false,
        };
        let mut workers = Self {
            table: vec![fresh; count],
            open: Bitmap::new(count),
            full: Vec::with_capacity(count),
            cursor: 0,
            active: 0,
            cap: 0,
            max_tasks,
            dispatch,
        };
        workers.begin_epoch();
        workers
    }

    /// Makes every worker active, with a load of 0, and resets the cursor. Keeps the FIFOs.
    pub fn begin_epoch(&mut self) {
        self.full.clear();
        for (index, worker) in self.table.iter_mut().enumerate() {
            worker.load = 0;
            worker.life = Life::Active;
            worker.listed = false;
            self.open.insert(index);
        }
        self.cursor = 0;
        self.active = self.table.len() as u32;
        self.cap = self.fair_share();
    }

    /// Makes an existing worker the first candidate for the next `pick`.
    pub fn begin_with(&mut self, index: u32) {
        self.cursor = index;
    }

    /// Begins an epoch of which `tasks` tasks have already been dispatched to the workers in turn. If a worker is dead
    /// (`all_live` is false), only sets the loads.
    pub fn take_up(&mut self, tasks: u64, all_live: bool) {
        if all_live {
            self.begin_epoch();
            for _ in 0..tasks {
                self.pick();
            }
            return;
        }
        let count = self.table.len() as u64;
        for (index, worker) in (0..).zip(&mut self.table) {
            worker.load = ((tasks + count - 1 - index) / count) as u32;
        }
    }

    pub fn len(&self) -> usize {
        self.table.len()
    }

    #[inline]
    pub fn get(&self, index: usize) -> Option<&Worker> {
        self.table.get(index)
    }

    /// Returns the entry of an existing worker. Panics if there is no such worker.
    #[inline]
    pub fn at(&mut self, index: u32) -> &mut Worker {
        &mut self.table[index as usize]
    }

    /// Selects the worker for the next task, and adds the task to its load. Returns `None` if no worker may take a
    /// task.
    ///
    /// Behaves like torch's walk over `itertools.cycle`, which moves past each worker that it checks. If torch finds no
    /// worker, it has gone around the cycle once, so the cursor does not move.
    #[inline]
    pub fn pick(&mut self) -> Option<u32> {
        let index = self.open.next_cyclic(self.cursor as usize)?;
        self.cursor = if index + 1 == self.table.len() { 0 } else { index as u32 + 1 };
        let worker = &mut self.table[index];
        worker.load += 1;
        if worker.load >= self.cap {
            self.open.remove(index);
            if !worker.listed {
                worker.listed = true;
                self.full.push(index as u32);
            }
        }
        Some(index as u32)
    }

    /// Returns true if `pick` would select a worker.
    #[inline]
    pub fn any_open(&self) -> bool {
        self.open.next_cyclic(0).is_some()
    }

    /// Returns the number of active workers.
    pub fn active(&self) -> u32 {
        self.active
    }

    /// Subtracts a task from the worker's load. Call it when the task is delivered or, with a window, answered.
    #[inline]
    pub fn unload(&mut self, index: u32) {
        let worker = &mut self.table[index as usize];
        worker.load -= 1;
        if worker.load + 1 == self.cap && worker.life == Life::Active {
            self.open.insert(index as usize);
        }
    }

    /// Excludes a worker from this epoch, and sets its state to `life`. The fair share of the others may grow.
    pub fn deactivate(&mut self, index: u32, life: Life) {
        let worker = &mut self.table[index as usize];
        let was_active = worker.life == Life::Active;
        worker.life = life;
        if !was_active {
            return;
        }
        self.open.remove(index as usize);
        self.active -= 1;
        let cap = self.fair_share();
        if cap > self.cap {
            self.cap = cap;
            for index in self.full.drain(..) {
                let worker = &mut self.table[index as usize];
                worker.listed = false;
                if worker.life == Life::Active {
                    self.open.insert(index as usize);
                }
            }
        }
    }

    /// Returns the maximum load of a worker: for `FairShare` `max_tasks / active workers`, as in torch, and otherwise
    /// `u32::MAX`, which is no limit.
    fn fair_share(&self) -> u32 {
        match self.dispatch {
            Dispatch::FairShare if self.active > 0 => self.max_tasks / self.active,
            _ => u32::MAX,
        }
    }
}
