//! Messages that carry results and snapshots, and their publication.

use super::core::Port;
use super::ends::Ends;
use super::keep::Keep;
use crate::error::{Error, Result};
use crate::shm::alloc::retry_while_reserved;
use crate::shm::block::CONSUMER;
use crate::shm::doorbell;
use crate::shm::layout::StatusPage;
use crate::sync::{AtomicU64, Ordering, lock};
use crate::sys;
use crate::wire::{self, Leaf, Load, ResultEntry, ResultKind, Timings};

impl Port {
    /// Publishes a result with a message, and transfers the blocks of `leaves` to the consumer; see [`Keep`].
    pub fn send(
        &self,
        task: u64,
        kind: ResultKind,
        leaves: &[(Leaf, Keep)],
        payload: &[u8],
        timings: Timings,
    ) -> Result<()> {
        self.check_ours()?;
        let len = wire::message_len(leaves.len(), payload.len());
        let block = retry_while_reserved(|| self.allocate_message(len), std::thread::sleep)?;
        let load = load_of(len, leaves);
        self.note_size(load.bytes);
        let mut ends = lock(&self.ends);
        self.write_message(&mut ends.head, block, leaves, payload)?;
        if !leaves.is_empty() {
            self.transfer(leaves)?;
        }
        let checksum = if kind == ResultKind::Plain { 0 } else { wire::checksum(payload) };
        let entry = ResultEntry { task, kind, block: Some(block), len, checksum, timings, load };
        let StatusPage { sent, adopted, adopted_bytes, .. } = self.status();
        let add = |word: &AtomicU64, more| word.store(word.load(Ordering::Relaxed) + more, Ordering::Relaxed);
        add(sent, 1);
        for (leaf, _) in leaves.iter().filter(|(_, keep)| *keep != Keep::No) {
            add(adopted, 1);
            add(adopted_bytes, leaf.len);
        }
        self.publish(&mut ends, &entry)
    }

    /// Writes a message into its block, which belongs to this worker until the message is published. `head` is a
    /// reusable buffer.
    fn write_message(&self, head: &mut Vec<u8>, block: u32, leaves: &[(Leaf, Keep)], payload: &[u8]) -> Result<()> {
        let len = wire::message_len(leaves.len(), payload.len());
        let memory = self.arena.block_memory(self.worker, block, len)?.as_ptr();
        wire::message_head(leaves.iter().map(|(leaf, _)| leaf), head);
        // SAFETY: the block has `len` bytes, for the head and the payload; no other process uses it yet.
        unsafe {
            std::ptr::copy_nonoverlapping(head.as_ptr(), memory, head.len());
            std::ptr::copy_nonoverlapping(payload.as_ptr(), memory.add(head.len()), payload.len());
        }
        Ok(())
    }

    /// Publishes a snapshot that was made after `count` answers of this worker in this epoch. Call it before the next
    /// result is published. The first snapshot of an epoch has the count 0. The worker may send one snapshot with each
    /// result, one at the start and one at the end of the epoch, and one for an error: the ring has no room for more.
    /// Returns false if there is no memory for the snapshot: it is then omitted or, if it is the first one, published
    /// without a payload.
    pub fn send_snapshot(&self, count: u64, payload: &[u8], is_error: bool) -> Result<bool> {
        self.check_ours()?;
        let kind = if is_error { ResultKind::FailedSnapshot } else { ResultKind::Snapshot };
        let len = wire::message_len(0, payload.len());
        // The main process waits for the first snapshot, and should learn of an error: both may use the reserve.
        let block = match count == 0 || is_error {
            true => retry_while_reserved(|| self.allocate_message(len), std::thread::sleep),
            false => lock(&self.allocator).allocate(len, CONSUMER),
        };
        let block = match block {
            Ok(block) => Some(block),
            Err(Error::NoMemory { .. } | Error::RegionFull { .. } | Error::Os { .. }) => None,
            Err(error) => return Err(error),
        };
        if block.is_none() && count > 0 {
            return Ok(false);
        }
        let mut ends = lock(&self.ends);
        if let Some(block) = block {
            self.write_message(&mut ends.head, block, &[], payload)?;
        }
        let (checksum, timings, load) = (wire::checksum(payload), Timings::default(), Load::default());
        let entry = ResultEntry { task: count, kind, block, len, checksum, timings, load };
        self.push(&mut ends, &entry)?;
        if let Some(remote) = &self.remote {
            remote.leave_to_thread(len);
        }
        // The main process waits only for the first snapshot. A result follows each of the other snapshots.
        if count == 0 {
            self.ring();
        }
        Ok(block.is_some())
    }

    /// Publishes a result without a message.
    pub fn answer(&self, task: u64, kind: ResultKind) -> Result<()> {
        self.check_ours()?;
        let (timings, load) = (Timings::default(), Load::default());
        let entry = ResultEntry { task, kind, block: None, len: 0, checksum: 0, timings, load };
        self.publish(&mut lock(&self.ends), &entry)
    }

    fn publish(&self, ends: &mut Ends, entry: &ResultEntry) -> Result<()> {
        sys::moment::task_done();
        self.record_published(entry.task);
        let count = || {
            let done = &self.status().tasks_done;
            done.store(done.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        };
        let Some(remote) = &self.remote else {
            self.push(ends, entry)?;
            self.ring();
            // Count last, so that a reader of the count finds the result published.
            count();
            return Ok(());
        };
        // The counters that are sent with the result must already include the result.
        count();
        self.push(ends, entry)?;
        if !remote.send_now(entry.load.bytes) {
            self.ring();
        }
        Ok(())
    }

    #[inline]
    fn push(&self, ends: &mut Ends, entry: &ResultEntry) -> Result<()> {
        let full = || Error::corrupt("a completion ring is full, but it must have room for the results of all tasks");
        ends.results.push(&entry.to_words()).map_err(|_| full())?;
        doorbell::mark(self.arena.bitmap(), self.worker);
        Ok(())
    }

    /// Wakes the main process if it sleeps.
    #[inline]
    fn ring(&self) {
        if self.arena.header().doorbell.0.must_ring() {
            let _ = self.doorbell.ring();
        }
    }
}

/// Returns the load of a message of `len` bytes. Leaves with [`Keep::No`] are copies.
fn load_of(len: u64, leaves: &[(Leaf, Keep)]) -> Load {
    let mut load = Load { bytes: len, ..Load::default() };
    for (leaf, keep) in leaves {
        load.bytes += leaf.len;
        if *keep == Keep::No {
            load.copies += 1;
            load.copied_bytes += leaf.len;
        }
    }
    load
}
