//! Memory that delivered objects lie in.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// Memory that a delivered tensor or array lies in. Dropping it gives it back, which must work on any thread
/// and without the GIL.
pub trait Lease: Send + 'static {
    /// Where the bytes lie; they stay there as long as the lease lives. Not null, even for no bytes.
    fn ptr(&self) -> *mut u8;

    /// Number of bytes.
    fn len(&self) -> usize;
}

/// Ordinary memory, aligned to 64 bytes, as torch's own is.
pub struct Heap {
    memory: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory belongs to the value alone.
unsafe impl Send for Heap {}

impl Heap {
    const ALIGN: usize = 64;

    fn layout(len: usize) -> Layout {
        // A length above isize::MAX is refused by `new`, so this cannot fail.
        Layout::from_size_align(len.max(1), Self::ALIGN).unwrap_or(Layout::new::<[u8; 64]>())
    }

    /// `len` bytes of whatever was there before.
    pub fn new(len: usize) -> Self {
        assert!(len <= isize::MAX as usize - Self::ALIGN, "a tensor larger than the address space");
        let layout = Self::layout(len);
        // SAFETY: the layout is not of size 0.
        let memory = unsafe { alloc(layout) };
        let Some(memory) = NonNull::new(memory) else { handle_alloc_error(layout) };
        Self { memory, len }
    }
}

impl Lease for Heap {
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
