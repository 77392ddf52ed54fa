//! Private copies of shared memory in a forked child, and the parent's wait for them.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use super::failpoint::failpoint;
use super::retry;

/// Replaces the whole pages from `start` on, `len` bytes, by private ones with the same bytes: ordinary memory of this process.
/// If the system refuses, they become inaccessible, so that an access ends the process and changes nothing. Takes no lock.
///
/// # Safety
/// The range is mapped and readable, it belongs to no other thread, and no reference to it is used during the call.
pub unsafe fn make_private(start: *mut u8, len: usize) {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: the kernel chooses a free address range.
    let call = || unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
    let copy = failpoint!("private", libc::MAP_FAILED, call());
    if copy != libc::MAP_FAILED {
        // SAFETY: both ranges have `len` bytes, the caller's is readable, and the copy's is new.
        unsafe { std::ptr::copy_nonoverlapping(start, copy.cast(), len) };
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: moves the copy over the caller's range, which nothing else uses.
        if unsafe { libc::mremap(copy, len, len, flags, start) } != libc::MAP_FAILED {
            return;
        }
    }
    // SAFETY: as the caller promises.
    unsafe { make_inaccessible(start, len) };
}

/// Makes the whole pages from `start` on, `len` bytes, inaccessible to this process.
///
/// # Safety
/// As of [`make_private`].
pub unsafe fn make_inaccessible(start: *mut u8, len: usize) {
    // SAFETY: the caller's range.
    if unsafe { libc::mprotect(start.cast(), len, libc::PROT_NONE) } != 0 {
        // SAFETY: the child ends rather than write to memory of its parent.
        unsafe { libc::_exit(127) };
    }
}

/// Lets a parent wait after a fork until its child has passed a point, or has ended.
#[derive(Debug)]
pub struct Gate {
    ours: OwnedFd,
    childs: OwnedFd,
}

impl Gate {
    /// Call it before the fork. `None`: the system refuses a pipe.
    pub fn new() -> Option<Self> {
        let mut ends = [-1; 2];
        // SAFETY: the kernel fills two descriptors.
        let mut call = || unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) };
        if failpoint!("pipe", -1, call()) == -1 {
            return None;
        }
        // SAFETY: the kernel has just made these descriptors, and nothing else owns them.
        let [ours, childs] = ends.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        Some(Self { ours, childs })
    }

    /// In the parent: waits until the child has dropped the gate or ended, at most for `limit`. Returns at once if there is no
    /// child.
    pub fn wait(self, limit: Duration) {
        drop(self.childs);
        let mut poll = libc::pollfd { fd: self.ours.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let start = Instant::now();
        let _ = retry(|| {
            let left = limit.saturating_sub(start.elapsed()).as_millis();
            // SAFETY: one local structure.
            unsafe { libc::poll(&mut poll, 1, i32::try_from(left).unwrap_or(i32::MAX)) }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::super::map::{Mapping, page_size};
    use super::super::memfd;
    use super::*;

    /// Runs `check` in a child. Returns whether it was true.
    fn in_child(check: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child leaves by _exit; what it calls takes no lock.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: no exit handler runs.
            unsafe { libc::_exit(i32::from(!check())) };
        }
        let mut status = -1;
        // SAFETY: `status` is a local number that the kernel fills.
        assert_eq!(retry(|| unsafe { libc::waitpid(pid, &mut status, 0) }), pid);
        status == 0
    }

    #[test]
    fn a_private_copy_keeps_the_bytes_and_shares_none() {
        let len = 3 * page_size();
        let fd = memfd::create("rustloader-test", len as u64).unwrap();
        let map = Mapping::new(fd.as_fd(), len).unwrap();
        // SAFETY: bytes of the mapping, which this thread and its child alone use.
        let byte = |n: usize| unsafe { &mut *map.as_ptr().add(n) };
        *byte(0) = 1;
        *byte(len - 1) = 2;
        let made = in_child(|| {
            // SAFETY: the whole mapping, to which there is no reference.
            unsafe { make_private(map.as_ptr(), len) };
            let same = (*byte(0), *byte(len / 2), *byte(len - 1)) == (1, 0, 2);
            *byte(0) = 9;
            *byte(len / 2) = 9;
            same && *byte(0) == 9
        });
        assert!(made);
        assert_eq!((*byte(0), *byte(len / 2), *byte(len - 1)), (1, 0, 2));
    }

    #[test]
    fn a_gate_opens_when_the_child_drops_it_or_ends_or_is_none() {
        const LONG: Duration = Duration::from_secs(600);
        Gate::new().unwrap().wait(LONG);
        let gate = Gate::new().unwrap();
        // SAFETY: the child calls nothing but the kernel.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: closes its copies of the gate, and sleeps until the parent ends it.
            unsafe {
                libc::close(gate.ours.as_raw_fd());
                libc::close(gate.childs.as_raw_fd());
                loop {
                    libc::pause();
                }
            }
        }
        gate.wait(LONG);
        // SAFETY: our own child, which nothing else waits for.
        unsafe {
            libc::kill(pid, libc::SIGKILL);
            libc::waitpid(pid, std::ptr::null_mut(), 0);
        }
    }
}
