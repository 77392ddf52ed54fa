//! A handler for SIGTERM that may put the end off.
//!
//! What runs in the handler is async-signal-safe: atomics, and the system calls getpid, timer_settime, sigaction, raise and
//! _exit. A timer of the process, whose signal is SIGTERM again, brings it back: so nothing has to wait, and no thread is woken.

use std::sync::OnceLock;
use std::time::Duration;

use super::clock::timespec;
use super::failpoint::failpoint;
use crate::error::{Error, Result};

/// Why the handler runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// A process has sent the signal; 0 for one of another pid namespace, and for the kernel.
    Sent {
        /// Its number.
        by: i32,
    },
    /// The time of [`Answer::AskAgain`] is over.
    Time,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The process goes on, and the question comes again after this time.
    AskAgain(Duration),
    /// It exits with code 0, at once.
    Leave,
    /// The signal ends it, as without a handler.
    Die,
}

/// What the handler needs.
struct Seat {
    /// The process that has installed it. A forked child has the handler and no timer: there the signal has its default effect.
    pid: i32,
    /// The timer, a `timer_t`.
    timer: usize,
    decide: fn(Cause) -> Answer,
}

static SEAT: OnceLock<Seat> = OnceLock::new();

/// Has SIGTERM ask `decide` from now on, which runs in the handler: it may use atomics, and no lock, allocation or thread-local.
/// Once a process, by a thread that lives as long as that. A handler that is installed later replaces it.
///
/// # Errors
/// [`Error::Os`]: the system refuses a timer or the handler; nothing has changed then.
pub fn install(decide: fn(Cause) -> Answer) -> Result<()> {
    // SAFETY: a sigevent of zeroes is a valid one.
    let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
    // To this thread, because one to the process would be merged with another SIGTERM that is pending there.
    event.sigev_notify = libc::SIGEV_THREAD_ID;
    event.sigev_notify_thread_id = super::signal::gettid();
    event.sigev_signo = libc::SIGTERM;
    let mut timer: libc::timer_t = std::ptr::null_mut();
    // SAFETY: both structs are ours, one to be read, one to be filled.
    let mut call = || unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer) };
    if failpoint!("timer", -1, call()) == -1 {
        return Err(Error::last_os("timer_create", "raise `ulimit -i` (RLIMIT_SIGPENDING)"));
    }
    // SAFETY: getpid has no precondition.
    let seat = Seat { pid: unsafe { libc::getpid() }, timer: timer as usize, decide };
    SEAT.set(seat).map_err(|_| Error::usage("a second handler for SIGTERM"))?;
    // SAFETY: a sigaction of zeroes is a valid one, with an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as *const () as usize;
    // System calls that it interrupts go on; on the alternate stack where the thread has one.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
    // SAFETY: the handler is a function of the type that SA_SIGINFO wants, and stays for as long as the process.
    let call = || unsafe { libc::sigaction(libc::SIGTERM, &action, std::ptr::null_mut()) };
    if failpoint!("sigaction", -1, call()) == -1 {
        return Err(Error::last_os("sigaction", "the handler for SIGTERM"));
    }
    Ok(())
}

extern "C" fn handler(_signal: libc::c_int, info: *const libc::siginfo_t, _context: *const libc::c_void) {
    // SAFETY: __errno_location answers the calling thread's own errno, which what was interrupted may be about to read.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: with SA_SIGINFO the kernel hands over a siginfo; any of its fields may be read.
    let (code, by) = unsafe { ((*info).si_code, (*info).si_pid()) };
    let cause = if code == libc::SI_TIMER { Cause::Time } else { Cause::Sent { by } };
    // SAFETY: getpid has no precondition.
    let pid = unsafe { libc::getpid() };
    // An atomic load, because it was set before the handler was installed.
    let seat = SEAT.get().filter(|seat| seat.pid == pid);
    let answer = seat.map_or(Answer::Die, |seat| (seat.decide)(cause));
    match (answer, seat) {
        (Answer::AskAgain(after), Some(seat)) if set_timer(seat.timer, after) => {}
        (Answer::Leave, _) => super::signal::exit_now(0),
        _ => die(),
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

fn set_timer(timer: usize, after: Duration) -> bool {
    let never = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let time = libc::itimerspec { it_interval: never, it_value: timespec(after) };
    // SAFETY: the timer is this process's; `time` outlives the call.
    unsafe { libc::timer_settime(timer as libc::timer_t, 0, &time, std::ptr::null_mut()) == 0 }
}

/// The default effect comes when the handler returns: until then the signal is blocked.
fn die() {
    // SAFETY: a sigaction of zeroes is the default action with an empty mask; raise takes a number.
    unsafe {
        let action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGTERM, &action, std::ptr::null_mut());
        libc::raise(libc::SIGTERM);
    }
}
