//! Shuffles: Fisher-Yates with the words of Philox4x64-10, the generator of `seed_by`.

use crate::seeds;

/// The second word of the key, which is 0 for `seed_by`.
const DOMAIN: u64 = 1;

/// Shuffles slices, one after another, with the random numbers of an epoch.
pub struct Shuffler {
    key: [u64; 2],
    epoch: u64,
    /// Number of words that have been used.
    used: u64,
    /// The block of the next word.
    words: [u64; 4],
}

impl Shuffler {
    pub fn new(seed: u64, epoch: u64) -> Self {
        Self { key: [seed, DOMAIN], epoch, used: 0, words: [0; 4] }
    }

    /// Returns a number below `bound`, by scaling a word (D. Lemire, "Fast random integer generation in an interval",
    /// 2019). Without the rejection step, probabilities differ by less than 2^-32.
    fn below(&mut self, bound: u32) -> usize {
        let place = (self.used % 4) as usize;
        if place == 0 {
            self.words = seeds::philox([self.used / 4, 0, self.epoch, 0], self.key);
        }
        self.used += 1;
        ((u128::from(self.words[place]) * u128::from(bound)) >> 64) as usize
    }

    /// Shuffles a slice of fewer than 2^32 numbers (D. E. Knuth, TAOCP 3.4.2, algorithm P).
    ///
    /// Several places are drawn before numbers are swapped, so that the cache misses of the swaps overlap.
    pub fn shuffle(&mut self, numbers: &mut [u32]) {
        let (mut places, mut end) = ([0; 32], numbers.len());
        while end > 1 {
            let drawn = places.len().min(end - 1);
            for (place, bound) in places[..drawn].iter_mut().zip((0..=end).rev()) {
                *place = self.below(bound as u32);
            }
            for &place in &places[..drawn] {
                end -= 1;
                numbers.swap(end, place);
            }
        }
    }
}
