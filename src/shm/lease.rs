//! Leases. A lease is the consumer's hold on one block, and is owned by the tensors in that block.

use std::sync::Arc;

use super::arena::Arena;
use super::block::CONSUMER;
use crate::error::Result;

/// The consumer's hold on one block. Dropping the lease releases the block. It may be dropped on any thread, without a
/// lock or the GIL, and even after the loader and its workers are gone. In a forked child, dropping it does nothing.
#[derive(Debug)]
pub struct Lease {
    arena: Arc<Arena>,
    region: u32,
    block: u32,
    memory: *mut u8,
    len: usize,
}

// SAFETY: the lease provides only a raw pointer to memory that processes share anyway, and dropping it uses atomics.
unsafe impl Send for Lease {}

impl Lease {
    /// Creates a lease on the first `len` bytes of a block. Returns [`Error::Corrupt`](crate::error::Error::Corrupt) if
    /// the block is smaller, is not held by the consumer, or already has a lease.
    pub fn new(arena: &Arc<Arena>, region: u32, block: u32, len: u64) -> Result<Self> {
        let memory = arena.block_memory(region, block, len)?.as_ptr();
        arena.mark_delivered(region, block)?;
        Ok(Self { arena: arena.clone(), region, block, memory, len: len as usize })
    }

    /// Returns the address of the first byte.
    pub fn ptr(&self) -> *mut u8 {
        self.memory
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the lease covers no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.arena.is_ours() {
            self.arena.release_delivered(self.region, self.block);
        }
    }
}

/// Releases the consumer's hold on a block that has no lease: a message, or a leaf of a batch that is dropped.
pub fn let_go(arena: &Arena, region: u32, block: u32) {
    arena.release(region, block, CONSUMER);
}
