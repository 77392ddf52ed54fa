//! A plan, and the windows of the permuted order from which it is made.

use super::shuffler::Shuffler;

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

/// The index batches of an epoch. They take at most 12 bytes per sample.
#[derive(Debug)]
pub struct Plan {
    /// The indices of all groups. A group is a batch or, for packs, a pack.
    indices: Vec<u32>,
    /// Where each group begins in `indices`, and the end of the last one.
    starts: Vec<u32>,
    /// The groups in the order of their batches.
    order: Vec<u32>,
    groups_per_batch: usize,
}

impl Plan {
    /// Shuffles the groups, if there is a shuffler.
    pub(super) fn new(
        indices: Vec<u32>,
        mut starts: Vec<u32>,
        groups_per_batch: usize,
        shuffler: Option<Shuffler>,
    ) -> Self {
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

    /// Returns the indices of a batch. Returns none for a batch past the last one.
    pub fn batch(&self, number: usize) -> Vec<u32> {
        let groups = self.order.chunks(self.groups_per_batch).nth(number).unwrap_or_default().iter();
        let bounds = |&group: &u32| self.starts[group as usize] as usize..self.starts[group as usize + 1] as usize;
        groups.flat_map(|group| &self.indices[bounds(group)]).copied().collect()
    }
}

/// Permutes the samples and calls `each` with the number of each window, and with the indices and lengths of its
/// samples: in ascending order of length, or in the permuted order if equal. Returns the generator of the permutation.
pub(super) fn windows(
    lengths: &[u32],
    order: &Order,
    mut each: impl FnMut(usize, &mut dyn DoubleEndedIterator<Item = (u32, u64)>),
) -> Option<Shuffler> {
    let mut indices: Vec<u32> = (0..lengths.len() as u32).collect();
    let mut shuffler = order.shuffle.then(|| Shuffler::new(order.seed, order.epoch));
    if let Some(shuffler) = &mut shuffler {
        shuffler.shuffle(&mut indices);
    }
    let mut keys = Vec::new();
    for (number, window) in indices.chunks(order.window).enumerate() {
        let key = |(place, &index): (usize, &u32)| u64::from(lengths[index as usize]) << 32 | place as u64;
        keys.clear();
        keys.extend(window.iter().enumerate().map(key));
        keys.sort_unstable();
        each(number, &mut keys.iter().map(|&key: &u64| (window[key as u32 as usize], key >> 32)));
    }
    shuffler
}
