//! Every system call of the crate.
//!
//! What a forked child can reach takes no lock of the process and logs nothing. Each refusal names the call and the
//! way out; calls are repeated when a signal interrupts them, except waits, which report it.

pub mod cgroup;
pub mod clock;
pub mod deferred_signals;
pub mod event;
pub mod failpoint;
pub mod fork;
pub mod fork_witness;
pub mod futex;
pub mod identity;
pub mod map;
pub mod memfd;
pub mod memory;
pub mod owned;
pub mod pidfd;
pub mod poll;
pub mod proc_fd;
pub mod signal;
pub mod sigterm;
pub mod symbol;
pub mod thread;

/// The `errno` that the thread holds now.
fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Repeats `call` while it answers -1 and the reason is a signal.
fn retry<T: Copy + PartialEq + From<i8>>(mut call: impl FnMut() -> T) -> T {
    loop {
        let answer = call();
        if answer != T::from(-1) || errno() != libc::EINTR {
            return answer;
        }
    }
}

/// The content of a file that the kernel makes up, in /proc or /sys.
fn read_file(path: &std::path::Path) -> std::io::Result<Vec<u8>> {
    failpoint::failpoint!("proc", Err(std::io::Error::last_os_error()), std::fs::read(path))
}

/// The way out when a new descriptor is refused.
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
