//! The batches of an epoch, planned from the lengths of the samples.
//!
//! A plan depends on the lengths, the settings, the seed and the epoch alone, so all ranks make the same plan on all
//! platforms, and a position in it is one number. It takes at most 12 bytes per sample. Results must never change,
//! because programs resume runs of earlier versions.

mod budget;
mod dealing;
mod free_list;
mod packs;
mod permutation;

pub use budget::{Budget, budget};
pub use dealing::Dealing;
pub use packs::{Packs, packs};

use permutation::Shuffler;

/// The order of the samples before lengths are considered.
#[derive(Clone, Copy, Debug)]
pub struct Order {
    /// Whether samples and batches are permuted.
    pub shuffle: bool,
    /// The seed, the same for all epochs.
    pub seed: u64,
    /// The number of the epoch.
    pub epoch: u64,
    /// Number of consecutive samples of the permuted order that are arranged by length.
    pub window: usize,
}

/// The index batches of an epoch.
#[derive(Debug)]
pub struct Plan {
    /// The indices of all groups, one group after another. A group is a batch or, for packs, a pack.
    indices: Vec<u32>,
    /// Where each group begins in `indices`, and the end of the last one.
    starts: Vec<u32>,
    /// The groups in the order of their batches.
    order: Vec<u32>,
    groups_per_batch: usize,
}

impl Plan {
    /// Shuffles the groups if the order is shuffled.
    fn new(indices: Vec<u32>, mut starts: Vec<u32>, groups_per_batch: usize, shuffler: Option<Shuffler>) -> Self {
        starts.shrink_to_fit();
        let mut order: Vec<u32> = (0..starts.len() as u32 - 1).collect();
        if let Some(mut shuffler) = shuffler {
            shuffler.shuffle(&mut order);
        }
        Self { indices, starts, order, groups_per_batch }
    }

    /// Returns the number of batches.
    pub fn batches(&self) -> usize {
        self.order.len().div_ceil(self.groups_per_batch)
    }

    /// Returns the number of groups: of packs, or of batches.
    pub fn groups(&self) -> usize {
        self.order.len()
    }

    /// Returns the indices of a batch. Returns none for a batch past the last one.
    pub fn batch(&self, number: usize) -> Vec<u32> {
        let first = number.saturating_mul(self.groups_per_batch).min(self.order.len());
        let last = first.saturating_add(self.groups_per_batch).min(self.order.len());
        let bounds = |&group: &u32| self.starts[group as usize] as usize..self.starts[group as usize + 1] as usize;
        self.order[first..last].iter().flat_map(|group| &self.indices[bounds(group)]).copied().collect()
    }

    /// Returns the number of bytes that the plan takes.
    pub fn bytes(&self) -> usize {
        4 * (self.indices.capacity() + self.starts.capacity() + self.order.capacity())
    }
}

/// Permutes the samples `0..count` and calls `each` for each window, with the window's number and its samples. Samples
/// are in ascending order of length; equal lengths keep the permuted order. Returns the generator, for later shuffles.
fn windows(
    count: u32,
    length: impl Fn(u32) -> u32,
    order: &Order,
    mut each: impl FnMut(usize, &mut dyn DoubleEndedIterator<Item = Sample>),
) -> Option<Shuffler> {
    let mut indices: Vec<u32> = (0..count).collect();
    let mut shuffler = order.shuffle.then(|| Shuffler::new(order.seed, order.epoch));
    if let Some(shuffler) = &mut shuffler {
        shuffler.shuffle(&mut indices);
    }
    let mut keys = Vec::new();
    for (number, window) in indices.chunks(order.window.max(1)).enumerate() {
        keys.clear();
        let key = |(place, &index): (usize, &u32)| u64::from(length(index)) << 32 | place as u64;
        keys.extend(window.iter().enumerate().map(key));
        keys.sort_unstable();
        let sample = |&key: &u64| Sample { index: window[key as u32 as usize], length: key >> 32 };
        each(number, &mut keys.iter().map(sample));
    }
    shuffler
}

/// A sample and its length.
#[derive(Clone, Copy)]
struct Sample {
    index: u32,
    length: u64,
}

#[cfg(test)]
mod tests;
