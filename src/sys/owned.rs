//! Descriptors that belong to the process that got them.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::fork::generation;

/// A descriptor that a forked child forgets instead of closing it: by then its number may name a file of the child's.
#[derive(Debug)]
pub struct HomeFd {
    fd: ManuallyDrop<OwnedFd>,
    /// The fork generation of the process that owns it.
    generation: u64,
}

impl HomeFd {
    /// Takes a descriptor into the calling process's care.
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd: ManuallyDrop::new(fd), generation: generation() }
    }
}

impl AsFd for HomeFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for HomeFd {
    fn drop(&mut self) {
        if self.generation == generation() {
            // SAFETY: dropped here alone, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.fd) }
        }
    }
}
