//! Records of the workers' processes: which are stuck, how they died, and how many results each worker has published.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::handle::Handle;
use super::process::Process;
use super::stalls::Stalls;
use super::stalls::overdue::Overdue;
use crate::shm::layout::WorkerState;
use crate::sync::Ordering;
use crate::sys::pidfd::ExitStatus;

/// A record of a process that has died, for reports made after its slot and status page may have been emptied.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeathRecord {
    pub(super) pid: i32,
    pub(super) status: Option<ExitStatus>,
    /// The last task that the process took.
    pub(super) task: u64,
    /// True if the process had begun that task.
    pub(super) has_begun: bool,
    /// The index, within that task's index batch, of the sample that the process was fetching, if any.
    pub(super) place: Option<u64>,
    pub(super) generation: u32,
    pub(super) stalled: bool,
}

/// The monitor of the workers' processes.
#[derive(Debug)]
pub(super) struct Liveness {
    handle: Arc<Handle>,
    /// Finds stuck workers, which are named in the log.
    pub(super) stalls: Stalls,
    /// Finds stuck workers that must be killed.
    pub(super) overdue: Overdue,
    /// True if workers that die may be replaced.
    restarts: bool,
    /// Number of each worker's results in this epoch. Counted only if `restarts` is true.
    answered: Box<[u64]>,
    /// The records of dead processes whose slots have not been filled again. Kept only if `restarts` is true.
    records: BTreeMap<u32, DeathRecord>,
}

impl Liveness {
    pub(super) fn new(handle: Arc<Handle>, restarts: bool) -> Self {
        let workers = handle.arena.geometry().workers;
        Self {
            handle,
            stalls: Stalls::new(workers),
            overdue: Overdue::new(workers),
            restarts,
            answered: vec![0; workers as usize].into(),
            records: BTreeMap::new(),
        }
    }

    /// Returns true if workers that die may be replaced.
    #[inline]
    pub(super) fn restarts(&self) -> bool {
        self.restarts
    }

    /// Begins another epoch: resets the counts of results.
    pub(super) fn begin_epoch(&mut self) {
        self.answered.fill(0);
    }

    /// Counts a worker's result in this epoch.
    #[inline]
    pub(super) fn count_answer(&mut self, worker: u32) {
        self.answered[worker as usize] += 1;
    }

    /// Returns the number of results that a worker's processes have published in this epoch; 0 unless workers may be
    /// replaced.
    pub(super) fn answers_of(&self, worker: u32) -> u64 {
        self.answered[worker as usize]
    }

    /// Keeps the record of a worker's process that has ended, if the process may be replaced.
    pub(super) fn keep_record(&mut self, worker: u32) {
        if self.restarts {
            let record = self.read_record(worker);
            self.records.insert(worker, record);
        }
    }

    /// Returns the record of a worker's process that has ended.
    pub(super) fn record_of(&self, worker: u32) -> DeathRecord {
        self.records.get(&worker).copied().unwrap_or_else(|| self.read_record(worker))
    }

    fn read_record(&self, worker: u32) -> DeathRecord {
        let process = self.handle.process(worker);
        let status = process.as_deref().and_then(Process::status);
        let page = &self.handle.arena.control(worker).status;
        DeathRecord {
            pid: process.as_ref().map_or(0, |process| process.pid),
            status,
            task: page.task.load(Ordering::Relaxed),
            has_begun: page.has_begun(),
            // Once all samples are fetched, none of them can be the cause.
            place: (page.has_begun() && page.state.load(Ordering::Relaxed) == WorkerState::Fetch as u32)
                .then(|| page.place.load(Ordering::Relaxed).checked_sub(1))
                .flatten(),
            generation: self.handle.generation(worker).saturating_sub(1),
            stalled: self.overdue.was_killed(worker, status),
        }
    }

    /// Resets the checks of a worker for its next process.
    pub(super) fn forget(&mut self, worker: u32) {
        self.stalls.forget(worker);
        self.overdue.forget(worker);
    }

    /// Drops the record of a worker's dead process, because the worker has a process again.
    pub(super) fn replaced(&mut self, worker: u32) {
        self.records.remove(&worker);
    }
}
