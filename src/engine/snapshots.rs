//! The workers' snapshots in this epoch that a position may need.

use std::collections::VecDeque;

/// The snapshots of all workers. `M` is the type of a snapshot's contents.
#[derive(Debug)]
pub struct Snapshots<M> {
    workers: Vec<WorkerSnapshots<M>>,
}

#[derive(Debug)]
struct WorkerSnapshots<M> {
    /// Each snapshot with the number of the worker's answers before it, in ascending order of that number.
    kept: VecDeque<(u64, M)>,
    /// True once the worker has begun this epoch. Snapshots that arrive earlier belong to the previous epoch.
    is_in_epoch: bool,
    /// True once the first snapshot of this epoch has arrived.
    has_started: bool,
}

impl<M> Snapshots<M> {
    /// Creates the record for the first epoch, without snapshots.
    pub fn new(workers: usize) -> Self {
        let worker = || WorkerSnapshots { kept: VecDeque::new(), is_in_epoch: true, has_started: false };
        Self { workers: (0..workers).map(|_| worker()).collect() }
    }

    /// Begins another epoch of persistent workers: drops all snapshots.
    pub fn begin_epoch(&mut self) {
        for worker in &mut self.workers {
            worker.kept.clear();
            (worker.is_in_epoch, worker.has_started) = (false, false);
        }
    }

    /// Records that a worker has begun the epoch.
    pub fn resumed(&mut self, worker: u32) {
        self.workers[worker as usize].is_in_epoch = true;
    }

    /// Keeps a snapshot that a worker made after `count` answers, and drops those that no position needs any longer.
    /// All positions include at least `settled` answers from this worker. `snapshot` is `None` if the worker omitted
    /// the snapshot because there was no memory for it.
    pub fn keep(&mut self, worker: u32, count: u64, snapshot: Option<M>, settled: u64) {
        let WorkerSnapshots { kept, is_in_epoch, has_started } = &mut self.workers[worker as usize];
        if !*is_in_epoch {
            return;
        }
        *has_started = true;
        let Some(snapshot) = snapshot else { return };
        // Of two snapshots after the same answer, the later one contains more: the end of the dataset, or an error.
        while kept.back().is_some_and(|(before, _)| *before >= count) {
            kept.pop_back();
        }
        kept.push_back((count, snapshot));
        while kept.get(1).is_some_and(|(next, _)| *next <= settled) {
            kept.pop_front();
        }
    }

    /// Returns true if the worker has sent its first snapshot of this epoch.
    pub fn has_started(&self, worker: u32) -> bool {
        self.workers[worker as usize].has_started
    }

    /// Returns the newest snapshot that a worker made after at most `answers` answers, with the number of answers
    /// before it.
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

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use proptest::prelude::*;

    use super::*;

    fn at(snapshots: &Snapshots<&'static str>, answers: u64) -> Option<(u64, &'static str)> {
        snapshots.at(0, answers).map(|(count, snapshot)| (count, *snapshot))
    }

    #[test]
    fn a_new_epoch_drops_the_snapshots_of_the_old_one_even_if_they_arrive_late() {
        let mut snapshots = Snapshots::new(2);
        snapshots.keep(0, 7, Some("old"), 0);
        snapshots.begin_epoch();
        assert_eq!(at(&snapshots, 9), None);
        snapshots.keep(0, 8, Some("old"), 0);
        assert!(at(&snapshots, 9).is_none() && !snapshots.has_started(0));
        snapshots.resumed(0);
        assert!(!snapshots.has_started(0));
        snapshots.keep(0, 0, Some("new"), 0);
        assert!(at(&snapshots, 9) == Some((0, "new")) && snapshots.has_started(0));
        assert!(!snapshots.has_started(1));
    }

    #[test]
    fn an_omitted_snapshot_also_begins_the_epoch() {
        let mut snapshots = Snapshots::<&str>::new(1);
        assert!(!snapshots.has_started(0));
        snapshots.keep(0, 0, None, 0);
        assert!(snapshots.has_started(0) && at(&snapshots, 9).is_none());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn every_position_finds_the_snapshot_that_a_full_record_has(
            steps in proptest::collection::vec((0..3u64, 0..3u64), 1..60),
        ) {
            let mut snapshots = Snapshots::new(1);
            let (mut count, mut settled, mut all) = (0, 0, Vec::new());
            for (id, (later, answered)) in steps.into_iter().enumerate() {
                count += later;
                settled = (settled + answered).min(count);
                let snapshot = Rc::new(id);
                all.push((count, snapshot.clone()));
                snapshots.keep(0, count, Some(snapshot), settled);
                for answers in settled..=count + 1 {
                    let expected = all.iter().rfind(|(count, _)| *count <= answers);
                    let actual = snapshots.at(0, answers);
                    prop_assert_eq!(actual, expected.map(|(count, snapshot)| (*count, snapshot)));
                }
                // At most one kept snapshot precedes the settled answers, and each snapshot is either kept or dropped.
                let kept = all.iter().filter(|(_, snapshot)| Rc::strong_count(snapshot) == 2);
                let kept: Vec<u64> = kept.map(|(count, _)| *count).collect();
                prop_assert_eq!(kept.len(), snapshots.workers[0].kept.len());
                prop_assert!(kept.iter().filter(|count| **count <= settled).count() <= 1);
                prop_assert!(kept.is_sorted_by(|a, b| a < b));
            }
        }
    }
}
