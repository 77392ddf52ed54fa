//! Joins and splits idle blocks once a request does not fit behind the last block of a region: it is cut from a larger
//! idle block, or idle neighbours become one block.
//!
//! **The rule.** Only blocks in the owner's private free lists change their place or their size. No holder's bit is set
//! in them and they are not RETURNING, so no other process or thread may read them by their number: it is on no stack,
//! in no ring, and no fork has marked it. The entry of a block that was joined to another stays in the table, free and
//! with a capacity of 0. Code that walks a table takes it for an idle block without pages, and the owner uses it for a
//! later block.
//!
//! **A killed owner.** It may end between any two stores, and its successor reads the table. So a block first loses
//! addresses, and then another one gets them: blocks never overlap. A gap that is left lies behind an idle block, the
//! one that was to grow or has just shrunk, and [`places`] gives it back to that block. The stores are Release stores
//! to keep their order, which matters to the successor alone.

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

/// The numbers of a table's blocks by their offsets. Closes the gaps that a killed owner has left.
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
    /// A block of `capacity` bytes from idle neighbours, or of at least `least` bytes if there are no more.
    pub(super) fn join(&mut self, capacity: u64, least: u64) -> Result<u32> {
        let idle = self.idle_blocks();
        let tail = self.tail();
        // The smallest run of neighbours that is large enough, or else the largest one.
        let badness = |run: &&[Idle]| match self.room(run) {
            room if room >= capacity => (false, room),
            room => (true, u64::MAX - room),
        };
        let runs = idle.chunk_by(|a, b| a.end() == b.offset);
        let Some(run) = runs.filter(|run| self.room(run) >= least).min_by_key(badness) else {
            return if tail >= least && self.has_entry()? { self.make_fresh(tail) } else { Err(self.full(least)) };
        };
        let wanted = capacity.min(self.room(run));
        let enough = run.iter().position(|block| block.end() - run[0].offset >= wanted);
        let blocks = &run[..enough.map_or(run.len(), |last| last + 1)];
        let id = self.merge(blocks, least)?;
        if enough.is_none() {
            // The last block of the region grows.
            self.arena.table(self.region)[id as usize].capacity.store(wanted, Ordering::Release);
            self.fresh = run[0].offset + wanted;
        }
        self.split(id, wanted);
        Ok(id)
    }

    /// Cuts a block that is in no free list, and held by nothing, down to `capacity` bytes. The rest becomes an idle
    /// block, unless it is so small that it makes no difference, or the table is full.
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
        let rest = &table[other as usize];
        // The pages in which the block began reach into the rest.
        rest.warm.store(warm.saturating_sub(capacity), Ordering::Relaxed);
        rest.offset.store(offset + capacity, Ordering::Relaxed);
        rest.capacity.store(whole - capacity, Ordering::Release);
        self.mapped[other as usize] = mapped.saturating_sub(capacity);
        self.places.insert(offset + capacity, other);
        self.put(other);
    }

    /// Makes one block of idle neighbours and takes it out of the free lists. It keeps the pages that the first one
    /// begins with.
    fn merge(&mut self, blocks: &[Idle], least: u64) -> Result<u32> {
        let arena = self.arena.clone();
        let table = arena.table(self.region);
        let warm = |block: &Idle| table[block.id as usize].warm.load(Ordering::Relaxed);
        let (first, others) = (blocks[0], &blocks[1..]);
        let end = blocks[blocks.len() - 1].end();
        // Otherwise its pages would lie behind a part without pages, where no later trimming finds them.
        if others.iter().any(|block| warm(block) > 0)
            && arena.punch_hole(self.region, first.offset + warm(&first).min(first.capacity), end).is_err()
        {
            return Err(self.full(least));
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
            return Err(Error::corrupt(format!("the capacity of block {} of region {}", block.id, self.region)));
        };
        list.blocks.remove(place);
        list.cold -= usize::from(place < list.cold);
        list.low = list.low.min(list.blocks.len());
        Ok(())
    }

    /// The blocks of the free lists, by their offsets.
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

    /// Bytes behind the last block.
    pub(super) fn tail(&self) -> u64 {
        self.arena.geometry().region_len.saturating_sub(self.fresh)
    }

    /// Bytes of a run of idle neighbours, with the unused ones behind the last block of the region.
    fn room(&self, run: &[Idle]) -> u64 {
        let bytes = run.iter().fold(0, |sum: u64, block| sum.saturating_add(block.capacity));
        let is_last = run.last().is_some_and(|block| block.end() == self.fresh);
        bytes.saturating_add(if is_last { self.tail() } else { 0 })
    }

    /// The error for `len` bytes that the region has no room for.
    pub(super) fn full(&self, len: u64) -> Error {
        let idle = self.idle_blocks();
        let bytes = idle.iter().fold(self.tail(), |sum, block| sum.saturating_add(block.capacity));
        let runs = idle.chunk_by(|a, b| a.end() == b.offset);
        let longest = runs.map(|run| self.room(run)).max().unwrap_or(0).max(self.tail());
        Error::RegionFull { wanted: len, size: self.arena.geometry().region_len, idle: bytes, longest }
    }
}

#[cfg(test)]
mod tests;
