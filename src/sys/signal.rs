//! Signals of this thread and to other processes; the sudden end of this one.

use super::failpoint::failpoint;
use crate::error::{Error, Result};

/// Blocks every signal in the calling thread, so that the signals of the process reach the user's threads alone.
pub fn block_all_in_this_thread() {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset fills the whole set, which pthread_sigmask then reads.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), std::ptr::null_mut());
    }
}

/// Sends `signal` to the process `pid`; one that is gone already is no error. Prefer
/// [`PidFd::send_signal`](super::pidfd::PidFd::send_signal), which cannot hit a stranger with a recycled number.
pub fn kill(pid: i32, signal: i32) -> Result<()> {
    if pid <= 0 {
        return Err(Error::usage(format!("kill of {pid}, which is a group and no process")));
    }
    // SAFETY: kill takes plain numbers.
    let answer = failpoint!("kill", -1, unsafe { libc::kill(pid, signal) });
    if answer == 0 || super::errno() == libc::ESRCH {
        return Ok(());
    }
    Err(Error::last_os("kill", format!("signal {signal} to process {pid}")))
}

/// Ends the process at once: no exit handler runs, no buffer is flushed.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: _exit has no precondition.
    unsafe { libc::_exit(code) }
}

/// The process whose child the calling one is now.
pub fn getppid() -> i32 {
    // SAFETY: getppid has no precondition.
    unsafe { libc::getppid() }
}

/// The calling thread's number.
pub fn gettid() -> i32 {
    // SAFETY: gettid has no precondition.
    unsafe { libc::syscall(libc::SYS_gettid) as i32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_blocks_all_that_can_be_blocked() {
        let thread = std::thread::spawn(|| {
            block_all_in_this_thread();
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let line = status.lines().find(|line| line.starts_with("SigBlk:")).unwrap();
            let mask = u64::from_str_radix(line["SigBlk:".len()..].trim(), 16).unwrap();
            for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGCHLD, libc::SIGUSR1] {
                assert_ne!(mask & 1 << (signal - 1), 0, "signal {signal}");
            }
        });
        thread.join().unwrap();
    }

    #[test]
    fn groups_are_no_target() {
        assert!(matches!(kill(-1, 0), Err(Error::Usage { .. })));
        assert!(matches!(kill(0, 0), Err(Error::Usage { .. })));
    }

    #[test]
    fn a_process_that_is_gone_is_no_error() {
        kill(std::process::id() as i32, 0).unwrap();
        kill(i32::MAX, 0).unwrap();
    }

    #[test]
    fn the_main_thread_has_the_number_of_the_process_and_others_have_not() {
        let other = std::thread::spawn(gettid).join().unwrap();
        assert!(other > 0);
        assert_ne!(other, std::process::id() as i32);
    }
}
