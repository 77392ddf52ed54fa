//! The sizes of an arena, and the offsets of its parts.
//!
//! The control part takes about workers² x prefetch_factor x 128 bytes, before ring sizes are rounded up to a power of
//! two. With a prefetch_factor of 2 and the rounding, 64 workers need 2 MiB, and 1,000 workers 250 MiB. Snapshots
//! double the size. The pages of the control part are reserved when the arena is created, so that a lack of memory is
//! an error at once, and not a SIGBUS later.

use super::{BlockEntry, ControlPage, Header, PAGE, QueueControl, QueueSlot, RegionHead, RingSlot, TraceHead};
use crate::config::{BYTES_PER_BLOCK, REGION_MIN, TABLE_MAX, TABLE_MIN, TASKS_MAX, TRACE_SLOTS, WORKERS_MAX};
use crate::error::{Error, Result};

/// The requirements that an arena must meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Number of workers, at least 1.
    pub workers: u32,
    /// Maximum number of outstanding tasks.
    pub outstanding: u32,
    /// True if the workers share a queue.
    pub shared_queue: bool,
    /// True if workers send snapshots with their results.
    pub snapshots: bool,
}

/// The sizes of an arena, from which both sides compute every offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Number of workers, at least 1.
    pub workers: u32,
    /// Number of slots of each ring, a power of two.
    pub ring_slots: u32,
    /// True if the workers share a queue, which has as many slots as a ring.
    pub shared_queue: bool,
    /// Number of entries of each block table.
    pub table_len: u32,
    /// Bytes of data of each region, a multiple of [`PAGE`].
    pub region_len: u64,
    /// Bytes of the whole arena.
    pub total: u64,
}

const fn round_up(value: u64, to: u64) -> u64 {
    value.div_ceil(to) * to
}

/// Returns the number of slots of a ring for `outstanding` tasks and four control messages: two that begin an epoch
/// early, one that begins another epoch, and one that tells the worker to leave. The number doubles if workers send
/// snapshots: one with each result, one at the start and one at the end of an epoch, one for an error, and one at the
/// start of the next epoch.
const fn ring_slots_for(outstanding: u32, snapshots: bool) -> u32 {
    let results = outstanding + 4;
    (if snapshots { 2 * results } else { results }).next_power_of_two()
}

/// Returns the number of entries of a region's block table, given the region's share of the arena.
fn table_len_for(share: u64) -> u32 {
    (share / BYTES_PER_BLOCK).clamp(TABLE_MIN, TABLE_MAX) as u32
}

fn too_many(workers: u32, outstanding: u32, limit: String) -> Error {
    let (workers, prefetch_factor) = (u64::from(workers), u64::from(outstanding / workers));
    Error::TooMany { workers, prefetch_factor, limit }
}

impl Geometry {
    /// Returns the geometry of an arena of `total` bytes, or an error if less than 1 MiB of data per region would
    /// remain.
    pub fn new(total: u64, needs: Needs) -> Result<Self> {
        let Needs { workers, outstanding, shared_queue, .. } = needs;
        let ring_slots = Self::ring_slots_of(needs)?;
        Self::lay_out(total, workers, ring_slots, shared_queue).ok_or_else(|| {
            let limit = format!(
                "their regions do not fit into the {total} bytes of available address space (RLIMIT_AS, `ulimit -v`)"
            );
            too_many(workers, outstanding, limit)
        })
    }

    /// Computes the sizes. Returns `None` if less than 1 MiB of data per region remains.
    fn lay_out(total: u64, workers: u32, ring_slots: u32, shared_queue: bool) -> Option<Self> {
        let regions = u64::from(workers) + 1;
        let table_len = table_len_for(total / regions);
        let geometry = Self { workers, ring_slots, shared_queue, table_len, region_len: 0, total };
        let region_len = total.saturating_sub(geometry.data_start()) / regions / PAGE * PAGE;
        (region_len >= REGION_MIN).then_some(Self { region_len, ..geometry })
    }

    /// Returns the size in bytes of an arena whose regions have `region_len` bytes of data, or slightly less.
    pub fn total_for(region_len: u64, needs: Needs) -> Result<u64> {
        let Needs { workers, shared_queue, .. } = needs;
        let (ring_slots, table_len) = (Self::ring_slots_of(needs)?, table_len_for(region_len));
        // `new` computes the length of the block table from a region's whole share of the arena. The table may then be
        // longer than here, which leaves less data.
        let geometry = Self { workers, ring_slots, shared_queue, table_len, region_len: 0, total: 0 };
        let data = region_len.saturating_mul(u64::from(geometry.regions()));
        Ok(data.saturating_add(geometry.data_start()))
    }

    /// Returns the number of slots of each ring.
    pub fn ring_slots_of(needs: Needs) -> Result<u32> {
        let Needs { workers, outstanding, snapshots, .. } = needs;
        if workers == 0 {
            return Err(Error::usage("an arena needs at least one worker"));
        }
        if workers > WORKERS_MAX || outstanding > TASKS_MAX {
            let limit = format!("the engine has room for {WORKERS_MAX} workers and {TASKS_MAX} batches in flight");
            return Err(too_many(workers, outstanding, limit));
        }
        Ok(ring_slots_for(outstanding, snapshots))
    }

    /// Returns the geometry of a file of `total` bytes, given the values in its header, or an error if the values are
    /// impossible.
    pub fn of_file(total: u64, workers: u32, ring_slots: u32, shared_queue: bool) -> Result<Self> {
        let possible = (1..=WORKERS_MAX).contains(&workers)
            && ring_slots.is_power_of_two()
            && (ring_slots_for(0, false)..=ring_slots_for(TASKS_MAX, true)).contains(&ring_slots);
        let geometry = possible.then(|| Self::lay_out(total, workers, ring_slots, shared_queue)).flatten();
        geometry.ok_or_else(|| {
            Error::corrupt(format!(
                "a file of {total} bytes has a header for {workers} workers and rings of {ring_slots} slots"
            ))
        })
    }

    /// Returns the number of regions: one for each worker, and one for the main process.
    pub fn regions(&self) -> u32 {
        self.workers + 1
    }

    /// Returns the number of batches for which one worker needs warm pages at the same time: the outstanding batches,
    /// the batch in progress, the batch that the user holds, and a spare.
    pub fn batches_in_flight(&self) -> u64 {
        u64::from(self.ring_slots / self.workers) + 3
    }

    /// Returns the index of the main process's region.
    pub fn main_region(&self) -> u32 {
        self.workers
    }

    /// Returns the number of words of the bitmap.
    pub fn bitmap_words(&self) -> u32 {
        self.workers.div_ceil(64)
    }

    /// Returns the offset of the bitmap.
    pub fn bitmap(&self) -> u64 {
        round_up(size_of::<Header>() as u64, 64)
    }

    /// Returns the number of slots of the shared queue; 0 if there is none.
    pub fn queue_slots(&self) -> u32 {
        if self.shared_queue { self.ring_slots } else { 0 }
    }

    /// Returns the offset of the [`QueueControl`].
    pub fn queue_control(&self) -> u64 {
        round_up(self.bitmap() + u64::from(self.bitmap_words()) * 8, 64)
    }

    /// Returns the offset of the shared queue's slots.
    pub fn queue(&self) -> u64 {
        let control = if self.shared_queue { size_of::<QueueControl>() as u64 } else { 0 };
        self.queue_control() + control
    }

    fn controls(&self) -> u64 {
        round_up(self.queue() + u64::from(self.queue_slots()) * size_of::<QueueSlot>() as u64, PAGE)
    }

    fn control_len(&self) -> u64 {
        round_up(size_of::<ControlPage>() as u64 + 2 * u64::from(self.ring_slots) * size_of::<RingSlot>() as u64, 128)
    }

    /// Returns the offset of a worker's [`ControlPage`].
    pub fn control(&self, worker: u32) -> u64 {
        self.controls() + u64::from(worker) * self.control_len()
    }

    /// Returns the offset of a worker's task slots.
    pub fn task_slots(&self, worker: u32) -> u64 {
        self.control(worker) + size_of::<ControlPage>() as u64
    }

    /// Returns the offset of a worker's result slots.
    pub fn result_slots(&self, worker: u32) -> u64 {
        self.task_slots(worker) + u64::from(self.ring_slots) * size_of::<RingSlot>() as u64
    }

    fn region_heads(&self) -> u64 {
        self.controls() + u64::from(self.workers) * self.control_len()
    }

    /// Returns the offset of a region's [`RegionHead`].
    pub fn region_head(&self, region: u32) -> u64 {
        self.region_heads() + u64::from(region) * size_of::<RegionHead>() as u64
    }

    fn tables(&self) -> u64 {
        round_up(self.region_head(self.regions()), PAGE)
    }

    /// Returns the offset of a region's block table.
    pub fn table(&self, region: u32) -> u64 {
        self.tables() + u64::from(region) * u64::from(self.table_len) * size_of::<BlockEntry>() as u64
    }

    fn traces(&self) -> u64 {
        round_up(self.table(self.regions()), PAGE)
    }

    /// Returns the offset of a worker's [`TraceHead`]. The first trace reserves the pages of the head and of the slots
    /// that follow it.
    pub fn trace_head(&self, worker: u32) -> u64 {
        let slots = u64::from(TRACE_SLOTS) * size_of::<RingSlot>() as u64;
        self.traces() + u64::from(worker) * (size_of::<TraceHead>() as u64 + slots)
    }

    /// Returns the offset of the slots of a worker's ring of trace events.
    pub fn trace_slots(&self, worker: u32) -> u64 {
        self.trace_head(worker) + size_of::<TraceHead>() as u64
    }

    fn data_start(&self) -> u64 {
        round_up(self.trace_head(self.workers), PAGE)
    }

    /// Returns the offset of a region's data.
    pub fn data(&self, region: u32) -> u64 {
        self.data_start() + u64::from(region) * self.region_len
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::super::{Header, QueueControl, QueueSlot};
    use super::*;

    #[test]
    fn parts_do_not_overlap_and_are_aligned() {
        let sizes = [(1, 2, false), (1, 2, true), (3, 6, true), (64, 128, false), (1024, 4096, true)];
        for ((workers, outstanding, shared_queue), snapshots) in
            sizes.into_iter().flat_map(|sizes| [(sizes, false), (sizes, true)])
        {
            let needs = Needs { workers, outstanding, shared_queue, snapshots };
            let g = Geometry::new(64 << 30, needs).unwrap();
            assert!(g.ring_slots >= if snapshots { 2 * outstanding + 8 } else { outstanding + 4 });
            assert!(size_of::<Header>() as u64 <= g.bitmap());
            assert!(g.bitmap() + u64::from(g.bitmap_words()) * 8 <= g.queue_control());
            assert_eq!((g.queue_control() % 64, g.queue() % 64), (0, 0));
            let (control, slots) = (g.queue() - g.queue_control(), u64::from(g.queue_slots()));
            assert_eq!((control > 0, slots > 0), (shared_queue, shared_queue));
            assert!(!shared_queue || control >= size_of::<QueueControl>() as u64 && slots > u64::from(outstanding));
            assert!(g.queue() + slots * size_of::<QueueSlot>() as u64 <= g.control(0));
            assert_eq!(g.control(0) % 128, 0);
            assert_eq!(g.task_slots(0) % 64, 0);
            assert!(g.result_slots(0) + u64::from(g.ring_slots) * 64 <= g.control(1));
            assert_eq!(g.region_head(0) % 64, 0);
            assert!(g.region_head(g.regions()) <= g.table(0));
            assert!(g.table(g.regions()) <= g.trace_head(0));
            assert!(g.trace_slots(0) + u64::from(TRACE_SLOTS) * 64 <= g.trace_head(1));
            assert_eq!(g.trace_head(1) % 64, 0);
            assert!(g.trace_head(workers) <= g.data(0));
            assert_eq!(g.data(0) % PAGE, 0);
            assert!(g.data(g.regions()) <= g.total);
        }
    }

    #[test]
    fn regions_of_a_requested_size_are_at_most_slightly_smaller() {
        let sizes = [REGION_MIN, 5 << 20, (16 << 20) + PAGE, 1 << 30, (32 << 30) + 7 * PAGE, 500 << 30];
        for (wanted, (workers, shared_queue)) in
            sizes.into_iter().flat_map(|size| [(size, (1, false)), (size, (3, true))])
        {
            let needs = Needs { workers, outstanding: 6, shared_queue, snapshots: true };
            let geometry = Geometry::new(Geometry::total_for(wanted, needs).unwrap() / PAGE * PAGE, needs).unwrap();
            assert!(
                geometry.region_len <= wanted && geometry.region_len >= wanted - wanted / 1000,
                "{wanted} {geometry:?}"
            );
        }
    }

    #[test]
    fn a_file_has_the_geometry_that_it_was_made_with() {
        for (workers, outstanding) in [(1, 0), (1, 2), (3, 6), (64, 128), (2, TASKS_MAX)] {
            for (shared_queue, snapshots) in [(false, false), (true, false), (false, true), (true, true)] {
                let needs = Needs { workers, outstanding, shared_queue, snapshots };
                let geometry = Geometry::new(64 << 30, needs).unwrap();
                let read = Geometry::of_file(geometry.total, workers, geometry.ring_slots, shared_queue);
                assert_eq!(read.unwrap(), geometry);
            }
        }
        for (workers, ring_slots) in [(0, 8), (WORKERS_MAX + 1, 8), (2, 0), (2, 2), (2, 12), (2, 1 << 27)] {
            assert!(matches!(Geometry::of_file(64 << 30, workers, ring_slots, false), Err(Error::Corrupt { .. })));
        }
        assert!(matches!(Geometry::of_file(1 << 20, 2, 8, true), Err(Error::Corrupt { .. })));
    }

    #[test]
    fn an_arena_that_is_too_small_is_an_error() {
        let needs = |workers, outstanding| Needs { workers, outstanding, shared_queue: false, snapshots: false };
        let refused = |total, workers, outstanding| Geometry::new(total, needs(workers, outstanding)).unwrap_err();
        assert!(matches!(refused(1 << 30, 0, 8), Error::Usage { .. }));
        for (total, workers, outstanding) in [(1 << 20, 4, 8), (1 << 40, 2, 1 << 25), (1 << 40, 1 << 17, 1 << 18)] {
            let text = refused(total, workers, outstanding).to_string();
            let names = format!("num_workers={workers} with prefetch_factor={} is", outstanding / workers);
            assert!(text.starts_with(&names), "{text}");
        }
        assert!(Geometry::new(1 << 30, needs(16, 64)).is_ok());
    }
}
