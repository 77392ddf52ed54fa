//! A set of worker IDs with a cyclic search in constant time.

/// Base-2 logarithm of the number of bits in a word.
const SHIFT: usize = 6;

/// Exclusive upper bound of the members that three levels of words can hold.
pub(super) const CAPACITY: usize = 1 << (3 * SHIFT);
const _: () = assert!(CAPACITY >= crate::config::WORKERS_MAX as usize);

/// A three-level bitmap. A bit of an upper level is set if the corresponding word of the level below is not zero.
#[derive(Debug, Default)]
pub(super) struct Bitmap {
    leaves: Vec<u64>,
    middle: Vec<u64>,
    root: u64,
}

/// Returns the position of the lowest set bit of `word` at or above `from`, which may be 64.
#[inline]
fn lowest_from(word: u64, from: usize) -> Option<usize> {
    let remaining = if from < 64 { word & (u64::MAX << from) } else { 0 };
    if remaining == 0 { None } else { Some(remaining.trailing_zeros() as usize) }
}

impl Bitmap {
    /// Creates an empty set of numbers below `bound`, which is at most [`CAPACITY`].
    pub fn new(bound: usize) -> Self {
        debug_assert!(bound <= CAPACITY);
        let leaves = bound.div_ceil(64);
        Self { leaves: vec![0; leaves], middle: vec![0; leaves.div_ceil(64)], root: 0 }
    }

    /// Adds `member` if it is missing.
    #[inline]
    pub fn insert(&mut self, member: usize) {
        let leaf = member >> SHIFT;
        let before = self.leaves[leaf];
        self.leaves[leaf] = before | 1 << (member & 63);
        if before == 0 {
            self.middle[leaf >> SHIFT] |= 1 << (leaf & 63);
            self.root |= 1 << (leaf >> SHIFT);
        }
    }

    /// Removes `member` if it is present.
    #[inline]
    pub fn remove(&mut self, member: usize) {
        let leaf = member >> SHIFT;
        self.leaves[leaf] &= !(1 << (member & 63));
        if self.leaves[leaf] == 0 {
            self.middle[leaf >> SHIFT] &= !(1 << (leaf & 63));
            if self.middle[leaf >> SHIFT] == 0 {
                self.root &= !(1 << (leaf >> SHIFT));
            }
        }
    }

    /// Returns the first member at or after `from` or, if there is none, the smallest member.
    #[inline]
    pub fn next_cyclic(&self, from: usize) -> Option<usize> {
        match self.next_from(from) {
            None if from > 0 => self.next_from(0),
            member => member,
        }
    }

    /// Returns the first member at or after `from`, which must be below the bound.
    #[inline]
    fn next_from(&self, from: usize) -> Option<usize> {
        let leaf = from >> SHIFT;
        if let Some(bit) = lowest_from(self.leaves[leaf], from & 63) {
            return Some(leaf << SHIFT | bit);
        }
        let node = leaf >> SHIFT;
        let leaf = match lowest_from(self.middle[node], (leaf & 63) + 1) {
            Some(bit) => node << SHIFT | bit,
            None => {
                let node = lowest_from(self.root, node + 1)?;
                node << SHIFT | self.middle[node].trailing_zeros() as usize
            }
        };
        Some(leaf << SHIFT | self.leaves[leaf].trailing_zeros() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn it_agrees_with_an_ordered_set() {
        for bound in [1, 2, 63, 64, 65, 1_024, 4_096, 4_097, 20_000, CAPACITY] {
            let (mut bitmap, mut model) = (Bitmap::new(bound), BTreeSet::new());
            let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
            for _ in 0..2_000 {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let member = (seed >> 33) as usize % bound;
                // Keep the set sparse, so that whole words are empty and the search must skip them.
                if seed >> 63 == 0 || model.len() > 40 {
                    bitmap.remove(member);
                    model.remove(&member);
                    if let Some(first) = model.pop_first() {
                        bitmap.remove(first);
                    }
                } else {
                    bitmap.insert(member);
                    model.insert(member);
                }
                let from = (seed >> 13) as usize % bound;
                let wanted = model.range(from..).next().or(model.first()).copied();
                assert_eq!(bitmap.next_cyclic(from), wanted);
            }
        }
    }
}
