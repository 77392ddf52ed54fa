//! The arena: one sealed memfd, which each process maps once and accesses through checked, typed methods.

mod rings;
mod usage;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

pub use self::rings::{ArenaQueue, ArenaRing};
pub use self::usage::Usage;
use super::block::{self, CONSUMER, DELIVERED, Left, Parking, RETURNING, Remains, WORKER};
use super::layout::{
    BlockEntry, ControlPage, Geometry, Header, MAGIC, Needs, PAGE, QueueControl, QueueSlot, RegionHead, RingControl,
    RingSlot, Sleeper, TraceHead, VERSION, WorkerState,
};
use super::ring::{Consumer, Entry};
use crate::config::{ARENA_MAX, ARENA_MIN, ARENA_USUAL, LARGE, TRACE_SLOTS};
use crate::error::{Error, Result};
use crate::sync::{AtomicU64, Ordering, fence};
use crate::sys;

/// Number of blocks, across all arenas of this process, that hold delivered tensors. While it is 0, a fork of the main
/// process has nothing to mark.
static DELIVERED_BLOCKS: AtomicUsize = AtomicUsize::new(0);

/// Returns the number of blocks that currently hold tensors delivered in this process.
pub(crate) fn delivered_blocks() -> usize {
    DELIVERED_BLOCKS.load(Ordering::Relaxed)
}

/// One process's view of an arena.
#[derive(Debug)]
pub struct Arena {
    map: Arc<sys::map::Mapping>,
    fd: Arc<sys::owned::HomeFd>,
    geometry: Geometry,
    /// The fork generation of the process that made this object. In forked children of that process the object is
    /// unusable: see [`Arena::inherited`].
    generation: u64,
    /// True in the process that created the arena, which alone may retire it.
    made_here: bool,
    /// True once the arena is retired: no worker will attach to it again.
    retired: AtomicBool,
    /// Set while no worker is attached because the arena is in the pool or retired: released blocks lose their pages at
    /// once.
    parking: Parking,
    /// The ID of the loader that uses the arena, or used it last; 0 if there is none.
    pub(super) owner: AtomicU64,
}

impl Arena {
    /// Creates an arena of eight times the machine's RAM and swap, but at least 64 GiB and at most 1 TiB. If the system
    /// refuses that size, halves it, down to 1 GiB. If the address space is limited, the arena takes at most half of
    /// what is left. Untouched pages take no memory.
    pub fn create(needs: Needs) -> Result<Arc<Self>> {
        Self::create_within(ARENA_MAX, needs)
    }

    /// Creates an arena as [`Arena::create`] does, but of at most `max_bytes`.
    pub fn create_within(max_bytes: u64, needs: Needs) -> Result<Arc<Self>> {
        let usual_bytes = (sys::memory::total_ram_and_swap().saturating_mul(8)).clamp(ARENA_USUAL, ARENA_MAX);
        let mut total = usual_bytes.min(max_bytes);
        if let Some(left) = sys::map::address_space_left() {
            total = total.min(left / 2);
            if total < ARENA_MIN.min(max_bytes) {
                return Err(sys::map::no_address_space(2 * ARENA_MIN, left));
            }
        }
        loop {
            match Self::create_for(total, needs) {
                Ok(arena) => return Ok(arena),
                Err(error) if total / 2 < ARENA_MIN => return Err(error),
                Err(_) => total /= 2,
            }
        }
    }

    /// Creates an arena of `total` bytes, rounded down to whole pages, without a shared queue.
    pub fn create_sized(total: u64, workers: u32, outstanding: u32) -> Result<Arc<Self>> {
        Self::create_for(total, Needs { workers, outstanding, shared_queue: false, snapshots: false })
    }

    /// Creates an arena of `total` bytes, rounded down to whole pages.
    pub fn create_for(total: u64, needs: Needs) -> Result<Arc<Self>> {
        let geometry = Geometry::new(total / PAGE * PAGE, needs)?;
        let fd = sys::memfd::create("rustloader", geometry.total)?;
        sys::memfd::seal(fd.as_fd())?;
        let arena = Self::map(fd, geometry, true)?;
        // Every batch touches the control part. Reserving its pages now turns a lack of memory into an error here,
        // instead of a SIGBUS later.
        arena.map.populate(0..geometry.region_head(geometry.regions()) as usize)?;
        let header = arena.header();
        header.workers.store(geometry.workers, Ordering::Relaxed);
        header.ring_slots.store(geometry.ring_slots, Ordering::Relaxed);
        header.table_len.store(geometry.table_len, Ordering::Relaxed);
        header.region_len.store(geometry.region_len, Ordering::Relaxed);
        header.shared_queue.store(u32::from(geometry.shared_queue), Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Relaxed);
        // SYNC: arena-made (pairs with the Acquire in `attach`).
        header.version.store(VERSION, Ordering::Release);
        Ok(Arc::new(arena))
    }

    /// Maps an arena that another process created. Returns [`Error::Corrupt`] if its header does not match `geometry`.
    pub fn attach(fd: OwnedFd, geometry: Geometry) -> Result<Arc<Self>> {
        let arena = Self::map(fd, geometry, false)?;
        let header = arena.header();
        // SYNC: arena-made (pairs with the Release in `create_for`).
        let version = header.version.load(Ordering::Acquire);
        let stored = (
            header.magic.load(Ordering::Relaxed),
            version,
            header.workers.load(Ordering::Relaxed),
            header.ring_slots.load(Ordering::Relaxed),
            header.table_len.load(Ordering::Relaxed),
            header.region_len.load(Ordering::Relaxed),
            header.shared_queue.load(Ordering::Relaxed),
        );
        let (g, queue) = (&geometry, u32::from(geometry.shared_queue));
        if stored != (MAGIC, VERSION, g.workers, g.ring_slots, g.table_len, g.region_len, queue) {
            return Err(Error::corrupt(format!("the header of an arena reads {stored:x?}, but {g:?} is expected")));
        }
        Ok(Arc::new(arena))
    }

    fn map(fd: OwnedFd, geometry: Geometry, made_here: bool) -> Result<Self> {
        sys::fork::count_forks()?;
        let map = Arc::new(sys::map::Mapping::new(fd.as_fd(), geometry.total as usize)?);
        Ok(Self::with_mapping(map, Arc::new(sys::owned::HomeFd::new(fd)), geometry, made_here))
    }

    fn with_mapping(
        map: Arc<sys::map::Mapping>,
        fd: Arc<sys::owned::HomeFd>,
        geometry: Geometry,
        made_here: bool,
    ) -> Self {
        let generation = sys::fork::generation();
        let (retired, parking) = (AtomicBool::new(false), Parking::default());
        Self { map, fd, geometry, generation, made_here, retired, parking, owner: AtomicU64::new(0) }
    }

    /// Returns a forked worker's view of the arena. It shares the inherited mapping, because a second mapping would
    /// cost address space.
    pub fn inherited(&self) -> Arc<Self> {
        Arc::new(Self::with_mapping(self.map.clone(), self.fd.clone(), self.geometry, false))
    }

    /// Returns the arena's sizes and offsets.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Returns the memfd.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Returns the memfd as a raw descriptor.
    pub fn raw_fd(&self) -> RawFd {
        self.fd.as_fd().as_raw_fd()
    }

    /// Returns true in the process that made this object, and false in its forked children.
    #[inline]
    pub fn is_ours(&self) -> bool {
        self.generation == sys::fork::generation()
    }

    /// Returns a reference to the `T` at `offset`.
    fn at<T>(&self, offset: u64) -> &T {
        &self.slice::<T>(offset, 1)[0]
    }

    /// Returns a slice of `len` values of type `T` at `offset`. `T` must be a type of the layout, and so consist of
    /// atomics.
    #[inline]
    fn slice<T>(&self, offset: u64, len: u32) -> &[T] {
        let bytes = u64::from(len) * size_of::<T>() as u64;
        assert!(offset.is_multiple_of(align_of::<T>() as u64) && offset + bytes <= self.map.len() as u64);
        // SAFETY: the range is in the mapping, which lives as long as self and cannot shrink (it is sealed); it is
        // aligned; T consists of atomics, for which every bit pattern is valid and which may change under the
        // reference.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(offset as usize).cast::<T>(), len as usize) }
    }

    /// Returns the arena's header.
    pub fn header(&self) -> &Header {
        self.at(0)
    }

    /// Returns the bitmap of rings that hold results.
    pub fn bitmap(&self) -> &[AtomicU64] {
        self.slice(self.geometry.bitmap(), self.geometry.bitmap_words())
    }

    /// Returns a worker's control page.
    pub fn control(&self, worker: u32) -> &ControlPage {
        assert!(worker < self.geometry.workers);
        self.at(self.geometry.control(worker))
    }

    /// Returns a worker's submission ring.
    pub fn task_ring(self: &Arc<Self>, worker: u32) -> ArenaRing {
        let slots = self.slice::<RingSlot>(self.geometry.task_slots(worker), self.geometry.ring_slots);
        ArenaRing::new(self.clone(), &self.control(worker).tasks, slots)
    }

    /// Returns a worker's completion ring.
    pub fn result_ring(self: &Arc<Self>, worker: u32) -> ArenaRing {
        let slots = self.slice::<RingSlot>(self.geometry.result_slots(worker), self.geometry.ring_slots);
        ArenaRing::new(self.clone(), &self.control(worker).results, slots)
    }

    /// Returns the head of a worker's ring of trace events.
    pub fn trace_head(&self, worker: u32) -> &TraceHead {
        assert!(worker < self.geometry.workers);
        self.at(self.geometry.trace_head(worker))
    }

    /// Returns a worker's ring of trace events.
    pub fn trace_ring(self: &Arc<Self>, worker: u32) -> ArenaRing {
        let slots = self.slice::<RingSlot>(self.geometry.trace_slots(worker), TRACE_SLOTS);
        ArenaRing::new(self.clone(), &self.trace_head(worker).ring, slots)
    }

    /// Reserves the pages of the rings of trace events.
    pub fn populate_traces(&self) -> Result<()> {
        let end = self.geometry.trace_head(self.geometry.workers);
        self.map.populate(self.geometry.trace_head(0) as usize..end as usize)
    }

    /// Returns the head of the shared queue, if the arena has one.
    pub fn queue_control(&self) -> Option<&QueueControl> {
        self.geometry.shared_queue.then(|| self.at(self.geometry.queue_control()))
    }

    /// Returns the shared queue, if the arena has one.
    pub fn queue(self: &Arc<Self>) -> Option<ArenaQueue> {
        let slots = self.slice::<QueueSlot>(self.geometry.queue(), self.geometry.queue_slots());
        self.queue_control().map(|control| ArenaQueue::new(self.clone(), control, slots))
    }

    /// Returns the sleeper on which a worker waits: that of the shared queue if the arena has one, otherwise the
    /// worker's own.
    pub fn sleeper_of(&self, worker: u32) -> &Sleeper {
        let queue = self.queue_control().map(|control| &control.sleeper.0);
        queue.unwrap_or_else(|| &self.control(worker).sleeper.0)
    }

    /// Returns a region's head.
    pub fn region_head(&self, region: u32) -> &RegionHead {
        assert!(region < self.geometry.regions());
        self.at(self.geometry.region_head(region))
    }

    /// Returns a region's block table.
    #[inline]
    pub fn table(&self, region: u32) -> &[BlockEntry] {
        assert!(region < self.geometry.regions());
        self.slice(self.geometry.table(region), self.geometry.table_len)
    }

    /// Returns the number of entries of a region's block table that are in use, with or without a block; at most the
    /// table's length, even if the word is damaged.
    pub fn block_count(&self, region: u32) -> u32 {
        // SYNC: block-made (pairs with the Release in `Allocator::has_entry`).
        self.region_head(region).blocks.load(Ordering::Acquire).min(self.geometry.table_len)
    }

    /// Returns the address of a block's first `len` bytes. Returns [`Error::Corrupt`] if the table has no such block,
    /// or if these bytes do not lie within the block and the region.
    pub fn block_memory(&self, region: u32, id: u32, len: u64) -> Result<NonNull<u8>> {
        if region >= self.geometry.regions() || id >= self.block_count(region) {
            return Err(Error::corrupt(format!("block {id} of region {region} does not exist")));
        }
        let entry = &self.table(region)[id as usize];
        let offset = entry.offset.load(Ordering::Relaxed);
        let capacity = entry.capacity.load(Ordering::Relaxed);
        let region_len = self.geometry.region_len;
        if len > capacity || capacity > region_len || offset > region_len - capacity || !offset.is_multiple_of(PAGE) {
            return Err(Error::corrupt(format!(
                "{len} bytes of block {id} of region {region} are used, but it has {capacity} bytes at offset {offset}"
            )));
        }
        let start = (self.geometry.data(region) + offset) as usize;
        // SAFETY: the checks above ensure that `start` is inside the mapping.
        Ok(unsafe { NonNull::new_unchecked(self.map.as_ptr().add(start)) })
    }

    /// Replaces the contents of `buffer` with the first `len` bytes of a block. Returns [`Error::Corrupt`] if the block
    /// does not have them.
    pub fn read_block(&self, region: u32, id: u32, len: u64, buffer: &mut Vec<u8>) -> Result<()> {
        let memory = self.block_memory(region, id, len)?;
        let len = len as usize;
        buffer.clear();
        buffer.reserve(len);
        // SAFETY: `block_memory` has checked that the range is in the mapping; the buffer is outside the mapping and
        // has room for `len` bytes. No reference to the block is created, because a broken process may write to the
        // block during the copy. The buffer then holds old bytes, new bytes or a mixture. The caller checks them, like
        // everything that other processes write.
        unsafe {
            std::ptr::copy_nonoverlapping(memory.as_ptr(), buffer.as_mut_ptr(), len);
            buffer.set_len(len);
        }
        Ok(())
    }

    /// Returns the address of a region's data in this process.
    pub fn region_base(&self, region: u32) -> *mut u8 {
        assert!(region < self.geometry.regions());
        // SAFETY: the region is inside the mapping.
        unsafe { self.map.as_ptr().add(self.geometry.data(region) as usize) }
    }

    /// Reserves the pages of the bytes `from..to` of a region's data, so that later accesses cannot fail for lack of
    /// memory.
    pub fn populate(&self, region: u32, from: u64, to: u64) -> Result<()> {
        let start = self.geometry.data(region);
        self.map.populate((start + from) as usize..(start + to) as usize)
    }

    /// Maps the pages of the bytes `from..to` of a region's data into this process's page tables. The pages must be
    /// reserved.
    pub fn map_in(&self, region: u32, from: u64, to: u64) -> Result<()> {
        let start = self.geometry.data(region);
        self.map.map_in((start + from) as usize..(start + to) as usize)
    }

    /// If `id` is the first entry on a page of a region's block table, reserves that page; otherwise does nothing.
    pub fn populate_table(&self, region: u32, id: u32) -> Result<()> {
        let (row, start) = (size_of::<BlockEntry>() as u64, self.geometry.table(region));
        let (begin, end) = (start + u64::from(id) * row, start + u64::from(id + 1) * row);
        // Entries do not straddle pages: the table starts at a page boundary, and the size of a page is a multiple of
        // the size of an entry.
        if !begin.is_multiple_of(PAGE) {
            return Ok(());
        }
        self.map.populate(begin as usize..end as usize)
    }

    /// Releases the pages of the bytes `from..to` of a region's data to the system.
    pub fn punch_hole(&self, region: u32, from: u64, to: u64) -> Result<()> {
        let start = self.geometry.data(region);
        self.map.remove((start + from) as usize..(start + to) as usize)
    }

    /// Records that a block holds tensors that were delivered to the user, so that forks mark the block. Returns
    /// [`Error::Corrupt`] unless the consumer holds the block and the block holds no such tensors yet.
    pub fn mark_delivered(&self, region: u32, id: u32) -> Result<()> {
        let state = &self.table(region)[id as usize].state;
        let mut seen = state.load(Ordering::Relaxed);
        loop {
            if seen & (CONSUMER | DELIVERED) != CONSUMER {
                return Err(Error::corrupt(format!("block {id} of region {region} is not in a message")));
            }
            match state.compare_exchange_weak(seen, seen | DELIVERED, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => seen = now,
            }
        }
        DELIVERED_BLOCKS.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Releases the consumer's hold on a block whose delivered tensors are gone.
    pub fn release_delivered(&self, region: u32, id: u32) {
        DELIVERED_BLOCKS.fetch_sub(1, Ordering::Relaxed);
        self.release(region, id, CONSUMER);
    }

    /// Clears the holder bits `bits` of a block. If no holder remains, returns the block to its owner through the
    /// return stack. Does nothing in a forked child. Takes no lock; any thread may call it.
    #[inline]
    pub fn release(&self, region: u32, id: u32, bits: u32) {
        if !self.is_ours() || id >= self.geometry.table_len {
            return;
        }
        let entry = &self.table(region)[id as usize];
        if block::release(&entry.state, bits) == Left::Held {
            return;
        }
        let head = &self.region_head(region).returned;
        let is_large = entry.warm.load(Ordering::Relaxed) >= LARGE;
        block::give_back(&self.parking, head, entry, id, || self.punch_block(region, entry));
        if is_large {
            self.notify_idle(region);
        }
    }

    /// Wakes the worker that owns `region` if it has been idle for some time, so that it can release the pages of the
    /// large block that was just returned to it. Does nothing if the workers share a queue, because the queue's bell
    /// cannot wake a particular worker. These workers check for returned blocks periodically.
    fn notify_idle(&self, region: u32) {
        if region >= self.geometry.workers || self.queue_control().is_some() {
            return;
        }
        let ControlPage { status, sleeper, .. } = self.control(region);
        let since = Duration::from_nanos(status.since_ns.load(Ordering::Relaxed));
        let is_idle = status.state.load(Ordering::Relaxed) == WorkerState::Idle as u32;
        if is_idle && sys::clock::monotonic().saturating_sub(since) >= status.long_idle() && sleeper.0.must_ring() {
            // If the wake-up fails, the worker notices the block at its next check.
            let _ = sys::futex::wake(&sleeper.0.bell, 1);
        }
    }

    /// Releases the pages of a block that will not be used soon. If that fails, the block keeps its pages.
    fn punch_block(&self, region: u32, entry: &BlockEntry) {
        let offset = entry.offset.load(Ordering::Relaxed).min(self.geometry.region_len);
        let warm = entry.warm.load(Ordering::Relaxed).min(self.geometry.region_len - offset);
        if warm > 0 && self.punch_hole(region, offset, offset + warm).is_ok() {
            entry.warm.store(0, Ordering::Relaxed);
        }
    }

    /// Resets the rings, flags and status pages of a pooled arena for new workers.
    pub fn reset_control(&self) {
        self.parking.end();
        let header = self.header();
        header.stop.0.store(0, Ordering::Relaxed);
        header.trace.0.store(0, Ordering::Relaxed);
        header.doorbell.0.asleep.store(0, Ordering::Relaxed);
        header.main.reset();
        for word in self.bitmap() {
            word.store(0, Ordering::Relaxed);
        }
        if let Some(control) = self.queue_control() {
            control.head.0.store(0, Ordering::Relaxed);
            control.sleeper.0.asleep.store(0, Ordering::Relaxed);
            for slot in self.slice::<QueueSlot>(self.geometry.queue(), self.geometry.queue_slots()) {
                slot.state.store(0, Ordering::Relaxed);
            }
        }
        for worker in 0..self.geometry.workers {
            let control = self.control(worker);
            for ring in [&control.tasks, &control.results] {
                ring.tail.0.store(0, Ordering::Relaxed);
                ring.head.0.store(0, Ordering::Relaxed);
            }
            control.sleeper.0.asleep.store(0, Ordering::Relaxed);
            control.status.reset();
        }
        // Workers are started after this, by fork or through a pipe. Either way, these stores happen before the
        // workers' loads.
    }

    /// Resets a worker's rings, status page and region for the next process in its slot. Other workers, and the blocks
    /// in this region that the consumer holds, are unchanged. The worker's process must have ended, cleanly or not, and
    /// its results must have been received; this process then acts as the region's owner. `withdrawn` is called with
    /// each task that the worker had not taken. Two kinds of block stay held until the arena is recovered or retired:
    /// those of an unpublished message, and those that a child of the worker may read.
    ///
    /// Errors: [`Error::Usage`] if a result is left in the completion ring, [`Error::Corrupt`] if a ring or the region
    /// is damaged.
    pub fn reset_worker(self: &Arc<Self>, worker: u32, mut withdrawn: impl FnMut(Entry)) -> Result<()> {
        let control = self.control(worker);
        let RingControl { tail, head } = &control.results;
        if tail.0.load(Ordering::Relaxed) != head.0.load(Ordering::Relaxed) {
            return Err(Error::usage(format!("results of worker {worker} have not been received")));
        }
        // The counters continue, so the main process's ends of both rings stay valid.
        let mut tasks = Consumer::new(self.task_ring(worker));
        while let Some(entry) = tasks.pop()? {
            withdrawn(entry);
        }
        control.sleeper.0.asleep.store(0, Ordering::Relaxed);
        control.status.reset();
        let table = &self.table(worker)[..self.block_count(worker) as usize];
        let returned = &self.region_head(worker).returned;
        block::take_returned(returned, table.len() as u32, |id| &table[id as usize], |_| {})?;
        for entry in table {
            block::release_owned(&entry.state, WORKER);
            // A block that is still RETURNING is on no stack: the owner was killed while it emptied the stack, or
            // another thread is about to push the block.
            if entry.state.load(Ordering::Relaxed) == RETURNING {
                self.punch_block(worker, entry);
            }
        }
        Ok(())
    }

    /// Recovers the arena after all workers have left cleanly and all results have been released. Takes back the blocks
    /// that neither the user's tensors nor forked children use, and keeps about as many warm pages as the batches in
    /// flight needed. Returns the number of bytes of idle warm pages, or `None` if a child of a worker may still read a
    /// block: the arena must then not be reused.
    pub fn recover(&self) -> Option<u64> {
        self.parking.begin();
        let mut idle = 0;
        for region in 0..self.geometry.regions() {
            let mut budget = match region < self.geometry.workers {
                true => self.budget(region),
                false => u64::MAX,
            };
            for entry in &self.table(region)[..self.block_count(region) as usize] {
                match block::recover(&entry.state) {
                    Remains::WorkersChild => return None,
                    Remains::Held => continue,
                    Remains::Idle => {}
                }
                let warm = entry.warm.load(Ordering::Relaxed);
                if warm > budget {
                    self.punch_block(region, entry);
                } else {
                    budget -= warm;
                    idle += warm;
                }
            }
        }
        Some(idle)
    }

    /// Announces that a worker is about to reserve `bytes` bytes, or, if `bytes` is 0, that the reservation has ended.
    /// Does nothing for the main process's region.
    pub fn promise(&self, region: u32, bytes: u64) {
        if region < self.geometry.workers {
            // SYNC: pages-or-promise (pairs with the Acquire in `promised_by_others`).
            self.control(region).status.promised.store(bytes, Ordering::Release);
        }
    }

    /// Returns the number of bytes that the other workers are reserving. Call it after this worker's promise and before
    /// reading the available memory. Of two concurrent checks, at least one then sees the other's promise; and if a
    /// promise has ended, its pages already count as used.
    pub fn promised_by_others(&self, region: u32) -> u64 {
        fence(Ordering::SeqCst);
        let others = (0..self.geometry.workers).filter(|worker| *worker != region);
        // SYNC: pages-or-promise (pairs with the Release in `promise`).
        others.map(|worker| self.control(worker).status.promised.load(Ordering::Acquire)).sum()
    }

    /// Returns the number of warm bytes that a worker's region needs for its batches in flight; at least 1 MiB.
    pub fn budget(&self, worker: u32) -> u64 {
        let largest = self.control(worker).status.largest.load(Ordering::Relaxed);
        largest.saturating_mul(self.geometry.batches_in_flight()).max(1 << 20)
    }

    /// Retires the arena, so that no worker attaches to it again. Releases the pages of all blocks except those that
    /// the user's tensors or forked children may still read. From then on, a block loses its pages as soon as it is
    /// released. Only the process that created the arena can retire it; other and later calls do nothing.
    pub fn retire(&self) {
        if !self.made_here || !self.is_ours() || self.retired.swap(true, Ordering::AcqRel) {
            return;
        }
        self.parking.begin();
        for region in 0..self.geometry.regions() {
            for entry in &self.table(region)[..self.block_count(region) as usize] {
                if block::is_unseen(&entry.state) {
                    self.punch_block(region, entry);
                }
            }
        }
    }

    /// Returns the arena's memory use, summed over the block tables of all regions.
    pub fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        for region in 0..self.geometry.regions() {
            let count = self.block_count(region);
            let (peak, warm_before) = (self.region_head(region).high_water.load(Ordering::Relaxed), usage.warm);
            self.table(region)[..count as usize].iter().for_each(|entry| usage.add_block(entry));
            usage.add_peak(peak, warm_before);
        }
        usage
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // Forked processes may still map the arena. Without this call, their mappings would keep its pages in memory.
        self.retire();
    }
}
