//! The position in an epoch: which tasks have been delivered.
//!
//! An *answer* is a batch that the engine has returned to the caller of `next`, or the error in its place.
//! [`Positions`] keeps the last few answers, so that it can also return earlier positions. The tasks of the epoch are
//! identified by their ordinals, which count from 0.

use std::collections::{BTreeSet, VecDeque};

use crate::config::{BACK_ANSWERS, BACK_BATCHES};

/// A position in an epoch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// The low-water mark: all tasks with smaller ordinals have been delivered, or were left out because a worker's
    /// iterable dataset had ended.
    pub low: u64,
    /// The ordinals of the delivered tasks from `low` on, in ascending order. Empty if batches are delivered in order.
    pub ahead: Vec<u64>,
    /// Number of answers from each worker.
    pub per_worker: Vec<u64>,
    /// The worker of the last answer.
    pub last_worker: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Answer {
    ordinal: u64,
    worker: u32,
    is_batch: bool,
}

/// The answers of an epoch so far.
#[derive(Debug)]
pub struct Positions {
    low: u64,
    /// The ordinals of the delivered tasks from `low` on.
    ahead: BTreeSet<u64>,
    /// The ordinals of tasks that no worker will answer. Each is kept until no position before it can be requested.
    left_out: BTreeSet<u64>,
    /// The most recent answers. A position before the last answer excludes some of them.
    recent: VecDeque<Answer>,
    /// Number of batches in `recent`.
    batches: usize,
    /// Number of each worker's answers before `recent`.
    settled: Vec<u64>,
    /// The worker of the last answer before `recent`.
    settled_last: Option<u32>,
    /// Total number of answers.
    answers: u64,
}

impl Positions {
    /// Creates the record for an epoch of `workers` workers, without answers.
    pub fn new(workers: usize) -> Self {
        Self {
            low: 0,
            ahead: BTreeSet::new(),
            left_out: BTreeSet::new(),
            recent: VecDeque::with_capacity(2 * BACK_BATCHES),
            batches: 0,
            settled: vec![0; workers],
            settled_last: None,
            answers: 0,
        }
    }

    /// Begins another epoch: drops all answers.
    pub fn begin_epoch(&mut self) {
        *self = Self::new(self.settled.len());
    }

    /// Records that a task's batch, or an error in its place, has been returned.
    #[inline]
    pub fn answered(&mut self, ordinal: u64, worker: u32, is_batch: bool) {
        self.answers += 1;
        self.recent.push_back(Answer { ordinal, worker, is_batch });
        self.batches += usize::from(is_batch);
        self.settle();
        if ordinal == self.low {
            self.low += 1;
            self.advance();
        } else {
            self.ahead.insert(ordinal);
        }
    }

    /// Turns the last answer into an error, because its batch could not be read.
    pub fn failed(&mut self) {
        if let Some(last) = self.recent.back_mut()
            && std::mem::take(&mut last.is_batch)
        {
            self.batches -= 1;
        }
    }

    /// Records that no worker will answer a task.
    pub fn left_out(&mut self, ordinal: u64) {
        self.left_out.insert(ordinal);
        self.advance();
    }

    /// Raises `low` past the tasks that have been delivered or left out.
    #[inline]
    fn advance(&mut self) {
        if !self.ahead.is_empty() || !self.left_out.is_empty() {
            while self.ahead.remove(&self.low) || self.left_out.contains(&self.low) {
                self.low += 1;
            }
        }
    }

    /// Moves answers that every position includes from `recent` to `settled`. A position can exclude only the last
    /// answer and the [`BACK_BATCHES`] batches before it.
    #[inline]
    fn settle(&mut self) {
        while self.recent.len() > 1
            && let Some(oldest) = self.recent.front()
            && (!oldest.is_batch || self.batches > BACK_BATCHES + 1 || self.recent.len() > BACK_ANSWERS)
        {
            self.batches -= usize::from(oldest.is_batch);
            self.settled[oldest.worker as usize] += 1;
            self.settled_last = Some(oldest.worker);
            self.recent.pop_front();
        }
        if !self.left_out.is_empty() {
            let oldest = self.recent.iter().map(|answer| answer.ordinal).min();
            self.left_out = self.left_out.split_off(&oldest.unwrap_or(self.low).min(self.low));
        }
    }

    /// Returns the number of a worker's answers that every position from now on includes.
    pub fn settled(&self, worker: u32) -> u64 {
        self.settled[worker as usize]
    }

    /// Returns the position after the first `answers` answers of the epoch, without the last `back` batches and the
    /// errors after each of them. `answers` must be the number of all answers, or one less. The error says why there is
    /// no such position.
    pub fn at(&self, answers: u64, back: usize) -> Result<Position, String> {
        let missing = self.answers.checked_sub(answers).filter(|missing| *missing <= 1);
        let Some(missing) = missing else {
            return Err(format!("{} answers were given in this epoch, not {answers}", self.answers));
        };
        let kept = self.kept(missing as usize, back)?;
        let undone: BTreeSet<u64> = self.recent.iter().skip(kept).map(|answer| answer.ordinal).collect();
        let low = undone.first().map_or(self.low, |first| self.low.min(*first));
        let is_delivered = |ordinal: &u64| !undone.contains(ordinal) && !self.left_out.contains(ordinal);
        let mut per_worker = self.settled.clone();
        self.recent.iter().take(kept).for_each(|answer| per_worker[answer.worker as usize] += 1);
        Ok(Position {
            low,
            ahead: (low..self.low).chain(self.ahead.iter().copied()).filter(is_delivered).collect(),
            per_worker,
            last_worker: match kept.checked_sub(1) {
                Some(last) => Some(self.recent[last].worker),
                None => self.settled_last,
            },
        })
    }

    /// Returns the number of recent answers that remain after removing the last `missing` answers, and then the last
    /// `back` batches with the errors after them.
    fn kept(&self, missing: usize, back: usize) -> Result<usize, String> {
        if back > BACK_BATCHES {
            return Err(format!("a position is at most {BACK_BATCHES} batches back, not {back}"));
        }
        let mut kept = self.recent.len() - missing;
        for taken_back in 0..back {
            let batch = self.recent.iter().take(kept).rposition(|answer| answer.is_batch);
            kept = batch.ok_or_else(|| format!("{taken_back} batches of this epoch can be taken back, not {back}"))?;
        }
        Ok(kept)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the record after a worker has answered with a batch for each `true` and an error for each `false`.
    fn record(batches: &[bool]) -> Positions {
        let mut positions = Positions::new(1);
        (0..).zip(batches).for_each(|(ordinal, is_batch)| positions.answered(ordinal, 0, *is_batch));
        positions
    }

    #[test]
    fn a_position_that_is_not_kept_is_an_error() {
        let mut positions = record(&[true; 3]);
        for answers in [0, 1, 4, u64::MAX] {
            let text = positions.at(answers, 0).unwrap_err();
            assert_eq!(text, format!("3 answers were given in this epoch, not {answers}"));
        }
        positions.begin_epoch();
        assert_eq!(positions.at(0, 0), Ok(Position { per_worker: vec![0], ..Position::default() }));
        let text = record(&[true, false, true, false, false]).at(5, 3).unwrap_err();
        assert_eq!(text, "2 batches of this epoch can be taken back, not 3");
        assert_eq!(record(&[true; 50]).at(50, 10).unwrap_err(), "a position is at most 9 batches back, not 10");
    }

    #[test]
    fn the_record_is_bounded_and_answers_in_order_allocate_nothing() {
        let mut positions = record(&[true; 100]);
        assert_eq!(positions.recent.len(), BACK_BATCHES + 1);
        assert_eq!(positions.recent.capacity(), Positions::new(1).recent.capacity());
        positions.left_out(100);
        (101..120).for_each(|ordinal| positions.answered(ordinal, 0, true));
        assert!(positions.left_out.is_empty());
        // An error before the oldest batch need not be kept.
        positions = record(&[false; 100]);
        assert_eq!((positions.recent.len(), positions.settled(0)), (1, 99));
        let mut many = vec![false; BACK_ANSWERS];
        many[0] = true;
        positions = record(&many);
        assert_eq!(positions.at(BACK_ANSWERS as u64, 1).unwrap().low, 0);
        positions.answered(BACK_ANSWERS as u64, 0, false);
        assert!(positions.at(BACK_ANSWERS as u64 + 1, 1).is_err());
        assert_eq!(positions.recent.len(), 1);
    }

    #[derive(Clone, Copy, Debug)]
    enum Op {
        /// A worker answers one of the outstanding tasks with a batch (true) or an error (false).
        Answer(usize, u32, bool),
        LeftOut(usize),
        Failed,
    }

    const WORKERS: u32 = 3;

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let op = prop_oneof![
            12 => (0..6usize, 0..WORKERS, any::<bool>()).prop_map(|(n, worker, ok)| Op::Answer(n, worker, ok)),
            12 => (0..1usize, 0..WORKERS, Just(true)).prop_map(|(n, worker, ok)| Op::Answer(n, worker, ok)),
            2 => (0..6usize).prop_map(Op::LeftOut),
            1 => Just(Op::Failed),
        ];
        proptest::collection::vec(op, 0..80)
    }

    /// Computes the position after `answers`, which are all answers since the start of the epoch.
    fn counted(answers: &[Answer], left_out: &BTreeSet<u64>) -> Position {
        let delivered: BTreeSet<u64> = answers.iter().map(|answer| answer.ordinal).collect();
        let low = (0..).find(|ordinal| !delivered.contains(ordinal) && !left_out.contains(ordinal)).unwrap();
        let of = |worker| answers.iter().filter(|answer| answer.worker == worker).count() as u64;
        Position {
            low,
            ahead: delivered.range(low..).copied().collect(),
            per_worker: (0..WORKERS).map(of).collect(),
            last_worker: answers.last().map(|answer| answer.worker),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn positions_are_those_of_a_full_record(ops in ops()) {
            let mut positions = Positions::new(WORKERS as usize);
            let (mut answers, mut left_out) = (Vec::<Answer>::new(), BTreeSet::new());
            // Outstanding tasks.
            let mut open: Vec<u64> = (0..6).collect();
            let mut next = 6;
            for op in ops {
                match op {
                    Op::Answer(n, worker, is_batch) => {
                        let ordinal = open.remove(n);
                        positions.answered(ordinal, worker, is_batch);
                        answers.push(Answer { ordinal, worker, is_batch });
                    }
                    Op::LeftOut(n) => {
                        let ordinal = open.remove(n);
                        positions.left_out(ordinal);
                        left_out.insert(ordinal);
                    }
                    Op::Failed => {
                        positions.failed();
                        if let Some(last) = answers.last_mut() {
                            last.is_batch = false;
                        }
                    }
                }
                if open.len() < 6 {
                    open.push(next);
                    next += 1;
                }
                for missing in 0..=answers.len().min(1) {
                    let given = answers.len() - missing;
                    let mut kept = &answers[..given];
                    for back in 0..=BACK_BATCHES {
                        prop_assert_eq!(positions.at(given as u64, back), Ok(counted(kept, &left_out)));
                        let Some(batch) = kept.iter().rposition(|answer| answer.is_batch) else {
                            prop_assert!(positions.at(given as u64, back + 1).is_err());
                            break;
                        };
                        kept = &kept[..batch];
                    }
                }
                for worker in 0..WORKERS {
                    let least = (0..=BACK_BATCHES)
                        .filter_map(|back| positions.at(answers.len().saturating_sub(1) as u64, back).ok())
                        .map(|position| position.per_worker[worker as usize])
                        .min();
                    prop_assert!(positions.settled(worker) <= least.unwrap_or(0));
                }
            }
        }
    }
}
