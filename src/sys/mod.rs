//! All system calls of the crate.
//!
//! Code that a forked child can reach takes no process-wide lock and logs nothing. Each error names the call and the
//! remedy. Calls that a signal interrupts are retried, except most waits, which then return.
//!
//! Calls go through rustix: its types express rules that SAFETY comments would otherwise state, and it enters the
//! kernel without the C library. Each call is written with its full path, so that `tests/sys_calls.rs` finds it. The
//! following calls use the C library instead:
//!
//! - `clock_gettime` and `sysconf`: for these calls rustix reads the auxiliary vector (before Linux 6.4 from /proc,
//!   with an allocation), which the C library already has. The rustix clock is no faster.
//! - `getrlimit` and `sysinfo`: rustix does not check the results of these calls, which a sandbox may refuse.
//! - `sendmsg` and `recvmsg`: rustix takes slices, whose bytes must not change during the call, but other processes may
//!   change them.
//! - `kill` and `pidfd_send_signal`: rustix's `Signal` type has no 0, and has real-time signals only with `unsafe`.
//! - `close` of a raw number, in [`left_behind`]: the call is no safer in rustix.
//! - `ioctl` of a pidfd: rustix has no type for the request, and its generic call is no safer.
//! - `pthread_atfork`, `sigaction`, signal masks, `timer_create`, `raise`, `_exit`, `getrusage`, `strsignal`, `dlopen`:
//!   rustix has no stable call for them, and the C library keeps its own state for most of them.

pub mod cgroup;
pub mod clock;
pub mod deferred_signals;
pub mod event;
pub mod failpoint;
pub mod files;
pub mod fork;
pub mod fork_witness;
pub mod futex;
pub mod identity;
mod left_behind;
pub mod map;
pub mod memfd;
pub mod memory;
pub mod moment;
pub mod owned;
pub mod pidfd;
pub mod poll;
pub mod private;
pub mod proc_fd;
pub mod sealed;
pub mod signal;
pub mod sigterm;
pub mod socket;
pub mod symbol;
pub mod thread;

use std::os::fd::{BorrowedFd, RawFd};

use rustix::io::{Errno, retry_on_intr};
use rustix::process::Resource;

use crate::error::Error;

/// Converts the result of a call of the C library, which is -1 if the call fails.
fn checked<T: PartialEq + From<i8>>(result: T) -> rustix::io::Result<T> {
    if result != T::from(-1) {
        return Ok(result);
    }
    Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}

/// Returns the error for a refused call.
fn refused(call: &'static str, errno: Errno, hint: impl Into<String>) -> Error {
    Error::Os { call, errno: errno.raw_os_error(), hint: hint.into() }
}

/// Makes a descriptor from a raw number. Use it only in calls that ask the kernel what file the number names, or
/// whether that file is readable.
fn by_number(fd: RawFd) -> rustix::io::Result<BorrowedFd<'static>> {
    if fd < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: the number is not -1. If other code has closed the descriptor, the kernel refuses the call or the number
    // names another file; neither affects memory safety.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Returns a resource limit of this process; `None` if there is none, or the system does not report it.
fn limit(resource: Resource) -> Option<u64> {
    let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a local struct that the kernel fills.
    let mut call = || checked(unsafe { libc::getrlimit64(resource as _, &mut limit) });
    let is_known = failpoint::failpoint!("getrlimit", call()).is_ok();
    (is_known && limit.rlim_cur != libc::RLIM64_INFINITY).then_some(limit.rlim_cur)
}

/// Reads a file of /proc or /sys.
fn read_file(path: &std::path::Path) -> std::io::Result<Vec<u8>> {
    failpoint::failpoint!("proc", std::fs::read(path))
}

/// Returns the hint for the error of a call that could not create a descriptor.
fn descriptor_hint(errno: Errno) -> &'static str {
    match errno {
        Errno::MFILE => {
            "this process has too many open files: raise `ulimit -n`, or close files that it no longer needs"
        }
        Errno::NFILE => "the machine has too many open files: raise the sysctl fs.file-max",
        Errno::NOMEM => "the kernel has no memory left",
        Errno::NOSYS | Errno::PERM => "the kernel or its sandbox (seccomp) does not allow this call",
        _ => "",
    }
}
