//! The port's use of the worker's region: blocks, their holders, idle pages and the reserve.

use std::time::Duration;

use super::core::Port;
use super::keep::Keep;
use crate::config::{AHEAD, IDLE_SLICE, LARGE, POOL_IDLE, RECENT_BATCHES, RETURN_WAIT, SMALL_MESSAGE};
use crate::error::{Error, Result};
use crate::shm::block::{CONSUMER, WORKER, mark_if, release_owned};
use crate::sync::{Ordering, lock};
use crate::sys;
use crate::wire::Leaf;

impl Port {
    /// Releases idle pages of an idle worker: those that the outstanding tasks do not need, or all of them if the
    /// worker has been idle for a long time or is ahead of the program's loop. A worker that is ahead has time to get
    /// fresh pages before the loop needs its next batch.
    pub(super) fn trim(&self) -> Result<()> {
        let (idle, long) = (self.idle(), self.status().long_idle());
        let mut allocator = lock(&self.allocator);
        if idle >= POOL_IDLE || idle >= long && allocator.is_ahead() {
            allocator.trim(0)
        } else if idle >= IDLE_SLICE {
            allocator.trim(self.arena.budget(self.worker))
        } else {
            Ok(())
        }
    }

    /// Waits briefly, before a large block is allocated, for the program's loop to release a block that fits, because
    /// its pages are warm. Calls `pause` to sleep.
    pub fn await_return(&self, len: u64, pause: impl Fn(Duration)) -> Result<()> {
        if len < LARGE || !self.arena.is_ours() {
            return Ok(());
        }
        let limit = RETURN_WAIT.saturating_mul(u32::try_from(len / LARGE).unwrap_or(u32::MAX));
        let start = sys::clock::monotonic();
        loop {
            let mut allocator = lock(&self.allocator);
            // A worker that is ahead of the loop can wait longer. Otherwise it would take fresh pages while an idle
            // worker may be releasing its own.
            let limit = if allocator.is_ahead() { (limit.saturating_mul(4)).min(AHEAD) } else { limit };
            if !allocator.awaits(len)? {
                self.last_wait_expired.store(false, Ordering::Relaxed);
                return Ok(());
            }
            if self.last_wait_expired.load(Ordering::Relaxed) {
                return Ok(());
            }
            if sys::clock::monotonic() - start >= limit {
                self.last_wait_expired.store(true, Ordering::Relaxed);
                return Ok(());
            }
            drop(allocator);
            pause(RETURN_WAIT);
        }
    }

    /// Allocates a block of `len` bytes, which this worker holds. Does not wait; see
    /// [`crate::shm::alloc::retry_while_reserved`].
    pub fn allocate(&self, len: u64) -> Result<(u32, *mut u8)> {
        self.check_ours()?;
        let id = lock(&self.allocator).allocate(len, WORKER)?;
        Ok((id, self.arena.block_memory(self.worker, id, len)?.as_ptr()))
    }

    /// Releases this worker's hold on a block. Does nothing in a child of the worker.
    pub fn release(&self, block: u32) {
        if self.arena.is_ours() {
            lock(&self.allocator).release(block);
        }
    }

    /// Returns the block that contains the `len` bytes at `address`, and their offset in it, if a message can adopt the
    /// block. The bytes must fill at least half of the block, and only this worker may hold the block. A block that has
    /// been sent before is not adopted, because the consumer may still hold it, or may have written to it.
    pub fn adoptable(&self, address: usize, len: u64) -> Option<(u32, u64)> {
        // In a child of the worker, a thread that does not exist there may hold the lock.
        if !self.arena.is_ours() {
            return None;
        }
        let allocator = lock(&self.allocator);
        let (block, offset) = allocator.find(address)?;
        let entry = &self.arena.table(self.worker)[block as usize];
        let warm = entry.warm.load(Ordering::Relaxed);
        let fills = offset + len <= warm && len >= warm / 2;
        (fills && entry.state.load(Ordering::Relaxed) == WORKER && !allocator.was_sent(block))
            .then_some((block, offset))
    }

    /// Makes the consumer a holder of a block that an unpublished message includes, so that the worker's object in the
    /// block may be dropped.
    pub fn transfer_early(&self, block: u32) {
        let state = &self.arena.table(self.worker)[block as usize].state;
        if self.arena.is_ours() && mark_if(state, WORKER, CONSUMER) {
            lock(&self.allocator).note_sent(block);
        }
    }

    /// Undoes [`Port::transfer_early`], if the message is not published.
    pub fn take_back(&self, block: u32) {
        if self.arena.is_ours() {
            self.arena.release(self.worker, block, CONSUMER);
        }
    }

    /// Transfers the blocks of `leaves` to the consumer.
    pub(super) fn transfer(&self, leaves: &[(Leaf, Keep)]) -> Result<()> {
        let table = self.arena.table(self.worker);
        let mut allocator = lock(&self.allocator);
        for (leaf, keep) in leaves {
            let state = &table[leaf.block as usize].state;
            match keep {
                Keep::No => state.store(CONSUMER, Ordering::Relaxed),
                Keep::Yes | Keep::Freed => {
                    mark_if(state, WORKER, CONSUMER);
                    match keep {
                        Keep::Yes => allocator.note_sent(leaf.block),
                        // The consumer holds the block now, so this cannot free it.
                        _ => {
                            release_owned(state, WORKER);
                        }
                    }
                }
                Keep::TransferredEarly => {}
                Keep::Unknown { .. } => return Err(Error::usage("a message includes an array that may still change")),
            }
        }
        Ok(())
    }

    /// Returns the number of bytes of the largest recent batch.
    pub(in crate::worker) fn largest_batch(&self) -> u64 {
        let [current, previous] = [0, 1].map(|half: usize| self.largest[half].load(Ordering::Relaxed));
        current.max(previous)
    }

    /// Notes the size of a batch, and updates the size of the largest recent batch on the status page.
    pub(super) fn note_size(&self, bytes: u64) {
        let status = self.status();
        let [mut current, mut previous] = [0, 1].map(|half: usize| self.largest[half].load(Ordering::Relaxed));
        if status.tasks_done.load(Ordering::Relaxed).is_multiple_of(RECENT_BATCHES) {
            (current, previous) = (0, current);
            self.largest[1].store(previous, Ordering::Relaxed);
        }
        current = current.max(bytes);
        self.largest[0].store(current, Ordering::Relaxed);
        status.largest.store(current.max(previous), Ordering::Relaxed);
    }

    /// Allocates the block of a message. If there is no memory, a small message, such as the report of that error, uses
    /// the reserve; a later call refills it.
    pub(super) fn allocate_message(&self, len: u64) -> Result<u32> {
        let allocator = &mut *lock(&self.allocator);
        let mut reserve = lock(&self.reserve);
        allocator.count_batch(sys::clock::monotonic)?;
        if len <= SMALL_MESSAGE {
            allocator.trust(SMALL_MESSAGE);
        }
        let block = allocator.allocate(len, CONSUMER);
        match (&block, *reserve) {
            (Err(_), Some(kept)) if len <= SMALL_MESSAGE => {
                *reserve = None;
                allocator.release(kept);
                return allocator.allocate(SMALL_MESSAGE, CONSUMER);
            }
            (Ok(_), None) => *reserve = allocator.allocate(SMALL_MESSAGE, WORKER).ok(),
            _ => {}
        }
        block
    }
}
