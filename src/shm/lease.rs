//! Leases. Each is a hold on one block, owned by the tensors in that block.

use std::sync::Arc;

use super::arena::Arena;
use super::block::CONSUMER;
use crate::error::Result;

/// The consumer's hold on one block. Dropping it releases the block: on any thread, without a lock or the GIL, after
/// the loader and its workers are gone. In a forked child the drop does nothing.
#[derive(Debug)]
pub struct Lease {
    arena: Arc<Arena>,
    region: u32,
    block: u32,
    memory: *mut u8,
    len: usize,
}

// SAFETY: the memory is shared between processes anyway; the lease provides only a raw pointer, and its release uses
// atomics.
unsafe impl Send for Lease {}

impl Lease {
    /// Creates a lease on the first `len` bytes of a block that the consumer holds. Checks that the block has them.
    pub fn new(arena: &Arc<Arena>, region: u32, block: u32, len: u64) -> Result<Self> {
        let memory = arena.block_memory(region, block, len)?.as_ptr();
        arena.delivered(region, block)?;
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

    /// Returns true if there are no bytes.
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

/// Releases the consumer's hold on a block that was not delivered: a payload, or a leaf of a dropped batch.
pub fn let_go(arena: &Arena, region: u32, block: u32) {
    arena.release(region, block, CONSUMER);
}
