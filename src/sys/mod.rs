//! Every system call of the crate.
//!
//! Code that a forked child can reach takes no process-wide lock and logs nothing. Each error names the call and the
//! remedy. Calls interrupted by a signal are repeated, except waits, which report it.

pub mod cgroup;
pub mod clock;
pub mod deferred_signals;
pub mod event;
pub mod failpoint;
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

/// The calling thread's `errno`.
fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Repeats `call` while a signal interrupts it.
fn retry<T: Copy + PartialEq + From<i8>>(mut call: impl FnMut() -> T) -> T {
    loop {
        let answer = call();
        if answer != T::from(-1) || errno() != libc::EINTR {
            return answer;
        }
    }
}

/// Reads a file of /proc or /sys.
fn read_file(path: &std::path::Path) -> std::io::Result<Vec<u8>> {
    failpoint::failpoint!("proc", Err(std::io::Error::last_os_error()), std::fs::read(path))
}

/// The remedy when a new descriptor is refused.
fn descriptor_hint(errno: i32) -> &'static str {
    match errno {
        libc::EMFILE => {
            "this process has too many open files: raise `ulimit -n`, or close files that it no longer needs"
        }
        libc::ENFILE => "the machine has too many open files: raise the sysctl fs.file-max",
        libc::ENOMEM => "the kernel has no memory left",
        libc::ENOSYS | libc::EPERM => "the kernel or its sandbox (seccomp) does not allow this call",
        _ => "",
    }
}
