//! The workers' snapshots of this epoch: which of them a position may need.

use std::collections::VecDeque;

/// The snapshots of all workers. `M` is what a snapshot consists of.
#[derive(Debug)]
pub struct Snapshots<M> {
    workers: Vec<OfWorker<M>>,
}

#[derive(Debug)]
struct OfWorker<M> {
    /// Snapshots with the number of the worker's answers before each, which ascends.
    kept: VecDeque<(u64, M)>,
    /// The worker works on this epoch. What it sent before belongs to the last one.
    is_in_epoch: bool,
    /// The first snapshot of this epoch has come.
    has_started: bool,
}

impl<M> Snapshots<M> {
    /// None yet, in the first epoch.
    pub fn new(workers: usize) -> Self {
        let worker = || OfWorker { kept: VecDeque::new(), is_in_epoch: true, has_started: false };
        Self { workers: (0..workers).map(|_| worker()).collect() }
    }

    /// Begins another epoch of persistent workers.
    pub fn begin_epoch(&mut self) {
        for worker in &mut self.workers {
            worker.kept.clear();
            (worker.is_in_epoch, worker.has_started) = (false, false);
        }
    }

    /// Notes that a worker has begun the epoch.
    pub fn resumed(&mut self, worker: u32) {
        self.workers[worker as usize].is_in_epoch = true;
    }

    /// Keeps a snapshot that a worker made after `count` answers, in place of those that no position needs any more. All
    /// positions have at least `settled` answers of this worker. `None` is a snapshot that was left out.
    pub fn keep(&mut self, worker: u32, count: u64, snapshot: Option<M>, settled: u64) {
        let OfWorker { kept, is_in_epoch, has_started } = &mut self.workers[worker as usize];
        if !*is_in_epoch {
            return;
        }
        *has_started = true;
        let Some(snapshot) = snapshot else { return };
        // A later snapshot of the same moment says more: that the dataset has ended, or that there was an error.
        while kept.back().is_some_and(|(before, _)| *before >= count) {
            kept.pop_back();
        }
        kept.push_back((count, snapshot));
        while kept.get(1).is_some_and(|(next, _)| *next <= settled) {
            kept.pop_front();
        }
    }

    /// Whether the worker has sent its first snapshot of this epoch.
    pub fn has_started(&self, worker: u32) -> bool {
        self.workers[worker as usize].has_started
    }

    /// The newest snapshot that a worker made after at most `answers` answers, and that number.
    pub fn at(&self, worker: u32, answers: u64) -> Option<(u64, &M)> {
        let kept = &self.workers.get(worker as usize)?.kept;
        let (count, snapshot) = kept.iter().rfind(|(count, _)| *count <= answers)?;
        Some((*count, snapshot))
    }

    /// Drops all snapshots.
    pub fn clear(&mut self) {
        self.workers.iter_mut().for_each(|worker| worker.kept.clear());
    }
}
