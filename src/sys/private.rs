//! Private copies of shared memory in a forked child, and a gate at which the parent waits for them.

use std::io::{PipeReader, PipeWriter};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::mm::{MapFlags, MprotectFlags, MremapFlags, ProtFlags};

use super::clock::timespec;
use super::failpoint::failpoint;
use super::retry_on_intr;

/// Replaces the `len` bytes from `start` on, which are whole pages, with a private copy: ordinary memory of this
/// process. If the system refuses, the pages become inaccessible, so that an access ends the process instead of
/// changing shared memory. Takes no lock.
///
/// # Safety
/// The range is mapped and readable, no other thread uses it, and no reference to it is used during the call.
pub unsafe fn make_private(start: *mut u8, len: usize) {
    let (any, protection) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: the kernel chooses a free address range.
    let call = || unsafe { rustix::mm::mmap_anonymous(any, len, protection, MapFlags::PRIVATE) };
    if let Ok(copy) = failpoint!("private", call()) {
        // SAFETY: both ranges have `len` bytes, the caller's is readable, and the copy's is new.
        unsafe { std::ptr::copy_nonoverlapping(start, copy.cast(), len) };
        let (flags, place) = (MremapFlags::MAYMOVE, start.cast());
        // SAFETY: the call moves the copy over the caller's range, which nothing else uses.
        if unsafe { rustix::mm::mremap_fixed(copy, len, len, flags, place) }.is_ok() {
            return;
        }
    }
    // SAFETY: the caller's contract.
    unsafe { make_inaccessible(start, len) };
}

/// Makes the `len` bytes from `start` on, which are whole pages, inaccessible to this process.
///
/// # Safety
/// As for [`make_private`].
pub unsafe fn make_inaccessible(start: *mut u8, len: usize) {
    // SAFETY: the caller's range.
    if unsafe { rustix::mm::mprotect(start.cast(), len, MprotectFlags::empty()) }.is_err() {
        // SAFETY: _exit has no precondition. The child ends here, because it could otherwise write to its parent's
        // memory.
        unsafe { libc::_exit(127) };
    }
}

/// A gate at which a parent waits after a fork, until its child has dropped the gate or has ended.
#[derive(Debug)]
pub struct ForkGate {
    reader: PipeReader,
    writer: PipeWriter,
}

impl ForkGate {
    /// Creates a gate. Call it before the fork. Returns `None` if the system refuses a pipe.
    pub fn new() -> Option<Self> {
        let (reader, writer) = failpoint!("pipe", std::io::pipe()).ok()?;
        Some(Self { reader, writer })
    }

    /// Waits in the parent until the child has dropped the gate or ended, for at most `limit`. Returns at once if there
    /// is no child.
    pub fn wait(self, limit: Duration) {
        drop(self.writer);
        let mut entry = [PollFd::new(&self.reader, PollFlags::IN)];
        let start = Instant::now();
        let _ = retry_on_intr(|| {
            let left = timespec(limit.saturating_sub(start.elapsed()));
            rustix::event::poll(&mut entry, Some(&left))
        });
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use super::super::map::{Mapping, page_size};
    use super::super::memfd;
    use super::*;
    use crate::children::Child;

    #[test]
    fn a_private_copy_keeps_the_bytes_and_shares_none() {
        let len = 3 * page_size();
        let fd = memfd::create("rustloader-test", len as u64).unwrap();
        let map = Mapping::new(fd.as_fd(), len).unwrap();
        // SAFETY: the byte is in the mapping, which only this thread and its child use.
        let byte = |n: usize| unsafe { &mut *map.as_ptr().add(n) };
        *byte(0) = 1;
        *byte(len - 1) = 2;
        let child = Child::fork(|| {
            // SAFETY: the range is the whole mapping, to which there is no reference.
            unsafe { make_private(map.as_ptr(), len) };
            let same = (*byte(0), *byte(len / 2), *byte(len - 1)) == (1, 0, 2);
            *byte(0) = 9;
            *byte(len / 2) = 9;
            same && *byte(0) == 9
        });
        assert_eq!(child.wait(), 0);
        assert_eq!((*byte(0), *byte(len / 2), *byte(len - 1)), (1, 0, 2));
    }

    #[test]
    fn a_gate_opens_when_the_child_drops_it_or_ends_or_does_not_exist() {
        const LONG: Duration = Duration::from_secs(600);
        ForkGate::new().unwrap().wait(LONG);
        let gate = ForkGate::new().unwrap();
        let child = Child::fork(|| {
            // SAFETY: the child closes its copies of the gate, and sleeps until the parent ends it.
            unsafe {
                libc::close(gate.reader.as_raw_fd());
                libc::close(gate.writer.as_raw_fd());
                loop {
                    libc::pause();
                }
            }
        });
        gate.wait(LONG);
        child.kill();
        let gate = ForkGate::new().unwrap();
        let child = Child::fork(|| true);
        gate.wait(LONG);
        child.wait();
    }
}
