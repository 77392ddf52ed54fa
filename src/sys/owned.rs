//! Descriptors that belong to the process that opened them.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use super::fork::generation;
use super::identity::FdIdentity;

/// A descriptor that is not closed when a forked child drops it, because in the child its number may name another file
/// by then.
#[derive(Debug)]
pub struct HomeFd {
    fd: ManuallyDrop<OwnedFd>,
    /// The fork generation of the process that owns it.
    generation: u64,
}

impl HomeFd {
    /// Takes ownership for the calling process.
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
            // SAFETY: the descriptor is dropped only here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.fd) }
        }
    }
}

/// A [`HomeFd`] that knows the identity of its file. A program may close all descriptors of the process. The number may
/// then name another file, which must be neither read nor written.
#[derive(Debug)]
pub struct KnownFd {
    fd: HomeFd,
    /// `None` if unknown.
    identity: Option<FdIdentity>,
}

impl KnownFd {
    /// Takes ownership for the calling process.
    pub fn new(fd: OwnedFd) -> Self {
        let identity = FdIdentity::of(fd.as_raw_fd()).ok();
        Self { fd: HomeFd::new(fd), identity }
    }

    /// Returns true if the number is known to still name the same file, as far as [`FdIdentity`] can tell.
    pub fn is_intact(&self) -> bool {
        self.identity.is_some_and(|identity| identity.same_inode(self.fd.as_fd().as_raw_fd()))
    }

    /// Returns true if the number is known to name another file, or none.
    pub fn is_replaced(&self) -> bool {
        self.identity.is_some() && !self.is_intact()
    }
}

impl AsFd for KnownFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
