//! Shuffles: Fisher-Yates with the words of Philox4x64-10, the generator of `seed_by`.

use crate::seeds;

/// The second word of the key. It separates these random numbers from those of `seed_by`, which have 0 there.
const DOMAIN: u64 = 1;

/// Shuffles slices, one after another, with the random numbers of an epoch.
pub struct Shuffler {
    key: [u64; 2],
    epoch: u64,
    /// Number of blocks of four words that have been generated.
    blocks: u64,
    words: [u64; 4],
    /// Number of words of the block that have been used.
    used: usize,
}

impl Shuffler {
    pub fn new(seed: u64, epoch: u64) -> Self {
        Self { key: [seed, DOMAIN], epoch, blocks: 0, words: [0; 4], used: 4 }
    }

    /// Returns a number below `bound`. The word is scaled (D. Lemire, "Fast random integer generation in an interval",
    /// 2019) without the rejection step: the probabilities differ by less than 2^-32.
    fn below(&mut self, bound: u32) -> usize {
        if self.used == self.words.len() {
            self.words = seeds::philox([self.blocks, 0, self.epoch, 0], self.key);
            (self.blocks, self.used) = (self.blocks + 1, 0);
        }
        self.used += 1;
        ((u128::from(self.words[self.used - 1]) * u128::from(bound)) >> 64) as usize
    }

    /// Shuffles a slice of fewer than 2^32 numbers (D. E. Knuth, TAOCP 3.4.2, algorithm P).
    pub fn shuffle(&mut self, numbers: &mut [u32]) {
        for last in (1..numbers.len()).rev() {
            numbers.swap(last, self.below(last as u32 + 1));
        }
    }
}
