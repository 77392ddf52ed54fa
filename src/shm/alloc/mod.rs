//! The allocator of one region. Its free lists are private to the region's owner; the block table holds the data that
//! other processes need.
//!
//! A block usually has the capacity of its size class. The capacity is only address space: pages are reserved only for
//! the block's contents. Free blocks are reused last-in first-out, while their pages are warm.
//!
//! Idle blocks are punched, which means that their pages are released, in three cases:
//! * *Surplus.* If the low-water mark of a class's idle blocks stays above zero for [`TRIM_PATIENCE`] windows, the
//!   surplus is punched. A window is [`TRIM_WINDOW`] allocations, or fewer if batches are slow.
//! * *Varying sizes.* A request first reuses a warm block of a slightly larger class. Before fresh pages are reserved,
//!   the blocks that have been idle longest are punched, so that the region's pages exceed their recent peak by at most
//!   an [`IDLE_SHARE`]th.
//! * *Idle worker.* An idle worker keeps only the pages that its batches in flight need, or none if it is ahead of the
//!   training loop.
//!
//! If a request finds no idle block of its class and there is no room after the last block, its block is cut from a
//! larger idle block, or from idle neighbors that are joined: see `join`.

mod join;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::arena::Arena;
use super::block::{self, CONSUMER, DELIVERED, Left, WORKER};
use super::forks;
use super::layout::PAGE;
use crate::config::{
    HEADROOM_CHECK, HEADROOM_MARGIN, IDLE_SHARE, LARGE, RESERVATION_WAIT, REUSE_CLASSES, SLAB, TRIM_AFTER,
    TRIM_BATCHES, TRIM_PATIENCE, TRIM_WINDOW,
};
use crate::error::{Error, Result};
use crate::sync::Ordering;
use crate::sys;

/// Number of size classes: enough for regions of 1 TiB.
const CLASSES: usize = 112;

/// Returns the smallest size class whose blocks have at least `pages` pages.
fn class_of(pages: u64) -> usize {
    if pages <= 8 {
        return pages.max(1) as usize - 1;
    }
    let last = pages - 1;
    let shift = 63 - last.leading_zeros() - 2;
    8 + (shift as usize - 1) * 4 + ((last >> shift) as usize - 4)
}

/// Returns the largest class that a block of `capacity` bytes can serve. Blocks that were joined or cut may be larger
/// than the blocks of their class.
fn class_within(capacity: u64) -> usize {
    let pages = capacity / PAGE;
    let class = class_of(pages);
    (if class_pages(class) > pages { class.saturating_sub(1) } else { class }).min(CLASSES - 1)
}

/// Returns the number of pages of a class's blocks.
fn class_pages(class: usize) -> u64 {
    if class < 8 {
        return class as u64 + 1;
    }
    let (shift, quarter) = ((class - 8) / 4 + 1, (class - 8) % 4 + 4);
    (quarter as u64 + 1) << shift
}

/// Retries `attempt` for at most [`RESERVATION_WAIT`] while it fails only because of other workers' reservations.
/// `pause` must sleep for the given time. The caller must not hold a lock or memory for which other workers wait.
pub fn retry_while_reserved<R>(mut attempt: impl FnMut() -> Result<R>, mut pause: impl FnMut(Duration)) -> Result<R> {
    let mut start = None;
    loop {
        let result = attempt();
        if !matches!(result, Err(Error::NoMemory { passing: true, .. })) {
            return result;
        }
        // The common case reads no clock.
        let now = sys::clock::monotonic();
        if now - *start.get_or_insert(now) >= RESERVATION_WAIT {
            return result;
        }
        // The process ID makes workers retry at different times.
        pause(Duration::from_millis(1 + u64::from(std::process::id() % 8)));
    }
}

/// The idle blocks of one size class.
#[derive(Debug, Default)]
struct FreeList {
    /// Idle blocks, the warmest last.
    blocks: Vec<u32>,
    /// Number of leading blocks that trimming has handled: their pages were punched, or were not worth punching.
    cold: usize,
    /// The lowest number of idle blocks in this window.
    low: usize,
    /// Number of consecutive windows with a surplus.
    surplus_windows: u8,
}

/// The owner's side of a region.
#[derive(Debug)]
pub struct Allocator {
    arena: Arc<Arena>,
    region: u32,
    free: Vec<FreeList>,
    /// Offset of the next new block: the end of the last one.
    fresh: u64,
    /// The ID of each block, keyed by its offset.
    places: BTreeMap<u64, u32>,
    /// The IDs of block table entries that have no block.
    spare: Vec<u32>,
    /// Offset up to which pages for small blocks have been reserved in advance.
    slab_end: u64,
    /// For each block, the number of leading bytes that are in this process's page tables.
    mapped: Vec<u64>,
    /// Blocks that hold an object of the owner and have been sent in a message since their allocation.
    sent: HashSet<u32>,
    /// Number of allocations until this window ends.
    window: u32,
    /// Number of batches in this window.
    batches: u32,
    /// The time of the last check by [`Allocator::count_batch`] in this window, or of the window's start.
    since: Duration,
    /// Bytes that may be reserved before the next headroom check.
    credit: u64,
    /// Number of bytes with pages in the region.
    warm: u64,
    /// Number of bytes with pages in idle blocks.
    idle: u64,
    /// The value of `clock` at which each block became idle.
    idle_since: Vec<u64>,
    /// Number of allocations so far.
    clock: u64,
    /// Peak number of bytes in use: in this window, and in the previous one.
    peak: [u64; 2],
}

impl Allocator {
    /// Creates the allocator of a region that has no live owner. Reuses the blocks that are free; blocks that are held
    /// come back through the return stack.
    pub fn new(arena: Arc<Arena>, region: u32) -> Self {
        let count = arena.block_count(region);
        let table = &arena.table(region)[..count as usize];
        let places = join::places(table);
        let mut free: Vec<FreeList> = (0..CLASSES).map(|_| FreeList::default()).collect();
        let (mut fresh, mut warm, mut idle, mut spare) = (0, 0, 0, Vec::new());
        for (id, entry) in (0..).zip(table) {
            let capacity = entry.capacity.load(Ordering::Relaxed);
            if capacity == 0 {
                spare.push(id);
                continue;
            }
            fresh = fresh.max(entry.offset.load(Ordering::Relaxed) + capacity);
            warm += entry.warm.load(Ordering::Relaxed);
            // SYNC: block-released (pairs with the Release in `block::release`).
            if entry.state.load(Ordering::Acquire) == 0 {
                free[class_within(capacity)].blocks.push(id);
                idle = u64::saturating_add(idle, entry.warm.load(Ordering::Relaxed));
            }
        }
        arena.region_head(region).high_water.store(warm, Ordering::Relaxed);
        Self {
            arena,
            region,
            free,
            fresh,
            places,
            spare,
            slab_end: fresh,
            mapped: vec![0; count as usize],
            sent: HashSet::new(),
            window: TRIM_WINDOW,
            batches: 0,
            since: sys::clock::monotonic(),
            credit: 0,
            warm,
            idle,
            idle_since: vec![0; count as usize],
            clock: 0,
            peak: [0; 2],
        }
    }

    /// Returns the index of the region.
    pub fn region(&self) -> u32 {
        self.region
    }

    /// Returns the number of bytes with pages in the region.
    pub fn warm_bytes(&self) -> u64 {
        self.warm
    }

    /// Returns the number of bytes with pages in held blocks. The subtraction saturates, because a broken worker
    /// may have damaged the table.
    fn in_use(&self) -> u64 {
        self.warm.saturating_sub(self.idle)
    }

    /// Allocates a block with at least `len` bytes of reserved memory, and returns its ID. `holder` is the block's
    /// initial state: the bits of its holders (see `block.rs`).
    pub fn allocate(&mut self, len: u64, holder: u32) -> Result<u32> {
        self.clock += 1;
        self.window -= 1;
        if self.window == 0 {
            self.end_window()?;
        }
        let pages = len.div_ceil(PAGE).max(1);
        let class = class_of(pages);
        if class >= CLASSES || pages * PAGE > self.arena.geometry().region_len {
            return Err(self.full_error(len));
        }
        let list = &self.free[class];
        if list.blocks.len() == list.cold {
            self.collect()?;
        }
        let id = match self.take(self.warm_class(class)) {
            Some(id) => id,
            None => self.create_block(class, pages * PAGE)?,
        };
        if let Err(error) = self.reserve(id, pages * PAGE) {
            self.put(id);
            return Err(error);
        }
        self.peak[0] = self.peak[0].max(self.in_use());
        if !self.sent.is_empty() {
            self.sent.remove(&id);
        }
        // SYNC: block-held (pairs with the Acquires in `mark_if`, `recover` and `is_unseen`). The consumer learns of
        // the block through a ring.
        self.arena.table(self.region)[id as usize].state.store(holder, Ordering::Release);
        Ok(id)
    }

    /// Allocates a block for an array of the owner, as [`Allocator::allocate`] does. Arrays do not count toward the
    /// window: it measures how long other blocks stay idle, and a batch may create any number of arrays.
    pub fn allocate_array(&mut self, len: u64) -> Result<u32> {
        self.window += 1;
        self.allocate(len, WORKER)
    }

    /// Counts a batch. Ends the window early if batches are slow, because [`TRIM_WINDOW`] allocations could then take
    /// minutes.
    pub fn count_batch(&mut self, now: impl FnOnce() -> Duration) -> Result<()> {
        self.batches += 1;
        if self.batches.is_multiple_of(TRIM_BATCHES) {
            let now = now();
            if now.saturating_sub(self.since) >= TRIM_AFTER {
                return self.end_window();
            }
            self.since = now;
        }
        Ok(())
    }

    /// Reserves the first `len` bytes of a held block. Returns an error if the block is too small or there is not
    /// enough memory.
    pub fn extend(&mut self, id: u32, len: u64) -> Result<()> {
        let pages = len.div_ceil(PAGE).max(1);
        if pages * PAGE > self.arena.table(self.region)[id as usize].capacity.load(Ordering::Relaxed) {
            return Err(self.full_error(len));
        }
        self.reserve(id, pages * PAGE)
    }

    /// Records that a block that holds an object of the owner was sent in a message.
    pub fn note_sent(&mut self, id: u32) {
        self.sent.insert(id);
    }

    /// Returns true if [`Allocator::note_sent`] was called for a block since it was allocated.
    pub fn was_sent(&self, id: u32) -> bool {
        self.sent.contains(&id)
    }

    /// Returns the class from which a request for `class` takes its block: a slightly larger class if only that one has
    /// a warm block, because warm pages are cheaper than fresh ones.
    fn warm_class(&self, class: usize) -> usize {
        let warm = |class: &usize| self.free[*class].blocks.len() > self.free[*class].cold;
        let nearest = if class_pages(class) * PAGE < SLAB { class } else { (class + REUSE_CLASSES).min(CLASSES - 1) };
        (class..=nearest).find(warm).unwrap_or(class)
    }

    fn take(&mut self, class: usize) -> Option<u32> {
        let list = &mut self.free[class];
        let id = list.blocks.pop()?;
        list.low = list.low.min(list.blocks.len());
        list.cold = list.cold.min(list.blocks.len());
        let warm = self.arena.table(self.region)[id as usize].warm.load(Ordering::Relaxed);
        self.idle = self.idle.saturating_sub(warm);
        Some(id)
    }

    /// Moves returned blocks into the free lists.
    pub fn collect(&mut self) -> Result<()> {
        let Self { arena, region, free, idle, idle_since, clock, .. } = self;
        let table = arena.table(*region);
        // Use the private count, because the count in shared memory may be damaged.
        let count = idle_since.len() as u32;
        block::take_returned(
            &arena.region_head(*region).returned,
            count,
            |id| &table[id as usize],
            |id| {
                let entry = &table[id as usize];
                free[class_within(entry.capacity.load(Ordering::Relaxed))].blocks.push(id);
                *idle = idle.saturating_add(entry.warm.load(Ordering::Relaxed));
                idle_since[id as usize] = *clock;
            },
        )
    }

    /// Creates a block after the region's last block. If the region or its table is full, cuts the block from a larger
    /// idle block, or joins idle neighbors into one of at least `min_bytes`.
    fn create_block(&mut self, class: usize, min_bytes: u64) -> Result<u32> {
        let capacity = class_pages(class) * PAGE;
        if capacity <= self.tail() && self.has_entry()? {
            return self.create_fresh(capacity);
        }
        let larger = (class + 1..CLASSES).find(|&class| !self.free[class].blocks.is_empty());
        match larger.and_then(|class| self.take(class)) {
            Some(id) => {
                self.split(id, capacity);
                Ok(id)
            }
            None => self.join(capacity, min_bytes),
        }
    }

    /// Adds a spare entry to the table if it has none and is not full. Returns true if the table then has a spare entry
    /// for another block.
    fn has_entry(&mut self) -> Result<bool> {
        let id = self.mapped.len() as u32;
        if !self.spare.is_empty() || id == self.arena.geometry().table_len {
            return Ok(!self.spare.is_empty());
        }
        self.arena.populate_table(self.region, id)?;
        let entry = &self.arena.table(self.region)[id as usize];
        entry.state.store(0, Ordering::Relaxed);
        entry.capacity.store(0, Ordering::Relaxed);
        entry.warm.store(0, Ordering::Relaxed);
        self.mapped.push(0);
        self.idle_since.push(0);
        self.spare.push(id);
        // SYNC: block-made (pairs with the Acquire in `Arena::block_count`).
        self.arena.region_head(self.region).blocks.store(id + 1, Ordering::Release);
        Ok(true)
    }

    /// Creates a block of `capacity` bytes after the region's last block. [`Allocator::has_entry`] must have returned
    /// true, because the block uses a spare entry.
    fn create_fresh(&mut self, capacity: u64) -> Result<u32> {
        let offset = self.fresh;
        let mut reserved = 0;
        if capacity < SLAB {
            reserved = capacity;
            self.check_headroom(capacity)?;
            if offset + capacity > self.slab_end {
                let end = (offset + SLAB).min(self.arena.geometry().region_len);
                self.populate(offset, end)?;
                self.slab_end = end;
            }
        }
        let Some(id) = self.spare.pop() else { return Err(self.full_error(capacity)) };
        let entry = &self.arena.table(self.region)[id as usize];
        entry.warm.store(reserved, Ordering::Relaxed);
        entry.offset.store(offset, Ordering::Relaxed);
        // Stored last: an owner that is killed before this store leaves no block.
        entry.capacity.store(capacity, Ordering::Release);
        self.add_warm(reserved);
        self.fresh += capacity;
        self.places.insert(offset, id);
        self.mapped[id as usize] = reserved;
        Ok(id)
    }

    /// Reserves pages for the first `len` bytes of a block. The pages of a large block enter this process's page tables
    /// in one call, which is much cheaper than a fault per page.
    fn reserve(&mut self, id: u32, len: u64) -> Result<()> {
        let mapped = self.mapped[id as usize];
        if len <= mapped {
            return Ok(());
        }
        let arena = self.arena.clone();
        let entry = &arena.table(self.region)[id as usize];
        let offset = entry.offset.load(Ordering::Relaxed);
        let warm = entry.warm.load(Ordering::Relaxed);
        if mapped < warm && len >= SLAB {
            self.arena.map_in(self.region, offset + mapped, offset + warm.min(len))?;
        }
        if len > warm {
            self.make_room(len - warm);
            self.check_headroom(len - warm)?;
            self.populate(offset + warm.max(mapped), offset + len)?;
            entry.warm.store(len, Ordering::Relaxed);
            self.add_warm(len - warm);
        }
        self.mapped[id as usize] = len;
        Ok(())
    }

    fn add_warm(&mut self, bytes: u64) {
        self.warm += bytes;
        let high_water = &self.arena.region_head(self.region).high_water;
        if self.warm > high_water.load(Ordering::Relaxed) {
            high_water.store(self.warm, Ordering::Relaxed);
        }
    }

    /// Exempts the next `bytes` bytes from the headroom check, for small messages that must get through, such as
    /// errors.
    pub fn trust(&mut self, bytes: u64) {
        self.credit = self.credit.max(bytes);
    }

    /// Makes room before `fresh` bytes are reserved: while the region's pages would exceed the recent peak by more than
    /// an [`IDLE_SHARE`]th, punches idle blocks of at least [`SLAB`] bytes. The block that has been idle longest comes
    /// first.
    fn make_room(&mut self, fresh: u64) {
        let peak = self.peak[0].max(self.peak[1]).max(self.in_use() + fresh);
        let limit = peak + peak / IDLE_SHARE;
        while self.warm + fresh > limit {
            let oldest = |class: usize| {
                let list = &self.free[class];
                Some((self.idle_since[*list.blocks.get(list.cold)? as usize], class))
            };
            let Some((_, class)) = (class_of(SLAB / PAGE)..CLASSES).filter_map(oldest).min() else { return };
            self.punch_oldest(class);
        }
    }

    /// Punches the block that has been idle longest in a class.
    fn punch_oldest(&mut self, class: usize) {
        let list = &mut self.free[class];
        let id = list.blocks[list.cold];
        list.cold += 1;
        let entry = &self.arena.table(self.region)[id as usize];
        let (offset, warm) = (entry.offset.load(Ordering::Relaxed), entry.warm.load(Ordering::Relaxed));
        // The pages of a small block are not worth a system call, and may have been reserved together with those of its
        // neighbors.
        if warm < SLAB || self.arena.punch_hole(self.region, offset, offset + warm).is_err() {
            return;
        }
        entry.warm.store(0, Ordering::Relaxed);
        self.mapped[id as usize] = 0;
        self.warm = self.warm.saturating_sub(warm);
        self.idle = self.idle.saturating_sub(warm);
    }

    /// Checks that memory for `fresh` more bytes is available. A check that succeeds also covers the next
    /// reservations, up to [`HEADROOM_CHECK`] bytes. Does not wait for other workers: see [`retry_while_reserved`].
    fn check_headroom(&mut self, fresh: u64) -> Result<()> {
        if fresh <= self.credit {
            self.credit -= fresh;
            return Ok(());
        }
        let mut trimmed = false;
        loop {
            self.arena.promise(self.region, fresh);
            let others = self.arena.promised_by_others(self.region);
            let room = sys::memory::available(&sys::cgroup::Roots::default());
            let free = room.bytes.saturating_sub(fresh.clamp(*HEADROOM_MARGIN.start(), *HEADROOM_MARGIN.end()));
            let headroom = free.saturating_sub(others);
            if fresh <= headroom {
                let workers = u64::from(self.arena.geometry().workers);
                self.credit = HEADROOM_CHECK.min((headroom - fresh) / 2 / workers);
                return Ok(());
            }
            self.arena.promise(self.region, 0);
            if trimmed {
                // True if there would be enough memory without the promises. A reservation in progress counts twice: as
                // a promise, and as the pages that it has so far.
                let passing = fresh <= free;
                return Err(Error::NoMemory { wanted: fresh, limit: room.limit, headroom, passing });
            }
            // Idle blocks of other sizes may hold the missing memory.
            trimmed = true;
            self.trim(0)?;
        }
    }

    /// Reserves pages that [`Allocator::check_headroom`] has granted, and ends the promise.
    fn populate(&self, from: u64, to: u64) -> Result<()> {
        let populated = self.arena.populate(self.region, from, to);
        self.arena.promise(self.region, 0);
        populated
    }

    /// Adds a block that has no holder to the free list of its class. The block must not be on the return stack.
    pub fn put(&mut self, id: u32) {
        let entry = &self.arena.table(self.region)[id as usize];
        self.free[class_within(entry.capacity.load(Ordering::Relaxed))].blocks.push(id);
        self.idle = self.idle.saturating_add(entry.warm.load(Ordering::Relaxed));
        self.idle_since[id as usize] = self.clock;
    }

    /// Releases the owner's hold on a block, which becomes free if no holder remains.
    pub fn release(&mut self, id: u32) {
        let state = &self.arena.table(self.region)[id as usize].state;
        if block::release_owned(state, WORKER) == Left::Last {
            self.put(id);
        }
    }

    /// Returns the block of this region that contains `address`, and the offset of the address in the block.
    pub fn find(&self, address: usize) -> Option<(u32, u64)> {
        let base = self.arena.region_base(self.region) as usize;
        let offset = address.checked_sub(base)? as u64;
        if offset >= self.fresh {
            return None;
        }
        self.places.range(..=offset).next_back().map(|(start, id)| (*id, offset - start))
    }

    fn end_window(&mut self) -> Result<()> {
        (self.window, self.batches, self.since) = (TRIM_WINDOW, 0, sys::clock::monotonic());
        self.peak = [0, self.peak[0]];
        // Without this call, a busy worker would not notice that children forked by the dataset have ended.
        forks::reap();
        self.collect()?;
        for class in 0..CLASSES {
            let list = &mut self.free[class];
            let surplus = list.low.saturating_sub(list.cold);
            list.low = list.blocks.len();
            if surplus == 0 {
                list.surplus_windows = 0;
                continue;
            }
            list.surplus_windows += 1;
            if list.surplus_windows < TRIM_PATIENCE {
                continue;
            }
            list.surplus_windows = 0;
            (0..surplus).for_each(|_| self.punch_oldest(class));
        }
        Ok(())
    }

    /// Returns true if the worker is ahead of the training loop: at least one message in this region is unopened. The
    /// main process opens a message when it delivers the batch.
    pub fn is_ahead(&self) -> bool {
        self.states().any(|state| state & (CONSUMER | DELIVERED) == CONSUMER)
    }

    /// Returns true if an allocation of `len` bytes should wait for a block to be returned: the allocation is large and
    /// would need fresh pages, and the training loop holds a block that would fit.
    pub fn awaits(&mut self, len: u64) -> Result<bool> {
        if len < LARGE {
            return Ok(false);
        }
        self.collect()?;
        let class = class_of(len.div_ceil(PAGE)).min(CLASSES - 1);
        let largest = class_pages((class + REUSE_CLASSES).min(CLASSES - 1)) * PAGE;
        let list = &self.free[self.warm_class(class)];
        if list.blocks.len() > list.cold {
            return Ok(false);
        }
        let table = &self.arena.table(self.region)[..self.mapped.len()];
        Ok(table.iter().any(|entry| {
            entry.state.load(Ordering::Relaxed) == CONSUMER | DELIVERED
                && (len..=largest).contains(&entry.warm.load(Ordering::Relaxed))
        }))
    }

    fn states(&self) -> impl Iterator<Item = u32> {
        let table = &self.arena.table(self.region)[..self.mapped.len()];
        table.iter().map(|entry| entry.state.load(Ordering::Relaxed))
    }

    /// Punches idle blocks until the region has at most `budget` bytes of pages, or no idle block is left to punch.
    /// Called by an idle worker, and by a headroom check that finds too little memory.
    pub fn trim(&mut self, budget: u64) -> Result<()> {
        forks::reap();
        self.collect()?;
        for class in 0..CLASSES {
            while self.warm > budget && self.free[class].cold < self.free[class].blocks.len() {
                self.punch_oldest(class);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
