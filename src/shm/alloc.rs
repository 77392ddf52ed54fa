//! The allocator of one region. Its free lists are private to the owner; what the other side must know stands in
//! the region's block table.
//!
//! Size classes are virtual: a block has the capacity of its class, but only the pages that its contents
//! need. A free block is reused last-in first-out, while its pages are warm.
//!
//! Pages beyond the working set are given back by the low-water mark of each class's free list: what lay idle through
//! [`TRIM_PATIENCE`] whole windows of [`TRIM_WINDOW`] allocations is surplus and is punched (before it is handed out again, so nobody
//! else sees it). Where sizes vary, a warm block of nearly the size is taken, and before fresh pages are reserved those of
//! idle blocks are given back beyond what was in use at the most lately and a [`IDLE_SHARE`]th. A worker that has nothing to do gives
//! back at once what the batches under way do not need.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::arena::Arena;
use super::block::{self, Left, WORKER};
use super::forks;
use super::layout::PAGE;
use crate::config::{
    HEADROOM_CHECK, HEADROOM_MARGIN, IDLE_SHARE, RESERVATION_WAIT, REUSE_CLASSES, SLAB, TRIM_PATIENCE,
    TRIM_WINDOW,
};
use crate::error::{Error, Result};
use crate::sync::Ordering;
use crate::sys;

/// Number of size classes: enough for regions of 1 TiB.
const CLASSES: usize = 112;
/// The size class of a block of `pages` pages.
fn class_of(pages: u64) -> usize {
    if pages <= 8 {
        return pages.max(1) as usize - 1;
    }
    let last = pages - 1;
    let shift = 63 - last.leading_zeros() - 2;
    8 + (shift as usize - 1) * 4 + ((last >> shift) as usize - 4)
}

/// The pages of a block of a class.
fn class_pages(class: usize) -> u64 {
    if class < 8 {
        return class as u64 + 1;
    }
    let (shift, quarter) = ((class - 8) / 4 + 1, (class - 8) % 4 + 4);
    (quarter as u64 + 1) << shift
}

/// Gives the pages of an idle block back, if they are worth a system call; says how many bytes.
fn punch_idle(arena: &Arena, region: u32, id: u32) -> Option<u64> {
    let entry = &arena.table(region)[id as usize];
    let (offset, warm) = (entry.offset.load(Ordering::Relaxed), entry.warm.load(Ordering::Relaxed));
    if warm < SLAB || arena.punch_hole(region, offset, offset + warm).is_err() {
        return None;
    }
    entry.warm.store(0, Ordering::Relaxed);
    Some(warm)
}

/// Repeats `attempt` as long as what other workers are reserving may be all that is in its way, for [`RESERVATION_WAIT`] at the most.
/// `pause` sleeps; who calls this sees to it that nobody waits meanwhile for what the sleeper holds.
pub fn settle<R>(mut attempt: impl FnMut() -> Result<R>, mut pause: impl FnMut(Duration)) -> Result<R> {
    let mut start = None;
    loop {
        let result = attempt();
        if !matches!(result, Err(Error::NoMemory { passing: true, .. })) {
            return result;
        }
        // Not before: what has nothing in its way pays for no look at the clock.
        let now = sys::clock::monotonic();
        if now - *start.get_or_insert(now) >= RESERVATION_WAIT {
            return result;
        }
        // Not in step with the others.
        pause(Duration::from_millis(1 + u64::from(std::process::id() % 8)));
    }
}

/// One class's idle blocks.
#[derive(Debug, Default)]
struct FreeList {
    /// Idle blocks, the warmest last.
    blocks: Vec<u32>,
    /// How many of the first blocks have lost their pages.
    cold: usize,
    /// The fewest idle blocks in this window.
    low: usize,
    /// For how many windows there has been a surplus.
    patience: u8,
}

/// The owner's side of a region.
#[derive(Debug)]
pub struct Allocator {
    arena: Arc<Arena>,
    region: u32,
    free: Vec<FreeList>,
    /// Where the next new block begins.
    fresh: u64,
    /// Bytes of the region from its begin that were reserved ahead for small blocks.
    slab_end: u64,
    /// Bytes of each block that this process has in its page tables.
    mapped: Vec<u64>,
    /// Blocks that have been in a message since they were allocated, though an object of the owner lies in them.
    sent: HashSet<u32>,
    /// Allocations left in this window.
    window: u32,
    /// Bytes that may still be reserved before the machine's headroom is looked at.
    credit: u64,
    /// Bytes of pages in the region.
    warm: u64,
    /// Those of them that lie in idle blocks.
    idle: u64,
    /// When each block became idle, in allocations.
    idle_since: Vec<u64>,
    /// Allocations so far.
    clock: u64,
    /// The most bytes of pages that were in use at a time: in this window, and in the one before.
    peak: [u64; 2],
}

impl Allocator {
    /// The allocator of a region whose last owner, if it had one, is gone. Blocks that are free by their state are
    /// reused; the rest come back over the return stack.
    pub fn new(arena: Arc<Arena>, region: u32) -> Self {
        let count = arena.block_count(region);
        let mut free: Vec<FreeList> = (0..CLASSES).map(|_| FreeList::default()).collect();
        let (mut fresh, mut warm, mut idle) = (0, 0, 0);
        for (id, entry) in arena.table(region)[..count as usize].iter().enumerate() {
            let capacity = entry.capacity.load(Ordering::Relaxed);
            fresh = fresh.max(entry.offset.load(Ordering::Relaxed) + capacity);
            warm += entry.warm.load(Ordering::Relaxed);
            // SYNC: block-released (pairs with the Release in `block::release`).
            if entry.state.load(Ordering::Acquire) == 0 {
                free[class_of(capacity / PAGE).min(CLASSES - 1)].blocks.push(id as u32);
                idle = u64::saturating_add(idle, entry.warm.load(Ordering::Relaxed));
            }
        }
        arena.region_head(region).high_water.store(warm, Ordering::Relaxed);
        Self {
            arena,
            region,
            free,
            fresh,
            slab_end: fresh,
            mapped: vec![0; count as usize],
            sent: HashSet::new(),
            window: TRIM_WINDOW,
            credit: 0,
            warm,
            idle,
            idle_since: vec![0; count as usize],
            clock: 0,
            peak: [0; 2],
        }
    }

    /// The region's number.
    pub fn region(&self) -> u32 {
        self.region
    }

    /// Bytes of pages that the region holds.
    pub fn warm_bytes(&self) -> u64 {
        self.warm
    }

    /// Bytes of pages in blocks that somebody holds. The table's numbers may be nonsense, where a worker is broken.
    fn in_use(&self) -> u64 {
        self.warm.saturating_sub(self.idle)
    }

    /// A block with at least `len` bytes of reserved memory, held by `holder` (one bit of `block.rs`).
    pub fn allocate(&mut self, len: u64, holder: u32) -> Result<u32> {
        self.clock += 1;
        self.window -= 1;
        if self.window == 0 {
            self.end_window()?;
        }
        let pages = len.div_ceil(PAGE).max(1);
        let class = class_of(pages);
        if class >= CLASSES || pages * PAGE > self.arena.geometry().region_len {
            return Err(self.full(len));
        }
        let list = &self.free[class];
        if list.blocks.len() == list.cold {
            self.collect()?;
        }
        let id = match self.take(self.warm_class(class)) {
            Some(id) => id,
            None => self.make(class, len)?,
        };
        if let Err(error) = self.reserve(id, pages * PAGE) {
            self.put(id);
            return Err(error);
        }
        self.peak[0] = self.peak[0].max(self.in_use());
        if !self.sent.is_empty() {
            self.sent.remove(&id);
        }
        // SYNC: block-held (pairs with the Acquire of whoever finds the bit in the table: a fork, `recover`, `retire`). The
        // consumer hears of the block by its ring.
        self.arena.table(self.region)[id as usize].state.store(holder, Ordering::Release);
        Ok(id)
    }

    /// Notes that a block which an object of the owner lies in has been in a message.
    pub fn note_sent(&mut self, id: u32) {
        self.sent.insert(id);
    }

    /// Whether a block has been in a message since it was allocated.
    pub fn was_sent(&self, id: u32) -> bool {
        self.sent.contains(&id)
    }

    /// The class out of which a block is taken: a warm one of nearly the same size is better than fresh pages.
    fn warm_class(&self, class: usize) -> usize {
        let warm = |class: &usize| self.free[*class].blocks.len() > self.free[*class].cold;
        let nearest =
            if class_pages(class) * PAGE < SLAB { class } else { (class + REUSE_CLASSES).min(CLASSES - 1) };
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

    /// Takes back what has been returned.
    pub fn collect(&mut self) -> Result<()> {
        let Self { arena, region, free, idle, idle_since, clock, .. } = self;
        let table = arena.table(*region);
        // Our own count: what stands in shared memory may be nonsense.
        let count = idle_since.len() as u32;
        block::take_returned(
            &arena.region_head(*region).returned,
            count,
            |id| &table[id as usize],
            |id| {
                let entry = &table[id as usize];
                let pages = entry.capacity.load(Ordering::Relaxed) / PAGE;
                free[class_of(pages).min(CLASSES - 1)].blocks.push(id);
                *idle = idle.saturating_add(entry.warm.load(Ordering::Relaxed));
                idle_since[id as usize] = *clock;
            },
        )
    }

    /// A new block, or a larger idle one when the region or its table is used up.
    fn make(&mut self, class: usize, len: u64) -> Result<u32> {
        let capacity = class_pages(class) * PAGE;
        let id = self.mapped.len() as u32;
        let offset = self.fresh;
        let region_len = self.arena.geometry().region_len;
        if id == self.arena.geometry().table_len || offset + capacity > region_len {
            let larger = (class + 1..CLASSES).find(|&class| !self.free[class].blocks.is_empty());
            return larger.and_then(|class| self.take(class)).ok_or_else(|| self.full(len));
        }
        self.arena.populate_table(self.region, id)?;
        let mut reserved = 0;
        if capacity < SLAB {
            reserved = capacity;
            self.look(capacity)?;
            if offset + capacity > self.slab_end {
                let end = (offset + SLAB).min(region_len);
                self.populate(offset, end)?;
                self.slab_end = end;
            }
        }
        let entry = &self.arena.table(self.region)[id as usize];
        entry.state.store(0, Ordering::Relaxed);
        entry.offset.store(offset, Ordering::Relaxed);
        entry.capacity.store(capacity, Ordering::Relaxed);
        entry.warm.store(reserved, Ordering::Relaxed);
        self.add_warm(reserved);
        self.fresh += capacity;
        self.mapped.push(reserved);
        self.idle_since.push(0);
        // SYNC: block-made (pairs with the Acquire in `Arena::block_count`).
        self.arena.region_head(self.region).blocks.store(id + 1, Ordering::Release);
        Ok(id)
    }

    /// Makes sure that the first `len` bytes of a block have pages. Those of a large block are put into this process's
    /// page tables at one go, which is much cheaper than a fault for each.
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
            self.look(len - warm)?;
        }
        if len > warm {
            self.populate(offset + warm.max(mapped), offset + len)?;
        }
        self.mapped[id as usize] = len;
        if len > warm {
            entry.warm.store(len, Ordering::Relaxed);
            self.add_warm(len - warm);
        }
        Ok(())
    }

    fn add_warm(&mut self, bytes: u64) {
        self.warm += bytes;
        let high_water = &self.arena.region_head(self.region).high_water;
        if self.warm > high_water.load(Ordering::Relaxed) {
            high_water.store(self.warm, Ordering::Relaxed);
        }
    }

    /// Lets the next `bytes` be reserved without a look at the headroom: what is small, comes back soon and has to
    /// get through, so that the error itself can be told.
    pub fn trust(&mut self, bytes: u64) {
        self.credit = self.credit.max(bytes);
    }

    /// Before fresh pages are reserved: blocks of other sizes that lay idle for the longest lose theirs, as long as all together
    /// would come to more than a [`IDLE_SHARE`]th above what was in use lately.
    fn make_room(&mut self, fresh: u64) {
        let peak = self.peak[0].max(self.peak[1]).max(self.in_use() + fresh);
        let most = peak + peak / IDLE_SHARE;
        while self.warm + fresh > most {
            let oldest = |class: usize| {
                let list = &self.free[class];
                Some((self.idle_since[*list.blocks.get(list.cold)? as usize], class))
            };
            let Some((_, class)) = (class_of(SLAB / PAGE)..CLASSES).filter_map(oldest).min() else { return };
            self.cool(class);
        }
    }

    /// Takes the pages of the block of a class that has lain idle for the longest.
    fn cool(&mut self, class: usize) {
        let list = &mut self.free[class];
        let id = list.blocks[list.cold];
        list.cold += 1;
        // Pages of a small block may have been reserved with its neighbours: not worth a system call.
        if let Some(punched) = punch_idle(&self.arena, self.region, id) {
            self.mapped[id as usize] = 0;
            self.warm = self.warm.saturating_sub(punched);
            self.idle = self.idle.saturating_sub(punched);
        }
    }

    /// Compares what is to be reserved with what the machine has left, every [`HEADROOM_CHECK`] bytes at the most. Does not wait
    /// for others: see [`settle`].
    fn look(&mut self, fresh: u64) -> Result<()> {
        if fresh <= self.credit {
            self.credit -= fresh;
            return Ok(());
        }
        let mut trimmed = false;
        loop {
            self.arena.promise(self.region, fresh);
            let others = self.arena.promised_by_others(self.region);
            let room = sys::memory::available(&sys::cgroup::Roots::default());
            let free =
                room.bytes.saturating_sub(fresh.clamp(*HEADROOM_MARGIN.start(), *HEADROOM_MARGIN.end()));
            let headroom = free.saturating_sub(others);
            if fresh <= headroom {
                let workers = u64::from(self.arena.geometry().workers);
                self.credit = HEADROOM_CHECK.min((headroom - fresh) / 2 / workers);
                return Ok(());
            }
            self.arena.promise(self.region, 0);
            if trimmed {
                // What others have reserved by half counts twice.
                let passing = fresh <= free;
                return Err(Error::NoMemory { wanted: fresh, limit: room.limit, headroom, passing });
            }
            // Idle blocks of other sizes may be what is in the way.
            trimmed = true;
            self.trim(0)?;
        }
    }

    /// Fills in pages that [`Allocator::look`] has granted.
    fn populate(&self, from: u64, to: u64) -> Result<()> {
        let populated = self.arena.populate(self.region, from, to);
        self.arena.promise(self.region, 0);
        populated
    }

    /// Puts a block that the owner was the last to hold back into its list.
    pub fn put(&mut self, id: u32) {
        let entry = &self.arena.table(self.region)[id as usize];
        let pages = entry.capacity.load(Ordering::Relaxed) / PAGE;
        self.free[class_of(pages).min(CLASSES - 1)].blocks.push(id);
        self.idle = self.idle.saturating_add(entry.warm.load(Ordering::Relaxed));
        self.idle_since[id as usize] = self.clock;
    }

    /// Lets go of the owner's hold; the block goes back into the list if nobody else holds it.
    pub fn release(&mut self, id: u32) {
        let state = &self.arena.table(self.region)[id as usize].state;
        if block::release_owned(state, WORKER) == Left::Last {
            self.put(id);
        }
    }

    /// The block that the byte at `address` lies in, if it lies in a block of this region, and the offset in it.
    pub fn find(&self, address: usize) -> Option<(u32, u64)> {
        let base = self.arena.region_base(self.region) as usize;
        let offset = address.checked_sub(base)? as u64;
        if offset >= self.fresh {
            return None;
        }
        let table = &self.arena.table(self.region)[..self.mapped.len()];
        let id = table.partition_point(|block| block.offset.load(Ordering::Relaxed) <= offset) - 1;
        Some((id as u32, offset - table[id].offset.load(Ordering::Relaxed)))
    }

    fn end_window(&mut self) -> Result<()> {
        self.window = TRIM_WINDOW;
        self.peak = [0, self.peak[0]];
        // In a worker nobody else asks whether the children have ended that its dataset has forked.
        forks::reap();
        self.collect()?;
        for class in 0..CLASSES {
            let list = &mut self.free[class];
            let surplus = list.low.saturating_sub(list.cold);
            list.low = list.blocks.len();
            if surplus == 0 {
                list.patience = 0;
                continue;
            }
            list.patience += 1;
            if list.patience < TRIM_PATIENCE {
                continue;
            }
            list.patience = 0;
            (0..surplus).for_each(|_| self.cool(class));
        }
        Ok(())
    }

    /// For a worker that has nothing to do: gives back the pages of idle blocks beyond `budget` bytes of pages in all.
    pub fn trim(&mut self, budget: u64) -> Result<()> {
        forks::reap();
        self.collect()?;
        for class in 0..CLASSES {
            while self.warm > budget && self.free[class].cold < self.free[class].blocks.len() {
                self.cool(class);
            }
        }
        Ok(())
    }

    fn full(&self, len: u64) -> Error {
        let size = self.arena.geometry().region_len;
        Error::RegionFull { wanted: len, size, headroom: size - self.fresh.min(size) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::block::CONSUMER;

    fn allocator() -> Allocator {
        Allocator::new(Arena::create_sized(1 << 30, 1, 8).unwrap(), 0)
    }

    #[test]
    fn classes_cover_all_sizes() {
        for pages in (1..5000).chain([1 << 20, (1 << 20) + 1, 1 << 28]) {
            let class = class_of(pages);
            assert!(class < CLASSES);
            assert!(class_pages(class) >= pages);
            assert_eq!(class_of(class_pages(class)), class);
            assert!(class == 0 || class_pages(class - 1) < pages);
        }
    }

    #[test]
    fn a_block_comes_back_warm_and_last_in_first_out() {
        let mut a = allocator();
        let one = a.allocate(100_000, WORKER).unwrap();
        let two = a.allocate(100_000, WORKER).unwrap();
        assert_ne!(one, two);
        a.release(one);
        a.release(two);
        assert_eq!(a.allocate(100_000, WORKER).unwrap(), two);
        assert_eq!(a.allocate(99_000, WORKER).unwrap(), one);
    }

    #[test]
    fn a_held_block_is_not_reused_until_the_consumer_returns_it() {
        let mut a = allocator();
        let id = a.allocate(20_000, WORKER | CONSUMER).unwrap();
        a.release(id);
        assert_ne!(a.allocate(20_000, CONSUMER).unwrap(), id);
        a.arena.clone().release(0, id, CONSUMER);
        assert_eq!(a.allocate(20_000, WORKER).unwrap(), id);
    }

    #[test]
    fn surplus_pages_are_given_back_and_the_working_set_stays() {
        let mut a = allocator();
        let burst: Vec<u32> = (0..32).map(|_| a.allocate(1 << 20, WORKER).unwrap()).collect();
        let peak = a.warm_bytes();
        burst.into_iter().for_each(|id| a.release(id));
        for _ in 0..TRIM_WINDOW * 40 {
            let id = a.allocate(1 << 20, WORKER).unwrap();
            a.release(id);
        }
        assert!(a.warm_bytes() <= peak / 8, "{} of {peak}", a.warm_bytes());
        assert!(a.warm_bytes() >= 1 << 20);
    }

    #[test]
    fn blocks_of_other_sizes_do_not_pile_up() {
        let mut a = allocator();
        for round in 0..20 {
            for size in [1 << 20, 9 << 20, 3 << 20, 27 << 20, 100 << 10] {
                let id = a.allocate(size + round * 4096, WORKER).unwrap();
                a.release(id);
                assert!(a.warm_bytes() <= (27 << 20) * 5 / 4 + (1 << 20), "{}", a.warm_bytes());
            }
        }
        let (warm, idle) = (a.warm_bytes(), a.idle);
        let table = a.arena.table(0);
        let all: u64 = table[..a.mapped.len()].iter().map(|b| b.warm.load(Ordering::Relaxed)).sum();
        assert_eq!((all, warm), (warm, idle), "nothing is held");
    }

    #[test]
    fn a_warm_block_of_nearly_the_size_is_taken() {
        let mut a = allocator();
        let id = a.allocate(16 << 20, WORKER).unwrap();
        a.release(id);
        let near = a.allocate(9 << 20, WORKER).unwrap();
        assert_eq!(near, id);
        a.release(near);
        assert_ne!(a.allocate(8 << 20, WORKER).unwrap(), id, "half of it would lie idle");
        assert_ne!(a.allocate(17 << 20, WORKER).unwrap(), id);
    }

    #[test]
    fn a_new_owner_finds_what_is_free_and_leaves_what_is_held() {
        let mut a = allocator();
        let held = a.allocate(50_000, CONSUMER).unwrap();
        let idle = a.allocate(50_000, WORKER).unwrap();
        a.release(idle);
        let arena = a.arena.clone();
        drop(a);
        let mut b = Allocator::new(arena.clone(), 0);
        assert_eq!(b.allocate(50_000, WORKER).unwrap(), idle);
        assert_ne!(b.allocate(50_000, WORKER).unwrap(), held);
        arena.release(0, held, CONSUMER);
        assert_eq!(b.allocate(50_000, WORKER).unwrap(), held);
    }

    #[test]
    fn a_full_region_is_an_error_that_names_its_size() {
        let mut a = allocator();
        let region = a.arena.geometry().region_len;
        let error = a.allocate(region + 1, WORKER).unwrap_err();
        assert!(matches!(error, Error::RegionFull { wanted, .. } if wanted == region + 1));
    }

    #[test]
    fn what_others_are_reserving_counts_until_it_is_done() {
        let arena = Arena::create_sized(1 << 30, 3, 8).unwrap();
        arena.promise(0, 5);
        arena.promise(2, 7);
        // The main process's region is nobody's.
        arena.promise(3, 100);
        assert_eq!([0, 1, 2, 3].map(|region| arena.promised_by_others(region)), [7, 12, 5, 12]);
        let mut a = Allocator::new(arena.clone(), 2);
        a.allocate(100_000, WORKER).unwrap();
        assert_eq!(arena.promised_by_others(1), 5);
    }

    #[test]
    fn what_others_are_reserving_is_waited_for_outside_of_the_allocator() {
        let arena = Arena::create_sized(1 << 30, 2, 8).unwrap();
        let mut a = Allocator::new(arena.clone(), 1);
        arena.promise(0, u64::MAX / 2);
        let refused = a.allocate(1 << 20, WORKER);
        assert!(matches!(refused, Err(Error::NoMemory { passing: true, .. })), "{refused:?}");
        let mut pauses = 0;
        let allocated = settle(
            || a.allocate(1 << 20, WORKER),
            |_| {
                pauses += 1;
                arena.promise(0, 0);
            },
        );
        assert!(allocated.is_ok() && pauses == 1);
        // What no machine has is refused at once.
        let refused =
            || Err::<(), _>(Error::NoMemory { wanted: 1, limit: String::new(), headroom: 0, passing: false });
        assert!(settle(refused, |_| panic!("it waits")).is_err());
    }

    #[test]
    fn a_block_is_read_out_as_far_as_it_reaches() {
        let mut a = allocator();
        let id = a.allocate(5000, CONSUMER).unwrap();
        let bytes: Vec<u8> = (0..5000).map(|i| i as u8).collect();
        // SAFETY: the block has 5000 bytes, which nobody else looks at.
        unsafe { a.arena.block_memory(0, id, 5000).unwrap().as_ptr().copy_from(bytes.as_ptr(), 5000) };
        let mut buffer = vec![1; 9000];
        a.arena.read_block(0, id, 5000, &mut buffer).unwrap();
        assert_eq!(buffer, bytes);
        for (region, id, len) in [(0, id, 8193), (0, id + 1, 1), (2, 0, 1)] {
            let refused = a.arena.read_block(region, id, len, &mut buffer);
            assert!(matches!(refused, Err(Error::Corrupt { .. })), "{refused:?}");
        }
        assert_eq!(buffer, bytes);
    }

    #[test]
    fn addresses_are_found_in_their_block() {
        let mut a = allocator();
        let ids: Vec<u32> =
            [5000, 70_000, 4096].iter().map(|&len| a.allocate(len, WORKER).unwrap()).collect();
        for &id in &ids {
            let start = a.arena.block_memory(0, id, 1).unwrap().as_ptr() as usize;
            assert_eq!(a.find(start), Some((id, 0)));
            assert_eq!(a.find(start + 4095), Some((id, 4095)));
        }
        assert_eq!(a.find(1), None);
        assert_eq!(a.find(a.arena.region_base(0) as usize + (100 << 20)), None);
    }
}
