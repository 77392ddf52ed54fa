//! Signal masks, signal actions, and signals to other processes; the immediate exit of this process.

use rustix::io::Errno;
use rustix::process::Pid;

use super::failpoint::failpoint;
use super::{checked, refused};
use crate::config::STACK_SIGNAL;
use crate::error::{Error, Result};

/// Blocks every signal in the calling thread, so that only the program's own threads receive signals.
pub fn block_all_in_this_thread() {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset fills the whole set, which pthread_sigmask then reads.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), std::ptr::null_mut());
    }
}

/// A thread's blocked signals.
#[derive(Clone, Copy, Debug)]
pub struct Mask(libc::sigset_t);

impl Mask {
    /// Blocks `signals` in the calling thread, in addition to those already blocked. Returns the previous mask.
    pub fn block(signals: &[i32]) -> Self {
        let (mut more, mut before) = (empty_set(), Self(empty_set()));
        // SAFETY: the sets are local; a number that is not a signal is refused.
        unsafe {
            for &signal in signals {
                libc::sigaddset(&mut more, signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &more, &mut before.0);
        }
        before
    }

    /// Sets the calling thread's mask to this one.
    pub fn restore(&self) {
        // SAFETY: a valid set; the old one is not requested.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) };
    }

    /// Returns true if `signal` is blocked.
    pub fn has(&self, signal: i32) -> bool {
        // SAFETY: the set is valid; a number that is not a signal is refused.
        unsafe { libc::sigismember(&self.0, signal) == 1 }
    }
}

/// Takes those of `signals`, which this thread blocks, that are pending for this thread or the process.
pub(super) fn take_pending(signals: &[i32]) -> Vec<i32> {
    let mut set = empty_set();
    let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the sets and the time are local; a number that is not a signal is refused.
    unsafe {
        for &signal in signals {
            libc::sigaddset(&mut set, signal);
        }
        let take = || libc::sigtimedwait(&set, std::ptr::null_mut(), &at_once);
        std::iter::from_fn(|| Some(take()).filter(|signal| *signal > 0)).take(signals.len()).collect()
    }
}

fn empty_set() -> libc::sigset_t {
    let mut set = std::mem::MaybeUninit::uninit();
    // SAFETY: sigemptyset fills the whole set.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        set.assume_init()
    }
}

/// Sends `signal` to the process `pid`. Succeeds, without effect, if the process has ended. Prefer
/// [`PidFd::send_signal`](super::pidfd::PidFd::send_signal), which cannot reach another process that has reused the
/// pid.
pub fn kill(pid: i32, signal: i32) -> Result<()> {
    if pid <= 0 {
        return Err(Error::usage(format!("kill({pid}) would signal more than one process")));
    }
    // SAFETY: kill takes plain numbers.
    match failpoint!("kill", checked(unsafe { libc::kill(pid, signal) })) {
        Ok(_) | Err(Errno::SRCH) => Ok(()),
        Err(errno) => Err(refused("kill", errno, format!("signal {signal} was not sent to process {pid}"))),
    }
}

/// Returns the signal on which a worker dumps its stack. It is a real-time signal, because programs use the other
/// signals; see also [`STACK_SIGNAL`].
pub fn stack_signal() -> i32 {
    libc::SIGRTMIN() + STACK_SIGNAL
}

/// The default action of a signal.
pub const DEFAULT: usize = libc::SIG_DFL;

/// Returns the address of this process's handler of `signal`, [`DEFAULT`] or `SIG_IGN`; `None` if unknown.
pub fn handler_of(signal: i32) -> Option<usize> {
    action_of(signal).map(|action| action.sa_sigaction)
}

/// Returns the action of `signal` in this process; `None` if unknown.
pub(super) fn action_of(signal: i32) -> Option<libc::sigaction> {
    // SAFETY: an all-zero sigaction is valid.
    let mut now: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: a null action changes nothing; `now` is a local struct that the call fills.
    let mut call = || unsafe { libc::sigaction(signal, std::ptr::null(), &mut now) };
    failpoint!("sigaction", checked(call())).is_ok().then_some(now)
}

/// Sets the action of `signal`. Returns true on success.
///
/// # Safety
/// A handler in `action` has the type that the flags state, and is async-signal-safe.
pub(super) unsafe fn set_action(signal: i32, action: &libc::sigaction) -> bool {
    // SAFETY: the caller's contract; the old action is not requested.
    let call = || unsafe { libc::sigaction(signal, action, std::ptr::null_mut()) };
    failpoint!("sigaction", checked(call())).is_ok()
}

/// Makes this process ignore `signal`. If the system refuses, the action stays as it is.
pub fn ignore(signal: i32) {
    // SAFETY: an all-zero sigaction is valid, and has an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = libc::SIG_IGN;
    // SAFETY: the action has no handler.
    unsafe { set_action(signal, &action) };
}

/// Returns true if the process `pid` has a handler for `signal` according to /proc; false if unknown.
pub fn catches(pid: i32, signal: i32) -> bool {
    is_in_mask(pid, b"SigCgt:", signal)
}

/// Returns true if the main thread of the process `pid` blocks `signal` according to /proc, as it does while the
/// handler runs; false if unknown.
pub fn blocks(pid: i32, signal: i32) -> bool {
    is_in_mask(pid, b"SigBlk:", signal)
}

fn is_in_mask(pid: i32, name: &[u8], signal: i32) -> bool {
    let Ok(status) = super::read_file(format!("/proc/{pid}/status").as_ref()) else { return false };
    let mask = status.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(name));
    let mask = mask.and_then(|mask| u64::from_str_radix(std::str::from_utf8(mask).ok()?.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 << (signal - 1) != 0)
}

/// Ends the process at once, without running exit handlers or flushing buffers.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: _exit has no precondition.
    unsafe { libc::_exit(code) }
}

/// Returns the ID of the parent process.
pub fn getppid() -> i32 {
    Pid::as_raw(rustix::process::getppid())
}

/// Returns the calling thread's ID.
pub fn gettid() -> i32 {
    rustix::thread::gettid().as_raw_pid()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::children::Child;

    #[test]
    fn a_thread_blocks_all_signals_that_can_be_blocked() {
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
    fn a_mask_is_restored() {
        let thread = std::thread::spawn(|| {
            let before = Mask::block(&[libc::SIGUSR1]);
            let meanwhile = Mask::block(&[libc::SIGUSR2]);
            assert!(!before.has(libc::SIGUSR1) && meanwhile.has(libc::SIGUSR1));
            assert!(!meanwhile.has(libc::SIGUSR2));
            before.restore();
            assert!(!Mask::block(&[]).has(libc::SIGUSR1) && !Mask::block(&[]).has(libc::SIGUSR2));
        });
        thread.join().unwrap();
    }

    #[test]
    fn pending_signals_are_taken() {
        let thread = std::thread::spawn(|| {
            let both = [libc::SIGUSR1, libc::SIGWINCH];
            let before = Mask::block(&both);
            assert!(take_pending(&both).is_empty());
            // SAFETY: raise takes a plain number; this thread blocks the signal.
            unsafe { libc::raise(libc::SIGUSR1) };
            assert_eq!(take_pending(&both), [libc::SIGUSR1]);
            before.restore();
        });
        thread.join().unwrap();
    }

    #[test]
    fn a_signal_without_a_handler_is_not_caught() {
        let me = std::process::id() as i32;
        // The Rust runtime has a handler for SIGSEGV, and ignores SIGPIPE.
        assert!(catches(me, libc::SIGSEGV) && !catches(me, libc::SIGPIPE) && !catches(me, stack_signal()));
        assert_eq!(handler_of(stack_signal()), Some(DEFAULT));
        assert!(handler_of(libc::SIGSEGV).is_some_and(|handler| handler != DEFAULT));
        assert_eq!(handler_of(-1), None);
    }

    #[test]
    fn signals_that_the_main_thread_blocks_are_reported() {
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let me = std::process::id() as i32;
        // The main thread blocks all signals while it starts the threads of tests.
        while blocks(me, stack_signal()) {
            assert!(std::time::Instant::now() < end);
        }
        assert!(!blocks(i32::MAX, stack_signal()));
        // A test does not run in the main thread, so it can set only the mask of a child's main thread.
        let child = Child::fork(|| {
            block_all_in_this_thread();
            loop {
                // SAFETY: pause has no precondition.
                unsafe { libc::pause() };
            }
        });
        let mut seen = false;
        while !seen && std::time::Instant::now() < end {
            seen = blocks(child.0, stack_signal());
        }
        child.kill();
        assert!(seen);
    }

    #[test]
    fn groups_are_not_signaled() {
        assert!(matches!(kill(-1, 0), Err(Error::Usage { .. })));
        assert!(matches!(kill(0, 0), Err(Error::Usage { .. })));
    }

    #[test]
    fn an_ended_process_is_no_error() {
        kill(std::process::id() as i32, 0).unwrap();
        kill(i32::MAX, 0).unwrap();
    }

    #[test]
    fn only_the_main_thread_has_the_number_of_the_process() {
        let other = std::thread::spawn(gettid).join().unwrap();
        assert!(other > 0);
        assert_ne!(other, std::process::id() as i32);
    }
}
