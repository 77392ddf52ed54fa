//! Leases: one block each, held by whoever keeps the tensors that lie in it.

use std::sync::Arc;

use super::arena::Arena;
use super::block::CONSUMER;
use crate::error::Result;

/// The consumer's hold on one block. Dropping it gives the block back: on any thread, without a lock and
/// without the GIL, after the loader and its workers have gone, and as nothing at all in a forked child.
#[derive(Debug)]
pub struct Lease {
    arena: Arc<Arena>,
    region: u32,
    block: u32,
    memory: *mut u8,
    len: usize,
}

// SAFETY: the memory is shared between processes anyway; what the lease gives out is a raw pointer, and giving the block
// back is a matter of atomics.
unsafe impl Send for Lease {}

impl Lease {
    /// A lease on the first `len` bytes of a block that the consumer holds. The block's place is checked
    /// against the region.
    pub fn new(arena: &Arc<Arena>, region: u32, block: u32, len: u64) -> Result<Self> {
        let memory = arena.block_memory(region, block, len)?.as_ptr();
        arena.delivered(region, block)?;
        Ok(Self { arena: arena.clone(), region, block, memory, len: len as usize })
    }

    /// Where the bytes lie.
    pub fn ptr(&self) -> *mut u8 {
        self.memory
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a block of no bytes.
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

/// The consumer's hold on a block that has not been delivered: a payload, or a leaf of a batch that is dropped.
pub fn let_go(arena: &Arena, region: u32, block: u32) {
    arena.release(region, block, CONSUMER);
}
