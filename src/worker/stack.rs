//! The worker's offer to dump its stack on a signal from the main process.

use std::os::fd::{AsRawFd, IntoRawFd};
use std::sync::atomic::{AtomicU64, AtomicUsize};

use crate::config::HANDLER_CHECK_NS;
use crate::shm::layout::{StackFile, StatusPage};
use crate::sync::Ordering;
use crate::sys;

#[derive(Debug, Default)]
pub(super) struct StackOffer {
    /// Address of the handler that dumps the stack; 0 without one.
    handler: AtomicUsize,
    /// Time of the last check that the handler is still installed, in monotonic nanoseconds.
    checked: AtomicU64,
}

impl StackOffer {
    /// Creates the file for stack dumps, and returns its descriptor. Returns `None` if the file cannot be created or
    /// the signal is in use; the status page then shows the reason. The worker never closes the descriptor, because the
    /// program may already have closed it and reused its number.
    pub fn make_file(status: &StatusPage) -> Option<i32> {
        let handler = sys::signal::handler_of(sys::signal::stack_signal());
        if handler.is_some_and(|handler| handler != sys::signal::DEFAULT) {
            status.stack.store(StackFile::SignalTaken.to_u32(), Ordering::Relaxed);
            return None;
        }
        let memfd = handler.and_then(|_| sys::memfd::create("rustloader-stack", 0).ok());
        let identity = memfd.as_ref().and_then(|file| sys::identity::FdIdentity::of(file.as_raw_fd()).ok());
        let (Some(file), Some(identity)) = (memfd, identity) else {
            status.stack.store(StackFile::Refused.to_u32(), Ordering::Relaxed);
            return None;
        };
        let (device, inode) = identity.place();
        status.stack_device.store(device, Ordering::Relaxed);
        status.stack_inode.store(inode, Ordering::Relaxed);
        Some(file.into_raw_fd())
    }

    /// Offers stack dumps, which the installed handler writes to the file `fd`. If there is no handler, `fd` is `None`,
    /// and the status page says that dumps are refused.
    pub fn offer(&self, status: &StatusPage, fd: Option<i32>) {
        let handler = sys::signal::handler_of(sys::signal::stack_signal()).unwrap_or(0);
        self.handler.store(if fd.is_some() { handler } else { 0 }, Ordering::Relaxed);
        let file = fd.map_or(StackFile::Refused, StackFile::Descriptor);
        // SYNC: stack-file
        status.stack.store(file.to_u32(), Ordering::Release);
    }

    /// Withdraws the offer if another handler is installed now, because the signal would run that handler. Checks at
    /// most once per [`HANDLER_CHECK_NS`].
    pub fn check_handler(&self, status: &StatusPage, now: u64) {
        let installed = self.handler.load(Ordering::Relaxed);
        if installed == 0 || now - self.checked.load(Ordering::Relaxed) < HANDLER_CHECK_NS {
            return;
        }
        self.checked.store(now, Ordering::Relaxed);
        if sys::signal::handler_of(sys::signal::stack_signal()) != Some(installed) {
            self.handler.store(0, Ordering::Relaxed);
            status.stack.store(StackFile::SignalTaken.to_u32(), Ordering::Relaxed);
        }
    }
}
