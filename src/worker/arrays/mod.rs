//! Memory for the worker's own arrays, in its region. `interop::numpy_memory` gives it to NumPy.
//!
//! Such an array is sent in a batch without a copy if nothing in the worker can still change it. The proof has two
//! parts. While the batch exists, the encoder checks the references that lead to the array's memory: the containers
//! around it, the array and the arrays that it is a view of must have only one reference each, and no weak references.
//! So no finalizer that runs when the batch is dropped can reach the memory. Any other array is copied at once.
//!
//! Then the codec notes the block ([`Port::note_array`]), the worker drops the batch, and [`Port::take_freed`] reports
//! whether the memory was freed in between. If so, the block passes to the consumer. If not, because a view, buffer or
//! tensor still uses the memory, its bytes are copied.
//!
//! A child that the dataset forks has its own copy of ordinary memory. Blocks are shared memory, so the child replaces
//! the blocks of live arrays with private copies before the dataset's code continues in it. The worker's forking thread
//! waits until that is done.
//!
//! One lock covers the table; it is taken before the allocator's lock. A child takes neither.

pub(super) mod table;

use std::cell::RefCell;
use std::ptr::NonNull;
use std::sync::atomic::AtomicPtr;
use std::sync::{Arc, MutexGuard};

use self::table::{Array, Arrays};
use super::port::Port;
use crate::config::{ARRAYS_BATCHES, ARRAYS_FROM, PRIVATE_WAIT};
use crate::error::{Error, Result};
use crate::shm::alloc::retry_while_reserved;
use crate::shm::layout::PAGE;
use crate::sync::{Ordering, lock};
use crate::sys::fork::{ForkHandlers, Step, on_fork};
use crate::sys::private::{ForkGate, make_inaccessible, make_private};

/// The outcome of [`Port::resize_array`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resized {
    /// The array has the new size.
    InPlace,
    /// The array must move. It has this many bytes now.
    Move(usize),
}

impl Port {
    /// Returns the table; `None` in a child of the worker.
    fn arrays(&self) -> Option<MutexGuard<'_, Arrays>> {
        self.arena().is_ours().then(|| lock(&self.arrays))
    }

    /// Allocates memory for an array of `len` bytes, filled with zeros if `zeroed` is set. Returns `None` if the array
    /// must use ordinary memory: the arrays already fill their share of the region, the region has no room, or this is
    /// a child of the worker. Returns [`Error::NoMemory`] if the machine or the memory cgroup has no memory left: an
    /// allocation of ordinary memory would then invoke the OOM killer. Waits only while other workers have reserved too
    /// much memory.
    pub fn allocate_array(&self, len: usize, zeroed: bool) -> Result<Option<NonNull<u8>>> {
        let memory = match retry_while_reserved(|| self.new_array(len), std::thread::sleep) {
            Ok(memory) => memory,
            Err(error @ Error::NoMemory { .. }) => {
                *lock(&self.refused_array) = Some((self.task(), error.clone()));
                return Err(error);
            }
            Err(_) => None,
        };
        if let Some(memory) = memory.filter(|_| zeroed) {
            // SAFETY: a new block of at least `len` bytes, which nothing else uses.
            unsafe { memory.write_bytes(0, len) };
        }
        Ok(memory)
    }

    fn new_array(&self, len: usize) -> Result<Option<NonNull<u8>>> {
        let Some(mut arrays) = self.arrays() else { return Ok(None) };
        let limit = ARRAYS_FROM.max(ARRAYS_BATCHES.saturating_mul(self.largest_batch()));
        let bytes = arrays.bytes.checked_add(len as u64).filter(|&bytes| bytes <= limit && !arrays.ended);
        let Some(bytes) = bytes else { return Ok(None) };
        let block = lock(&self.allocator).allocate_array(len as u64)?;
        let memory = self.arena().block_memory(self.worker(), block, len as u64);
        if memory.is_err() {
            lock(&self.allocator).release(block);
        }
        let memory = memory?;
        arrays.live.insert(block, Array { len: len as u64, noted: false, freed: false });
        arrays.bytes = bytes;
        Ok(Some(memory))
    }

    /// Takes the error of the last refused array, and returns it if the current task needed that array.
    pub fn take_refusal(&self) -> Option<Error> {
        let (task, error) = self.arena().is_ours().then(|| lock(&self.refused_array).take())??;
        (task == self.task()).then_some(error)
    }

    /// Frees an array. Any thread may call it. Does nothing after the worker's end, in a child, and for memory that is no
    /// array.
    ///
    /// # Safety
    /// Nothing uses the array any more.
    pub unsafe fn free_array(&self, memory: *mut u8) {
        let Some(mut arrays) = self.arrays().filter(|arrays| !arrays.ended) else { return };
        let mut allocator = lock(&self.allocator);
        let Some((block, 0)) = allocator.find(memory as usize) else { return };
        match arrays.live.get_mut(&block) {
            Some(array) if array.noted => array.freed = true,
            Some(_) => {
                arrays.forget(block);
                allocator.release(block);
            }
            None => {}
        }
    }

    /// Returns the length in bytes of the array that begins at `memory`; 0 if there is none.
    pub fn array_len(&self, memory: *mut u8) -> usize {
        let Some(arrays) = self.arrays() else { return private_len(memory as usize) };
        let place = lock(&self.allocator).find(memory as usize);
        let array = place.and_then(|(block, offset)| arrays.live.get(&block).filter(|_| offset == 0));
        array.map_or(0, |array| array.len as usize)
    }

    /// Resizes an array to `len` bytes in place, if its block has room and `len` is at least half of the array's
    /// length.
    ///
    /// # Safety
    /// Nothing uses the bytes of the array from `len` on any more.
    pub unsafe fn resize_array(&self, memory: *mut u8, len: usize) -> Resized {
        let Some(mut arrays) = self.arrays() else { return Resized::Move(private_len(memory as usize)) };
        let mut allocator = lock(&self.allocator);
        let Some((block, 0)) = allocator.find(memory as usize) else { return Resized::Move(0) };
        let Arrays { live, bytes, ended } = &mut *arrays;
        let Some(array) = live.get_mut(&block) else { return Resized::Move(0) };
        let old = array.len;
        if *ended || array.noted || (len as u64) < old / 2 || allocator.extend(block, len as u64).is_err() {
            return Resized::Move(old as usize);
        }
        array.len = len as u64;
        *bytes = *bytes - old + len as u64;
        Resized::InPlace
    }

    /// Returns true if a block contains an array.
    pub fn has_array(&self, block: u32) -> bool {
        self.arrays().is_some_and(|arrays| arrays.live.contains_key(&block))
    }

    /// Notes that an unpublished message includes an array's block. Returns false if the block contains no array, or if
    /// another unpublished message already includes it.
    pub fn note_array(&self, block: u32) -> bool {
        let Some(mut arrays) = self.arrays() else { return false };
        let array = arrays.live.get_mut(&block).filter(|array| !array.noted);
        array.map(|array| array.noted = true).is_some()
    }

    /// Returns true if a noted array has been freed. The bytes in its memory are unchanged.
    pub fn is_freed(&self, block: u32) -> bool {
        self.arrays().is_some_and(|arrays| arrays.live.get(&block).is_some_and(|array| array.freed))
    }

    /// Undoes [`Port::note_array`]. Returns true if the array was freed: its block then belongs to the caller. Returns
    /// false if the array is still alive.
    pub fn take_freed(&self, block: u32) -> bool {
        let Some(mut arrays) = self.arrays() else { return false };
        let Some(array) = arrays.live.get_mut(&block) else { return false };
        array.noted = false;
        let freed = array.freed;
        if freed {
            arrays.forget(block);
        }
        freed
    }

    /// Prevents all further changes to arrays, because the worker has ended. The arrays' memory stays as it is.
    pub(super) fn end_arrays(&self) {
        if let Some(mut arrays) = self.arrays() {
            arrays.ended = true;
        }
    }
}

/// The ports of this process that give memory to arrays, the latest first. A port inherited in a fork belongs to the
/// parent.
static WATCHED: AtomicPtr<Watched> = AtomicPtr::new(std::ptr::null_mut());

struct Watched {
    port: Arc<Port>,
    next: Option<&'static Watched>,
}

/// The addresses and lengths of the arrays of which this process, a forked child, has private copies, whether it made
/// them or inherited them.
static PRIVATE: AtomicPtr<Vec<(usize, usize)>> = AtomicPtr::new(std::ptr::null_mut());

/// A fork in progress.
struct Forking {
    /// The addresses and lengths of the live arrays.
    arrays: Vec<(usize, usize)>,
    gate: Option<ForkGate>,
    /// While these are held, no array is created or freed.
    _locks: Vec<MutexGuard<'static, Arrays>>,
}

thread_local! {
    /// This thread's fork in progress.
    static FORKING: RefCell<Option<Forking>> = const { RefCell::new(None) };
}

/// Makes future children of this process copy a port's arrays to private memory. Call it before the first array is
/// allocated. The port is never freed afterwards.
pub fn watch(port: &Arc<Port>) -> Result<()> {
    static HANDLERS: ForkHandlers =
        ForkHandlers { prepare: before_fork, parent: after_fork_in_parent, child: after_fork_in_child };
    on_fork(Step::Arrays, &HANDLERS)?;
    let watched = Box::leak(Box::new(Watched { port: port.clone(), next: None }));
    // SYNC: arrays-watched (both ends): a thread that sees the pointer sees the port.
    let mut first = WATCHED.load(Ordering::Acquire);
    loop {
        // SAFETY: a published value is never freed.
        watched.next = unsafe { first.as_ref() };
        match WATCHED.compare_exchange(first, watched, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return Ok(()),
            Err(now) => first = now,
        }
    }
}

/// Returns the length in bytes of this child's private copy of the array at `address`; 0 if there is none.
fn private_len(address: usize) -> usize {
    // SYNC: arrays-private
    // SAFETY: a published value is never freed.
    let arrays = unsafe { PRIVATE.load(Ordering::Acquire).as_ref() };
    arrays.and_then(|arrays| arrays.iter().rev().find(|array| array.0 == address)).map_or(0, |array| array.1)
}

fn before_fork() {
    let (mut extents, mut locks) = (Vec::new(), Vec::new());
    // SYNC: arrays-watched
    // SAFETY: a published value is never freed.
    let mut next = unsafe { WATCHED.load(Ordering::Acquire).as_ref() };
    while let Some(Watched { port, next: following }) = next {
        next = *following;
        let Some(arrays) = port.arrays() else { continue };
        for (&block, array) in &arrays.live {
            if let Ok(memory) = port.arena().block_memory(port.worker(), block, array.len) {
                extents.push((memory.as_ptr() as usize, array.len as usize));
            }
        }
        locks.push(arrays);
    }
    let gate = if extents.is_empty() { None } else { ForkGate::new() };
    FORKING.set(Some(Forking { arrays: extents, gate, _locks: locks }));
}

fn after_fork_in_parent() {
    if let Some(Forking { gate: Some(gate), _locks, .. }) = FORKING.take() {
        gate.wait(PRIVATE_WAIT);
    }
}

fn after_fork_in_child() {
    let Some(Forking { arrays, gate, _locks }) = FORKING.take() else { return };
    // This thread took the locks in the parent, and a child must not release them.
    std::mem::forget(_locks);
    // Without a gate the parent does not wait, and might change an array while the child copies it. So the arrays
    // become inaccessible in the child.
    let protect = if gate.is_some() { make_private } else { make_inaccessible };
    for &(address, len) in &arrays {
        // SAFETY: a live array in a block of whole pages; this is the child's only thread.
        unsafe { protect(address as *mut u8, len.next_multiple_of(PAGE as usize)) };
    }
    drop(gate);
    // SYNC: arrays-private (both ends): a thread that sees the pointer sees the list.
    // SAFETY: a published value is never freed.
    let inherited = unsafe { PRIVATE.load(Ordering::Acquire).as_ref() };
    let all = inherited.into_iter().flatten().copied().chain(arrays).collect();
    PRIVATE.store(Box::into_raw(Box::<Vec<_>>::new(all)), Ordering::Release);
}

#[cfg(test)]
mod tests;
