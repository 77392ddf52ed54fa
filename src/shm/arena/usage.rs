//! Sums of an arena's memory.

use crate::shm::block::{self, DELIVERED};
use crate::shm::layout::BlockEntry;
use crate::sync::Ordering;

/// Memory use according to an arena's tables, in bytes of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes with pages.
    pub warm: u64,
    /// Bytes in held blocks.
    pub held: u64,
    /// Bytes in blocks with tensors delivered to the user.
    pub leased: u64,
    /// The sum of the regions' peaks, each at its own time.
    pub high_water: u64,
    /// Number of blocks.
    pub blocks: u64,
}

impl Usage {
    pub(crate) fn add_block(&mut self, entry: &BlockEntry) {
        let warm = entry.warm.load(Ordering::Relaxed);
        let state = entry.state.load(Ordering::Relaxed);
        self.warm = self.warm.saturating_add(warm);
        // An entry with a capacity of 0 has no block: its block was joined to another.
        self.blocks += u64::from(entry.capacity.load(Ordering::Relaxed) > 0);
        if state & !block::RETURNING != 0 {
            self.held = self.held.saturating_add(warm);
        }
        if state & DELIVERED != 0 {
            self.leased = self.leased.saturating_add(warm);
        }
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
