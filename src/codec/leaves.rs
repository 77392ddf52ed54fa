//! The sink of a worker's encoder and the source of the main process's decoder: leaves in shared memory.

use super::{Hold, Sink, Source};
use crate::engine::completions::Leaves;
use crate::error::{Error, Result};
use crate::shm::alloc::retry_while_reserved;
use crate::shm::lease::Lease;
use crate::wire::{Leaf, ResultKind, Timings};
use crate::worker::port::{Keep, Port};

/// The blocks of an unsent message. Dropping it releases them.
#[derive(Debug)]
pub struct Outgoing<'a> {
    port: &'a Port,
    leaves: Vec<(Leaf, Keep)>,
    /// True if arrays may be adopted. If any are, the batch must be dropped before [`Outgoing::settle`].
    takes_arrays: bool,
}

impl<'a> Outgoing<'a> {
    pub fn new(port: &'a Port, takes_arrays: bool) -> Self {
        Self { port, leaves: Vec::new(), takes_arrays }
    }

    /// Returns true if arrays of the worker were adopted: the caller must then drop the batch, and call
    /// [`Outgoing::settle`]. In that case, also transfers all other adopted blocks to the message, because dropping the
    /// batch may release them.
    pub fn begin_settling(&mut self) -> bool {
        if !self.leaves.iter().any(|(_, keep)| matches!(keep, Keep::Unknown { .. })) {
            return false;
        }
        for (leaf, keep) in self.leaves.iter_mut().filter(|(_, keep)| *keep == Keep::Yes) {
            self.port.transfer_early(leaf.block);
            *keep = Keep::TransferredEarly;
        }
        true
    }

    /// Takes over the blocks of those adopted arrays that were freed with the batch. Copies the arrays that are still
    /// alive to new blocks with `copy(source, target, bytes)`.
    pub fn settle(&mut self, copy: impl Fn(*const u8, *mut u8, usize)) -> Result<()> {
        for at in 0..self.leaves.len() {
            let (leaf, Keep::Unknown { offset }) = self.leaves[at] else { continue };
            if self.port.is_freed(leaf.block) {
                self.port.take_freed(leaf.block);
                self.leaves[at].1 = Keep::Freed;
                continue;
            }
            let (block, target) = retry_while_reserved(|| self.port.allocate(leaf.len), std::thread::sleep)?;
            let source = self.port.arena().block_memory(self.port.worker(), leaf.block, leaf.len)?;
            let skip = offset as usize;
            copy(source.as_ptr().wrapping_add(skip), target.wrapping_add(skip), leaf.len as usize - skip);
            self.leaves[at] = (Leaf { block, len: leaf.len }, Keep::No);
            // Another thread may have freed the array during the copy.
            if self.port.take_freed(leaf.block) {
                self.port.release(leaf.block);
            }
        }
        Ok(())
    }

    /// Returns the size of all leaves in bytes.
    pub fn bytes(&self) -> u64 {
        self.leaves.iter().map(|(leaf, _)| leaf.len).sum()
    }

    /// Publishes the message. If that fails, the leaves are released.
    pub fn send(mut self, task: u64, kind: ResultKind, payload: &[u8], timings: Timings) -> Result<()> {
        self.port.send(task, kind, &self.leaves, payload, timings)?;
        self.leaves.clear();
        Ok(())
    }
}

// SAFETY: the message holds the reserved blocks until it is sent.
unsafe impl Sink for Outgoing<'_> {
    fn reserve(&mut self, len: usize) -> Result<(u32, *mut u8)> {
        // Sleep without releasing the GIL. The draft has recorded the addresses of tensors and arrays, and which of
        // them belong to the batch alone. If the GIL were released, another thread could resize a storage, which frees
        // its memory, or get a reference through `gc`. Large copies release the GIL and run the same risk, but for a
        // shorter time.
        self.port.await_return(len as u64, std::thread::sleep)?;
        let (block, memory) = retry_while_reserved(|| self.port.allocate(len as u64), std::thread::sleep)?;
        self.leaves.push((Leaf { block, len: len as u64 }, Keep::No));
        Ok((self.leaves.len() as u32 - 1, memory))
    }

    fn takes_arrays(&self) -> bool {
        self.takes_arrays
    }

    unsafe fn adopt(&mut self, ptr: *const u8, len: usize, hold: Hold) -> Option<(u32, u64)> {
        let (block, offset) = self.port.adoptable(ptr as usize, len as u64)?;
        if self.leaves.iter().any(|(leaf, _)| leaf.block == block) {
            return None;
        }
        let keep = match (self.port.has_array(block), hold) {
            (false, Hold::Shared) => Keep::Yes,
            (true, Hold::Sole) if self.port.note_array(block) => Keep::Unknown { offset },
            _ => return None,
        };
        self.leaves.push((Leaf { block, len: offset + len as u64 }, keep));
        Some((self.leaves.len() as u32 - 1, offset))
    }
}

impl Drop for Outgoing<'_> {
    fn drop(&mut self) {
        for (leaf, keep) in &self.leaves {
            let is_held = match keep {
                Keep::No | Keep::Freed => true,
                Keep::Yes => false,
                Keep::TransferredEarly => {
                    self.port.take_back(leaf.block);
                    false
                }
                Keep::Unknown { .. } => self.port.take_freed(leaf.block),
            };
            if is_held {
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::shm::arena::Arena;
    use crate::sys::event::EventFd;

    const LEN: usize = 100_000;

    #[test]
    fn a_message_that_cannot_be_settled_changes_nothing() {
        let doorbell = EventFd::new().unwrap().as_fd().try_clone_to_owned().unwrap();
        let port = Arc::new(Port::open(Arena::create_sized(64 << 20, 1, 8).unwrap(), 0, doorbell).unwrap());
        let array = port.allocate_array(LEN, true).unwrap().unwrap().as_ptr();
        let (tensor, memory) = port.allocate(LEN as u64).unwrap();
        let mut outgoing = Outgoing::new(&port, true);
        // SAFETY: the port holds the memory.
        let adopt = |outgoing: &mut Outgoing<'_>, memory, hold| unsafe { outgoing.adopt(memory, LEN, hold) };
        assert_eq!(adopt(&mut outgoing, memory, Hold::Shared), Some((0, 0)));
        assert!(!outgoing.begin_settling(), "the message has no array");
        assert_eq!(adopt(&mut outgoing, array, Hold::Sole), Some((1, 0)));
        assert!(outgoing.begin_settling());
        // The batch is dropped, and the worker keeps the array.
        port.release(tensor);
        let mut held = Vec::new();
        while let Ok((block, _)) = port.allocate(LEN as u64) {
            assert_ne!(block, tensor);
            held.push(block);
        }
        assert!(outgoing.settle(|_, _, _| panic!("there is no room for a copy")).is_err());
        drop(outgoing);
        assert_eq!(port.allocate(LEN as u64).unwrap(), (tensor, memory));
        assert_eq!(port.array_len(array), LEN);
        let mut second = Outgoing::new(&port, true);
        assert_eq!(adopt(&mut second, array, Hold::Sole), Some((0, 0)));
        assert!(second.begin_settling());
        // SAFETY: nothing reads the array any more.
        unsafe { port.free_array(array) };
        second.settle(|_, _, _| panic!("it was freed")).unwrap();
        drop(second);
        assert_eq!(port.allocate_array(LEN, false).unwrap().unwrap().as_ptr(), array);
    }
}
