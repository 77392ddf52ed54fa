//! Joining and splitting of idle blocks. If a request does not fit after a region's last block, its block is cut from a
//! larger idle block, or is joined from idle neighbors.
//!
//! **The rule.** Only blocks in the owner's private free lists change their offset or their size. Such a block has no
//! holder and is not RETURNING, so no other process or thread refers to it by its ID: the ID is on no stack and in no
//! ring, and no fork has marked the block. When a block is joined to another, its entry stays in the table, free and
//! with a capacity of 0. Code that walks a table treats such an entry as an idle block without pages, and the owner
//! reuses the entry for a later block.
//!
//! **A killed owner.** The owner may be killed between any two stores, and its successor reads the table. So a range of
//! bytes is first taken from one block and only then given to another, and blocks never overlap. At worst there is a
//! gap after an idle block that was about to grow or has just shrunk, and [`places`] adds the gap to that block. The
//! stores are Release stores so that they keep their order, which matters only to the successor.

use std::collections::BTreeMap;

use super::{Allocator, class_within};
use crate::error::{Error, Result};
use crate::shm::layout::BlockEntry;
use crate::sync::Ordering;

/// An idle block.
#[derive(Clone, Copy, Debug)]
struct Idle {
    id: u32,
    offset: u64,
    capacity: u64,
}

impl Idle {
    fn end(&self) -> u64 {
        self.offset.saturating_add(self.capacity)
    }
}

/// Returns a map from the offset of each block in a table to its ID. If a killed owner left gaps, closes them by
/// extending the idle block before each gap.
pub(super) fn places(table: &[BlockEntry]) -> BTreeMap<u64, u32> {
    let blocks = (0..).zip(table).filter(|(_, entry)| entry.capacity.load(Ordering::Relaxed) > 0);
    let places: BTreeMap<u64, u32> = blocks.map(|(id, entry)| (entry.offset.load(Ordering::Relaxed), id)).collect();
    for ((&offset, &id), &next) in places.iter().zip(places.keys().skip(1)) {
        let entry = &table[id as usize];
        // SYNC: block-released (pairs with the Release in `block::release`).
        if entry.state.load(Ordering::Acquire) == 0 {
            entry.capacity.store(next - offset, Ordering::Relaxed);
        }
    }
    places
}

impl Allocator {
    /// Joins idle neighbors into a block of `capacity` bytes and returns its ID. If no run of neighbors is that long,
    /// the block is as long as possible, but at least `min_bytes`.
    pub(super) fn join(&mut self, capacity: u64, min_bytes: u64) -> Result<u32> {
        let idle = self.idle_blocks();
        let tail = self.tail();
        // Prefers the shortest run of neighbors that is long enough; if none is, the longest run.
        let preference = |run: &&[Idle]| match self.room(run) {
            room if room >= capacity => (false, room),
            room => (true, u64::MAX - room),
        };
        let runs = idle.chunk_by(|a, b| a.end() == b.offset);
        let Some(run) = runs.filter(|run| self.room(run) >= min_bytes).min_by_key(preference) else {
            return if tail >= min_bytes && self.has_entry()? {
                self.create_fresh(tail)
            } else {
                Err(self.full_error(min_bytes))
            };
        };
        let wanted = capacity.min(self.room(run));
        let enough = run.iter().position(|block| block.end() - run[0].offset >= wanted);
        let blocks = &run[..enough.map_or(run.len(), |last| last + 1)];
        let id = self.merge(blocks, min_bytes)?;
        if enough.is_none() {
            // The last block of the region grows.
            self.arena.table(self.region)[id as usize].capacity.store(wanted, Ordering::Release);
            self.fresh = run[0].offset + wanted;
        }
        self.split(id, wanted);
        Ok(id)
    }

    /// Cuts a block down to `capacity` bytes; the remainder becomes an idle block. The block must be in no free list
    /// and have no holder. Does nothing if the cut would not change the block's class, or if the table is full.
    pub(super) fn split(&mut self, id: u32, capacity: u64) {
        let arena = self.arena.clone();
        let table = arena.table(self.region);
        let entry = &table[id as usize];
        let whole = entry.capacity.load(Ordering::Relaxed);
        if class_within(whole) <= class_within(capacity) || !self.has_entry().is_ok_and(|has| has) {
            return;
        }
        let Some(other) = self.spare.pop() else { return };
        let (offset, warm) = (entry.offset.load(Ordering::Relaxed), entry.warm.load(Ordering::Relaxed));
        let mapped = self.mapped[id as usize];
        entry.warm.store(warm.min(capacity), Ordering::Release);
        entry.capacity.store(capacity, Ordering::Release);
        self.mapped[id as usize] = mapped.min(capacity);
        let remainder = &table[other as usize];
        // The warm pages at the start of the block may reach into the remainder.
        remainder.warm.store(warm.saturating_sub(capacity), Ordering::Relaxed);
        remainder.offset.store(offset + capacity, Ordering::Relaxed);
        remainder.capacity.store(whole - capacity, Ordering::Release);
        self.mapped[other as usize] = mapped.saturating_sub(capacity);
        self.places.insert(offset + capacity, other);
        self.put(other);
    }

    /// Merges idle neighbors into one block, which is then in no free list and keeps only the warm pages of the first
    /// neighbor.
    fn merge(&mut self, blocks: &[Idle], min_bytes: u64) -> Result<u32> {
        let arena = self.arena.clone();
        let table = arena.table(self.region);
        let warm = |block: &Idle| table[block.id as usize].warm.load(Ordering::Relaxed);
        let (first, others) = (blocks[0], &blocks[1..]);
        let end = blocks[blocks.len() - 1].end();
        // Only pages at the start of a block are counted as warm. Pages after a hole would never be trimmed, so release
        // them now.
        if others.iter().any(|block| warm(block) > 0)
            && arena.punch_hole(self.region, first.offset + warm(&first).min(first.capacity), end).is_err()
        {
            return Err(self.full_error(min_bytes));
        }
        self.remove(first)?;
        self.idle = self.idle.saturating_sub(warm(&first));
        for block in others.iter().rev() {
            self.remove(*block)?;
            let (entry, warm) = (&table[block.id as usize], warm(block));
            self.idle = self.idle.saturating_sub(warm);
            self.warm = self.warm.saturating_sub(warm);
            entry.warm.store(0, Ordering::Release);
            entry.capacity.store(0, Ordering::Release);
            self.mapped[block.id as usize] = 0;
            self.places.remove(&block.offset);
            self.spare.push(block.id);
        }
        table[first.id as usize].capacity.store(end - first.offset, Ordering::Release);
        Ok(first.id)
    }

    /// Removes a block from its free list.
    fn remove(&mut self, block: Idle) -> Result<()> {
        let list = &mut self.free[class_within(block.capacity)];
        let Some(place) = list.blocks.iter().position(|id| *id == block.id) else {
            return Err(Error::corrupt(format!(
                "the capacity of block {} of region {} has changed",
                block.id, self.region
            )));
        };
        list.blocks.remove(place);
        list.cold -= usize::from(place < list.cold);
        list.low = list.low.min(list.blocks.len());
        Ok(())
    }

    /// Returns the blocks of all free lists, ordered by offset.
    fn idle_blocks(&self) -> Vec<Idle> {
        let table = self.arena.table(self.region);
        let idle = |&id: &u32| {
            let entry = &table[id as usize];
            let (offset, capacity) = (entry.offset.load(Ordering::Relaxed), entry.capacity.load(Ordering::Relaxed));
            Idle { id, offset, capacity }
        };
        let mut blocks: Vec<Idle> = self.free.iter().flat_map(|list| &list.blocks).map(idle).collect();
        blocks.sort_unstable_by_key(|block| block.offset);
        blocks
    }

    /// Returns the number of bytes after the region's last block.
    pub(super) fn tail(&self) -> u64 {
        self.arena.geometry().region_len.saturating_sub(self.fresh)
    }

    /// Returns the number of bytes of a run of idle neighbors. If the run ends with the region's last block, the unused
    /// bytes after that block count too.
    fn room(&self, run: &[Idle]) -> u64 {
        let bytes = run.iter().fold(0, |sum: u64, block| sum.saturating_add(block.capacity));
        let is_last = run.last().is_some_and(|block| block.end() == self.fresh);
        bytes.saturating_add(if is_last { self.tail() } else { 0 })
    }

    /// Returns the error for a request of `len` bytes that does not fit into the region.
    pub(super) fn full_error(&self, len: u64) -> Error {
        let idle = self.idle_blocks();
        let bytes = idle.iter().fold(self.tail(), |sum, block| sum.saturating_add(block.capacity));
        let runs = idle.chunk_by(|a, b| a.end() == b.offset);
        let longest = runs.map(|run| self.room(run)).max().unwrap_or(0).max(self.tail());
        Error::RegionFull { wanted: len, size: self.arena.geometry().region_len, idle: bytes, longest }
    }
}

#[cfg(test)]
mod tests;
