//! Descriptors that a forked child closes at once, because a connection ends only when its last holder closes it.

use std::cell::RefCell;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::{Mutex, MutexGuard};

use super::fork::{ForkHandlers, Step, on_fork};
use super::identity::FdIdentity;
use crate::sync::lock;

type Open = Vec<(RawFd, FdIdentity)>;

static OPEN: Mutex<Open> = Mutex::new(Vec::new());

thread_local! {
    /// The lock of [`OPEN`], which a forking thread holds from before the fork until after it, so that the child can
    /// use its copy of the list.
    static HELD: RefCell<Option<MutexGuard<'static, Open>>> = const { RefCell::new(None) };
}

/// Makes the children of later forks close a descriptor, if fork hooks can be registered. Call [`forget`] before you
/// close the descriptor.
pub(super) fn leave_behind(fd: BorrowedFd<'_>) {
    static HANDLERS: ForkHandlers = ForkHandlers { prepare, parent, child };
    let _ = on_fork(Step::Connections, &HANDLERS);
    if let Ok(identity) = FdIdentity::of(fd.as_raw_fd()) {
        lock(&OPEN).push((fd.as_raw_fd(), identity));
    }
}

/// Undoes [`leave_behind`].
pub(super) fn forget(fd: BorrowedFd<'_>) {
    lock(&OPEN).retain(|(open, _)| *open != fd.as_raw_fd());
}

fn prepare() {
    // If this thread has already destroyed its thread-locals, the child keeps the descriptors open.
    let _ = HELD.try_with(|held| held.replace(Some(lock(&OPEN))));
}

fn parent() {
    let _ = HELD.try_with(RefCell::take);
}

fn child() {
    let Ok(Some(mut open)) = HELD.try_with(RefCell::take) else { return };
    for (fd, identity) in open.iter() {
        // The program may have closed the descriptor; its number may now name another file.
        if identity.same_inode(*fd) {
            // SAFETY: the descriptor is this child's copy, which nothing in the child uses.
            unsafe { libc::close(*fd) };
        }
    }
    open.clear();
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::super::socket::{Socket, Transfer};
    use crate::children::Child;

    #[test]
    fn a_child_does_not_keep_a_connection_open() {
        let (one, other) = UnixStream::pair().unwrap();
        let (one, other) = (Socket::new(one.into()), Socket::new(other.into()));
        let child = Child::sleeping();
        drop(one);
        let readiness = other.wait(true, false, None, Some(Duration::from_secs(30))).unwrap();
        let mut byte = 0;
        // SAFETY: `byte` is a local variable, and the second part is empty.
        let received = unsafe { other.receive((&raw mut byte, 1), (std::ptr::dangling_mut(), 0)) };
        child.kill();
        assert!(readiness.readable);
        assert_eq!(received.unwrap(), Transfer::End);
    }
}
