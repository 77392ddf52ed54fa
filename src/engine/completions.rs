//! The consumer's ends of the completion rings, the bitmap of non-empty rings, and the results' messages.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::metrics::{Count, Meter};
use crate::shm::arena::{Arena, ArenaRing};
use crate::shm::doorbell;
use crate::shm::lease::{Lease, let_go};
use crate::shm::ring::Consumer;
use crate::sync::Ordering;
use crate::wire::{self, Leaf, ResultEntry, ResultKind};

/// A result whose message has not been opened.
#[derive(Clone, Copy, Debug)]
pub struct Incoming {
    /// The worker that sent the result.
    pub worker: u32,
    /// The result's entry in the ring.
    pub entry: ResultEntry,
}

/// A result, with the batch if it has already been prepared.
#[derive(Debug)]
pub struct Arrival<B> {
    /// The result.
    pub incoming: Incoming,
    /// The prepared batch; `None` if the message has not been opened.
    pub ready: Option<B>,
}

impl Incoming {
    /// Returns true for a batch.
    pub fn is_batch(&self) -> bool {
        matches!(self.entry.kind, ResultKind::Plain | ResultKind::Pickle | ResultKind::Tied)
    }

    /// Returns true for a batch, or an error in place of one.
    pub fn answers(&self) -> bool {
        self.is_batch() || self.entry.kind == ResultKind::Error
    }

    /// Adds a batch to the counters of bytes, copies and pickled batches. Ignores other results.
    #[inline]
    pub fn count(&self, meter: &Meter) {
        let load = &self.entry.load;
        if self.is_batch() {
            meter.add(Count::Bytes, load.bytes);
            if load.copies > 0 {
                meter.add(Count::Copies, u64::from(load.copies));
                meter.add(Count::CopiedBytes, load.copied_bytes);
            }
            if self.entry.kind != ResultKind::Plain {
                meter.add(Count::Pickled, 1);
            }
        }
    }
}

/// The consumer's ends of an iterator's completion rings, owned by one thread at a time.
#[derive(Debug)]
pub struct Completions {
    rings: Vec<Consumer<ArenaRing>>,
    /// Index of the current word of the bitmap.
    word: usize,
    /// The marks taken from that word for rings that are not drained yet.
    marks: u64,
}

impl Completions {
    /// Returns the consumer's ends of an arena's completion rings.
    pub fn new(arena: &Arc<Arena>) -> Self {
        let workers = arena.geometry().workers;
        let rings = (0..workers).map(|worker| Consumer::new(arena.result_ring(worker))).collect();
        Self { rings, word: 0, marks: 0 }
    }

    /// Returns true if any ring is marked as non-empty.
    pub fn marked(&self, arena: &Arena) -> bool {
        self.marks != 0 || arena.bitmap().iter().any(|word| word.load(Ordering::Relaxed) != 0)
    }

    /// Takes the next result from any marked ring, and returns it with its worker. Returns `None` if all marked rings
    /// are empty.
    #[inline]
    pub fn next(&mut self, arena: &Arena) -> Result<Option<(u32, Incoming)>> {
        let bitmap = arena.bitmap();
        let mut words_checked = 0;
        loop {
            while self.marks != 0 {
                let worker = self.word as u32 * 64 + self.marks.trailing_zeros();
                if worker as usize >= self.rings.len() {
                    self.marks = 0;
                    break;
                }
                if let Some(incoming) = self.pop(worker)? {
                    return Ok(Some((worker, incoming)));
                }
                self.marks &= self.marks - 1;
            }
            if words_checked > bitmap.len() {
                return Ok(None);
            }
            words_checked += 1;
            self.word = (self.word + 1) % bitmap.len();
            self.marks = doorbell::take(&bitmap[self.word]);
        }
    }

    /// Takes the next result from a worker's ring, marked or not.
    #[inline]
    pub fn pop(&mut self, worker: u32) -> Result<Option<Incoming>> {
        let Some(words) = self.rings[worker as usize].pop()? else { return Ok(None) };
        Ok(Some(Incoming { worker, entry: ResultEntry::from_words(&words)? }))
    }
}

/// The message of a snapshot, which stays in shared memory. Dropping it releases its block.
#[derive(Debug)]
pub struct SnapshotMessage {
    arena: Arc<Arena>,
    incoming: Incoming,
}

impl SnapshotMessage {
    /// Takes over the main process's hold on a snapshot's block. Returns `None` if the snapshot has no block.
    pub fn new(arena: &Arc<Arena>, incoming: Incoming) -> Option<Self> {
        incoming.entry.block.map(|_| Self { arena: arena.clone(), incoming })
    }

    /// Returns true for an error in place of a snapshot.
    pub fn is_error(&self) -> bool {
        self.incoming.entry.kind == ResultKind::FailedSnapshot
    }

    /// Returns the payload, copied out of shared memory. Fails with [`Error::Corrupt`] if it is not what was sent.
    pub fn read(&self) -> Result<Vec<u8>> {
        let Incoming { worker, entry: ResultEntry { block, len, checksum, .. } } = self.incoming;
        let block = block.ok_or_else(|| Error::corrupt("a snapshot has no message"))?;
        let mut bytes = Vec::new();
        self.arena.read_block(worker, block, len, &mut bytes)?;
        let (leaves, start) = wire::read_message(&bytes)?;
        if !leaves.is_empty() || wire::checksum(&bytes[start..]) != checksum {
            return Err(Error::corrupt(format!("a snapshot of worker {worker} differs from what was sent")));
        }
        bytes.drain(..start);
        Ok(bytes)
    }
}

impl Drop for SnapshotMessage {
    fn drop(&mut self) {
        if let Some(block) = self.incoming.entry.block {
            let_go(&self.arena, self.incoming.worker, block);
        }
    }
}

/// Releases the blocks of an unopened result.
pub fn discard(arena: &Arc<Arena>, incoming: &Incoming) {
    // Opening the message releases its block, and dropping it releases its leaves. The leaves of a damaged message stay
    // allocated.
    drop(Message::open(arena, incoming, Vec::new()));
}

/// An opened result: its payload, copied out of shared memory before validation, and its leaves.
#[derive(Debug)]
pub struct Message {
    bytes: Vec<u8>,
    start: usize,
    /// The leaves.
    pub leaves: Leaves,
}

/// The blocks of an opened result. Leaves that are not taken are released on drop.
#[derive(Debug)]
pub struct Leaves {
    arena: Arc<Arena>,
    worker: u32,
    rows: Vec<Option<Leaf>>,
}

impl Message {
    /// Opens a result: copies its message into `buffer`, releases the message's block, and validates the message.
    pub fn open(arena: &Arc<Arena>, incoming: &Incoming, mut buffer: Vec<u8>) -> Result<Self> {
        let ResultEntry { block, len, kind, checksum, .. } = incoming.entry;
        let worker = incoming.worker;
        let block = block.ok_or_else(|| Error::corrupt("a result has no message"))?;
        let copied = arena.read_block(worker, block, len, &mut buffer);
        let_go(arena, worker, block);
        copied?;
        let (rows, start) = wire::read_message(&buffer)?;
        let rows = rows.into_iter().map(Some).collect();
        let message = Self { bytes: buffer, start, leaves: Leaves { arena: arena.clone(), worker, rows } };
        if kind != ResultKind::Plain && wire::checksum(message.payload()) != checksum {
            return Err(Error::corrupt("the checksum of a pickled batch does not match"));
        }
        Ok(message)
    }

    /// Returns the payload.
    pub fn payload(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    /// Returns the payload and the leaves.
    pub fn parts(&mut self) -> (&[u8], &mut Leaves) {
        (&self.bytes[self.start..], &mut self.leaves)
    }

    /// Returns the buffer, for reuse.
    pub fn into_buffer(self) -> Vec<u8> {
        self.bytes
    }
}

impl Leaves {
    /// Returns the number of leaves.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns true if there are no leaves.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns a lease on a leaf. Fails with [`Error::Corrupt`] if there is no such leaf, or if it has already been
    /// taken.
    pub fn take(&mut self, index: usize) -> Result<Lease> {
        let leaf = self.rows.get_mut(index).and_then(Option::take);
        let leaf = leaf.ok_or_else(|| Error::corrupt(format!("leaf {index} of a message is missing")))?;
        Lease::new(&self.arena, self.worker, leaf.block, leaf.len)
    }
}

impl Drop for Leaves {
    fn drop(&mut self) {
        for leaf in self.rows.iter().flatten() {
            let_go(&self.arena, self.worker, leaf.block);
        }
    }
}
