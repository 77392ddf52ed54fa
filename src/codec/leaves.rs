//! Leaves in shared memory, on the worker's side and on the main process's.

use super::{Sink, Source};
use crate::engine::completions::Leaves;
use crate::error::{Error, Result};
use crate::shm::alloc::settle;
use crate::shm::lease::Lease;
use crate::wire::{Leaf, ResultKind, Timings};
use crate::worker::port::{Keep, Port};

/// The blocks of an unsent message. Dropping releases them.
#[derive(Debug)]
pub struct Outgoing<'a> {
    port: &'a Port,
    leaves: Vec<(Leaf, Keep)>,
}

impl<'a> Outgoing<'a> {
    pub fn new(port: &'a Port) -> Self {
        Self { port, leaves: Vec::new() }
    }

    /// The size of all leaves.
    pub fn bytes(&self) -> u64 {
        self.leaves.iter().map(|(leaf, _)| leaf.len).sum()
    }

    /// Publishes the message; an error releases the leaves.
    pub fn send(mut self, task: u64, kind: ResultKind, payload: &[u8], timings: Timings) -> Result<()> {
        self.port.send(task, kind, &self.leaves, payload, timings)?;
        self.leaves.clear();
        Ok(())
    }
}

impl Sink for Outgoing<'_> {
    fn reserve(&mut self, len: usize) -> Result<(u32, *mut u8)> {
        // Sleeps with the GIL: the batch must not change while it is encoded.
        let (block, memory) = settle(|| self.port.allocate(len as u64), std::thread::sleep)?;
        self.leaves.push((Leaf { block, len: len as u64 }, Keep::No));
        Ok((self.leaves.len() as u32 - 1, memory))
    }

    fn adopt(&mut self, ptr: *const u8, len: usize) -> Option<(u32, u64)> {
        let (block, offset) = self.port.adoptable(ptr as usize, len as u64)?;
        if self.leaves.iter().any(|(leaf, _)| leaf.block == block) {
            return None;
        }
        self.leaves.push((Leaf { block, len: offset + len as u64 }, Keep::Yes));
        Some((self.leaves.len() as u32 - 1, offset))
    }
}

impl Drop for Outgoing<'_> {
    fn drop(&mut self) {
        for (leaf, keep) in &self.leaves {
            if *keep == Keep::No {
                self.port.release(leaf.block);
            }
        }
    }
}

impl Source for Leaves {
    type Memory = Lease;

    fn leaf(&mut self, index: u32) -> std::result::Result<Lease, Error> {
        self.take(index as usize)
    }
}
