//! The memory use of an arena.

use crate::shm::block::{self, DELIVERED};
use crate::shm::layout::BlockEntry;
use crate::sync::Ordering;

/// The memory use that an arena's block tables record. All fields except `blocks` count bytes that have pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// All bytes with pages.
    pub warm: u64,
    /// Bytes in held blocks.
    pub held: u64,
    /// Bytes in blocks that hold tensors delivered to the user.
    pub leased: u64,
    /// The sum of the peaks of all regions, which need not have occurred at the same time.
    pub high_water: u64,
    /// Number of blocks.
    pub blocks: u64,
}

impl Usage {
    pub(crate) fn add_block(&mut self, entry: &BlockEntry) {
        let warm = entry.warm.load(Ordering::Relaxed);
        let state = entry.state.load(Ordering::Relaxed);
        self.warm = self.warm.saturating_add(warm);
        // An entry with a capacity of 0 has no block, for example because its block was joined to another.
        self.blocks += u64::from(entry.capacity.load(Ordering::Relaxed) > 0);
        if state & !block::RETURNING != 0 {
            self.held = self.held.saturating_add(warm);
        }
        if state & DELIVERED != 0 {
            self.leased = self.leased.saturating_add(warm);
        }
    }

    /// Adds a region's peak, which was read before the region's blocks were added. `warm_before` is [`Self::warm`] from
    /// before these blocks.
    pub(crate) fn add_peak(&mut self, peak: u64, warm_before: u64) {
        // The region's owner may have taken pages since then, and it updates the peak only after the blocks.
        self.high_water = self.high_water.saturating_add(peak.max(self.warm - warm_before));
    }
}

impl std::ops::Add for Usage {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            warm: self.warm.saturating_add(other.warm),
            held: self.held.saturating_add(other.held),
            leased: self.leased.saturating_add(other.leased),
            high_water: self.high_water.saturating_add(other.high_water),
            blocks: self.blocks.saturating_add(other.blocks),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Usage;

    #[test]
    fn a_peak_is_at_least_the_use_of_its_region() {
        let mut usage = Usage { warm: 10, ..Usage::default() };
        usage.add_peak(12, 0);
        usage.warm += 5;
        usage.add_peak(3, 10);
        assert_eq!(usage.high_water, 12 + 5);
    }
}
