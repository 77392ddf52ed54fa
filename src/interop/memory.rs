//! Types of memory over which tensors and arrays are created.

use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;

use crate::error::Error;
use crate::shm::lease::Lease;
use crate::worker::kept::WorkerLease;

/// The memory of a tensor or array. Dropping the value releases the memory, on any thread and without the GIL.
///
/// # Safety
/// While the value lives, `ptr` returns the same address, and `len` bytes from there on can be read and written.
pub unsafe trait Memory: Send + 'static {
    /// Returns the address. It is not null, even if the length is 0.
    fn ptr(&self) -> *mut u8;
    /// Returns the number of bytes.
    fn len(&self) -> usize;
}

/// Ordinary memory, aligned to 64 bytes as torch's memory is.
#[derive(Debug)]
pub struct Heap {
    memory: NonNull<u8>,
    len: usize,
}

// SAFETY: only this value owns the memory.
unsafe impl Send for Heap {}

impl Heap {
    const ALIGN: usize = 64;

    fn layout(len: usize) -> Layout {
        // This cannot fail, because `new` refuses lengths that are too large.
        Layout::from_size_align(len.max(1), Self::ALIGN).unwrap_or(Layout::new::<[u8; 64]>())
    }

    /// Allocates `len` uninitialized bytes. Fails with [`Error::NoHeap`] if the system refuses them.
    pub fn new(len: usize) -> Result<Self, Error> {
        let refused = || Error::NoHeap { wanted: len as u64 };
        if len > isize::MAX as usize - Self::ALIGN {
            return Err(refused());
        }
        // SAFETY: the size of the layout is not 0.
        let memory = NonNull::new(unsafe { alloc(Self::layout(len)) }).ok_or_else(refused)?;
        Ok(Self { memory, len })
    }
}

// SAFETY: `new` allocates `len` bytes, and `drop` frees them.
unsafe impl Memory for Heap {
    fn ptr(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with the same layout.
        unsafe { dealloc(self.memory.as_ptr(), Self::layout(self.len)) }
    }
}

// SAFETY: a lease holds a block of `len` bytes.
unsafe impl Memory for Lease {
    fn ptr(&self) -> *mut u8 {
        Lease::ptr(self)
    }

    fn len(&self) -> usize {
        Lease::len(self)
    }
}

// SAFETY: the worker holds a block of `len` bytes until the lease is dropped.
unsafe impl Memory for WorkerLease {
    fn ptr(&self) -> *mut u8 {
        self.ptr
    }

    fn len(&self) -> usize {
        self.len
    }
}
