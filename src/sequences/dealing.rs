//! The batches of one rank.

/// Deals the batches of a plan to ranks in rounds, so that all ranks get equally many.
#[derive(Clone, Copy, Debug)]
pub struct Dealing {
    /// Number of batches in the plan.
    pub batches: usize,
    /// Number of batches, from the start of the plan, that were delivered before.
    pub consumed: usize,
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub replicas: usize,
    /// Whether an incomplete last round is dropped. Otherwise it is filled with the first batches after `consumed`.
    pub drop_last: bool,
}

impl Dealing {
    fn remaining(&self) -> usize {
        self.batches.saturating_sub(self.consumed)
    }

    /// Returns the number of batches that each rank gets.
    pub fn rounds(&self) -> usize {
        match self.drop_last {
            true => self.remaining() / self.replicas,
            false => self.remaining().div_ceil(self.replicas),
        }
    }

    /// Returns the number, in the plan, of the batch that this rank gets in a round. Returns `None` after the last
    /// round.
    pub fn batch(&self, round: usize) -> Option<usize> {
        (round < self.rounds()).then(|| self.consumed + (round * self.replicas + self.rank) % self.remaining())
    }
}
