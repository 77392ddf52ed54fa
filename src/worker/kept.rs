//! Blocks of a worker's region that the worker's own objects hold: collated batches, and the dataset's storages.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::port::Port;
use crate::config::{COLLECT_BATCHES, COLLECT_FROM, RETAINED_MAX};
use crate::error::{Error, Result};
use crate::shm::alloc::retry_while_reserved;

/// Accounting of the memory that the worker's objects hold.
#[derive(Debug, Default)]
pub struct Kept {
    /// Total bytes of the held blocks.
    bytes: AtomicU64,
    /// Bytes of the largest batch.
    largest: AtomicU64,
    /// Number of held bytes above which the garbage collector runs again.
    collect_at: AtomicU64,
}

impl Kept {
    /// Notes the size of a batch.
    pub fn note_batch(&self, bytes: u64) {
        self.largest.fetch_max(bytes, Ordering::Relaxed);
    }

    fn limit(&self) -> u64 {
        let limit = COLLECT_FROM.max(COLLECT_BATCHES * self.largest.load(Ordering::Relaxed));
        limit.max(self.collect_at.load(Ordering::Relaxed))
    }

    /// Returns true if `len` more bytes may be held. If that would exceed the limit, first calls `collect`, which runs
    /// the garbage collector.
    pub fn has_room(&self, len: u64, collect: impl FnOnce()) -> bool {
        let limit = self.limit();
        if self.bytes.load(Ordering::Relaxed) + len <= limit {
            return true;
        }
        collect();
        let wanted = self.bytes.load(Ordering::Relaxed) + len;
        self.collect_at.store(2 * wanted, Ordering::Relaxed);
        wanted <= RETAINED_MAX.max(limit)
    }
}

/// A worker's hold on a block of its region, for a tensor that it creates there.
#[derive(Debug)]
pub struct WorkerLease {
    port: Arc<Port>,
    kept: Arc<Kept>,
    block: u32,
    /// The address of the block's memory.
    pub ptr: *mut u8,
    /// Number of bytes.
    pub len: usize,
}

// SAFETY: `ptr`, the only field that is not `Send`, points into a shared mapping; dropping takes the allocator's lock.
unsafe impl Send for WorkerLease {}

impl WorkerLease {
    /// Allocates a block of `len` bytes. Calls `pause` to sleep. Returns `None` if the region is full, or in a child of
    /// the worker: the caller must then use the heap.
    ///
    /// Errors: [`Error::NoMemory`] if the machine or cgroup has no memory left. An allocation on the heap would then
    /// invoke the OOM killer.
    pub fn new(port: &Arc<Port>, kept: &Arc<Kept>, len: usize, pause: impl Fn(Duration)) -> Result<Option<Self>> {
        let returned = port.await_return(len as u64, &pause);
        let (block, ptr) = match returned.and_then(|()| retry_while_reserved(|| port.allocate(len as u64), pause)) {
            Ok(allocated) => allocated,
            Err(error @ Error::NoMemory { .. }) => return Err(error),
            Err(_) => return Ok(None),
        };
        kept.bytes.fetch_add(len as u64, Ordering::Relaxed);
        Ok(Some(Self { port: port.clone(), kept: kept.clone(), block, ptr, len }))
    }
}

impl Drop for WorkerLease {
    fn drop(&mut self) {
        self.kept.bytes.fetch_sub(self.len as u64, Ordering::Relaxed);
        self.port.release(self.block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holding(bytes: u64) -> Kept {
        Kept { bytes: AtomicU64::new(bytes), ..Kept::default() }
    }

    #[test]
    fn the_collector_runs_when_much_memory_is_held() {
        let never = || panic!("nothing to collect");
        assert!(holding(0).has_room(COLLECT_FROM, never));
        let large = holding(COLLECT_FROM);
        large.note_batch(COLLECT_FROM);
        assert!(large.has_room(COLLECT_BATCHES * COLLECT_FROM - COLLECT_FROM, never), "four batches");
        let mut collected = false;
        let kept = holding(COLLECT_FROM);
        assert!(kept.has_room(1, || {
            collected = true;
            kept.bytes.store(0, Ordering::Relaxed);
        }));
        assert!(collected);
        assert!(kept.has_room(1, never), "the garbage is gone");
    }

    #[test]
    fn a_worker_that_holds_too_much_gets_ordinary_memory() {
        let kept = holding(RETAINED_MAX);
        let mut calls = 0;
        assert!(!kept.has_room(1, || calls += 1));
        assert_eq!(calls, 1);
        assert!(kept.has_room(1, || calls += 1), "the collector runs again at twice this number of bytes");
        kept.bytes.store(2 * RETAINED_MAX + 2, Ordering::Relaxed);
        assert!(!kept.has_room(1, || calls += 1));
        assert_eq!(calls, 2);
    }
}
