//! The table of workers: who may take the next task, and which tasks each one holds.
//!
//! The dispatch policy is [`Workers::pick`] and nothing else.

use super::Dispatch;
use super::bitmap::Bitmap;
use super::reorder::NIL;

/// Where a worker stands in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// It takes tasks.
    Active,
    /// Its iterable dataset has ended for this epoch; the worker stays for the next one.
    Exhausted,
    /// Its iterable dataset has ended and there is no next epoch for it: it is told to leave.
    Retired,
    /// Its process has ended without being told to.
    Dead,
}

/// What is known of one worker: small, because every event touches one entry of a table in random order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Worker {
    /// The slot of its oldest dispatched task without a result: the front of its FIFO.
    pub front: u32,
    /// The slot of its newest dispatched task without a result: the back of its FIFO.
    pub back: u32,
    /// Tasks dispatched to it in this epoch and not yet delivered (torch's `_workers_num_tasks`).
    pub load: u32,
    /// Resume messages that it has not answered yet; while there is one, all that it sends is stale.
    pub resumes: u16,
    /// Where it stands in its life.
    pub life: Life,
    /// Whether it stands in [`Workers::full`].
    pub listed: bool,
}

/// All workers, and the round-robin cursor.
#[derive(Debug)]
pub(super) struct Workers {
    /// One entry for each worker.
    table: Vec<Worker>,
    /// The active workers whose load is below `cap`.
    open: Bitmap,
    /// Workers that have met `cap` since it last grew. When it grows again these, and only these, have to be
    /// looked at, and each was put here by a submission: so a growing cap costs O(1) for each submission.
    full: Vec<u32>,
    /// The round-robin cursor: the worker to ask first.
    cursor: u32,
    /// The number of active workers.
    active: u32,
    /// The fair share: how many tasks one worker may hold. It only grows within an epoch.
    cap: u32,
    /// Tasks that may be outstanding or ready together.
    window: u32,
    /// Whether there is a fair share.
    dispatch: Dispatch,
}

impl Workers {
    /// `count` fresh workers that may hold `window` tasks together.
    pub fn new(count: usize, window: u32, dispatch: Dispatch) -> Self {
        let fresh = Worker { front: NIL, back: NIL, load: 0, resumes: 0, life: Life::Active, listed: false };
        let mut workers = Self {
            table: vec![fresh; count],
            open: Bitmap::new(count),
            full: Vec::with_capacity(count),
            cursor: 0,
            active: 0,
            cap: 0,
            window,
            dispatch,
        };
        workers.begin_epoch();
        workers
    }

    /// Every worker is active and without load, the cursor stands at worker 0. What the FIFOs hold stays there.
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

    /// The number of workers.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// The entry of one worker.
    #[inline]
    pub fn get(&self, index: usize) -> Option<&Worker> {
        self.table.get(index)
    }

    /// The entry of one worker, which exists.
    #[inline]
    pub fn at(&mut self, index: u32) -> &mut Worker {
        &mut self.table[index as usize]
    }

    /// Chooses the worker of the next task and counts the task; nothing changes where no worker may take one.
    ///
    /// This is torch's walk over `itertools.cycle`: every worker that is looked at passes the cursor, and a walk
    /// that finds nobody goes round once and leaves the cursor where it was.
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

    /// One of the worker's tasks is delivered.
    #[inline]
    pub fn unload(&mut self, index: u32) {
        let worker = &mut self.table[index as usize];
        worker.load -= 1;
        if worker.load + 1 == self.cap && worker.life == Life::Active {
            self.open.insert(index as usize);
        }
    }

    /// The worker takes no more tasks in this epoch, and the fair share of the others may grow.
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

    /// The limit of each worker: torch's `max_tasks // active workers`, or none.
    fn fair_share(&self) -> u32 {
        match self.dispatch {
            Dispatch::FairShare if self.active > 0 => self.window / self.active,
            _ => u32::MAX,
        }
    }
}
