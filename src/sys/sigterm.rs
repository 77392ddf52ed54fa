//! A handler for SIGTERM that can postpone the end of the process.
//!
//! The handler is async-signal-safe: it uses only atomics and the system calls getpid, timer_settime, sigaction, raise
//! and _exit. To call the handler again, a timer sends SIGTERM, so that no thread has to wait or be woken.

use std::sync::OnceLock;
use std::time::Duration;

use super::clock::timespec;
use super::failpoint::failpoint;
use super::{checked, refused};
use crate::error::{Error, Result};

/// The reason why the handler runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// A process sent the signal.
    Sent {
        /// The sender's process ID; 0 for the kernel, and for a process in another pid namespace.
        by: i32,
    },
    /// The duration of [`Reaction::AskAgain`] has passed.
    Time,
}

/// The decision about a SIGTERM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reaction {
    /// Continue, and decide again after this duration.
    AskAgain(Duration),
    /// Exit with code 0 at once.
    Leave,
    /// Die by the signal, as without a handler.
    Die,
}

/// The handler's state.
struct HandlerState {
    /// The process that installed the handler. A forked child has the handler but no timer: there the signal has its
    /// default effect.
    pid: i32,
    /// A `timer_t`.
    timer: usize,
    decide: fn(Cause) -> Reaction,
}

static STATE: OnceLock<HandlerState> = OnceLock::new();

/// Installs a handler for SIGTERM that calls `decide`, which may use atomics, but no lock, allocation or thread-local.
/// Call this function once per process, in a thread that lives as long as the process. A handler that is installed
/// later replaces this one.
///
/// # Errors
/// [`Error::Os`] if the system refuses a timer or the handler; SIGTERM then has its earlier effect.
pub fn install(decide: fn(Cause) -> Reaction) -> Result<()> {
    // SAFETY: an all-zero sigevent is valid.
    let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
    // The timer signals this thread, because a signal to the process would merge with another pending SIGTERM.
    event.sigev_notify = libc::SIGEV_THREAD_ID;
    event.sigev_notify_thread_id = super::signal::gettid();
    event.sigev_signo = libc::SIGTERM;
    let mut timer: libc::timer_t = std::ptr::null_mut();
    // SAFETY: `event` and `timer` are local variables; the call reads the first and fills the second.
    let mut call = || unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer) };
    failpoint!("timer", checked(call()))
        .map_err(|errno| refused("timer_create", errno, "raise `ulimit -i` (RLIMIT_SIGPENDING)"))?;
    // SAFETY: getpid has no precondition.
    let state = HandlerState { pid: unsafe { libc::getpid() }, timer: timer as usize, decide };
    STATE.set(state).map_err(|_| Error::usage("there is already a handler for SIGTERM"))?;
    // SAFETY: an all-zero sigaction is valid, and has an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as *const () as usize;
    // Interrupted system calls restart; the handler runs on the thread's alternate stack, if it has one.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
    // SAFETY: the handler has the type of SA_SIGINFO and exists as long as the process.
    let call = || unsafe { libc::sigaction(libc::SIGTERM, &action, std::ptr::null_mut()) };
    failpoint!("sigaction", checked(call()))
        .map_err(|errno| refused("sigaction", errno, "the handler for SIGTERM could not be installed"))
        .map(drop)
}

extern "C" fn handler(_signal: libc::c_int, info: *const libc::siginfo_t, _context: *const libc::c_void) {
    // SAFETY: __errno_location returns the thread's own errno, which the interrupted code may be about to read.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: with SA_SIGINFO the kernel passes a siginfo; all its fields are readable.
    let (code, by) = unsafe { ((*info).si_code, (*info).si_pid()) };
    let cause = if code == libc::SI_TIMER { Cause::Time } else { Cause::Sent { by } };
    // SAFETY: getpid has no precondition.
    let pid = unsafe { libc::getpid() };
    // `get` is only an atomic load, and so async-signal-safe. The state was set before the handler was installed.
    let state = STATE.get().filter(|state| state.pid == pid);
    let reaction = state.map_or(Reaction::Die, |state| (state.decide)(cause));
    match (reaction, state) {
        (Reaction::AskAgain(after), Some(state)) if set_timer(state.timer, after) => {}
        (Reaction::Leave, _) => super::signal::exit_now(0),
        _ => die(),
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

fn set_timer(timer: usize, after: Duration) -> bool {
    let never = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let after = timespec(after);
    let after = libc::timespec { tv_sec: after.tv_sec as _, tv_nsec: after.tv_nsec as _ };
    let time = libc::itimerspec { it_interval: never, it_value: after };
    // SAFETY: the timer is this process's; `time` outlives the call.
    unsafe { libc::timer_settime(timer as libc::timer_t, 0, &time, std::ptr::null_mut()) == 0 }
}

/// Restores the default action and raises SIGTERM, which ends the process when the handler returns: until then the
/// signal is blocked.
fn die() {
    // SAFETY: an all-zero sigaction is the default action with an empty mask; raise takes a plain number.
    unsafe {
        let action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGTERM, &action, std::ptr::null_mut());
        libc::raise(libc::SIGTERM);
    }
}
