//! Deferral of signals that have a handler, while workers are forked.
//!
//! The thread that starts the workers blocks the signals. If it is the main thread, that is not enough: the kernel
//! delivers a signal for the process to any thread that does not block it, such as one that a library has started.
//! Python would then run its handler in the main thread, within the fork's hooks, where exceptions are lost. So a
//! recording handler, which only records the signal, temporarily replaces the process's handler. If another thread
//! starts the workers, the main thread runs the handlers meanwhile.
//!
//! Callers hold the GIL, so only one at a time runs this code. There is no lock: a fork may happen at any moment,
//! and in the child, which could inherit the lock locked, the signals must have their earlier effect.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering};

use super::signal::{Mask, action_of, blocks, gettid, kill, set_action, take_pending};

/// One signal that can be deferred.
struct Deferral {
    signal: i32,
    /// The process in which the signal is deferred; 0 for none.
    owner: AtomicI32,
    /// Number of callers that defer the signal in that process.
    holders: AtomicU32,
    /// True if the signal arrived while it was deferred.
    arrived: AtomicBool,
    /// The replaced handler.
    old: AtomicUsize,
    /// True if that handler takes three arguments.
    old_takes_info: AtomicBool,
    /// True if the recording handler is installed, or another handler has replaced it and may call it.
    installed: AtomicBool,
}

/// Number of signals that can be deferred.
const COUNT: usize = 10;

/// The signals for which programs install handlers. A signal that reports a fault of the program, such as SIGSEGV,
/// cannot be deferred.
static DEFERRALS: [Deferral; COUNT] = [
    Deferral::new(libc::SIGINT),
    Deferral::new(libc::SIGTERM),
    Deferral::new(libc::SIGHUP),
    Deferral::new(libc::SIGQUIT),
    Deferral::new(libc::SIGALRM),
    Deferral::new(libc::SIGVTALRM),
    Deferral::new(libc::SIGPROF),
    Deferral::new(libc::SIGUSR1),
    Deferral::new(libc::SIGUSR2),
    Deferral::new(libc::SIGCHLD),
];

/// The signals that a thread defers until [`Deferred::release`].
#[derive(Debug)]
#[must_use]
pub struct Deferred {
    /// The signals that the thread blocks, and did not block before.
    blocked: Vec<i32>,
    /// The thread's previous mask.
    before: Mask,
    /// The signals that are recorded; `None` if this is not the main thread.
    recorded: Option<Recorded>,
}

/// Blocks `signals` in this thread, and in the main thread also records those that other threads receive.
pub fn defer(signals: &[i32]) -> Deferred {
    let recorded = (gettid() == getpid()).then(|| record(signals));
    let before = Mask::block(signals);
    Deferred { blocked: signals.iter().copied().filter(|signal| !before.has(*signal)).collect(), before, recorded }
}

impl Deferred {
    /// The signals that the thread did not block before. A new process inherits the mask and has to unblock them.
    pub fn blocked(&self) -> Vec<i32> {
        self.blocked.clone()
    }

    /// Restores the thread's mask, and the handlers that record signals. The signals that arrived have their effect.
    pub fn release(self) {
        let Some(recorded) = self.recorded else {
            // A signal that the main thread has not taken yet would reach this thread as soon as the mask is restored.
            for signal in take_pending(&self.blocked) {
                send_to_main(signal);
            }
            return self.before.restore();
        };
        self.before.restore();
        recorded.release();
    }
}

/// Sends a signal to the main thread, or, if that thread blocks it, to the process. Python runs handlers only in the
/// main thread, and a signal in another thread does not end its wait for a lock.
fn send_to_main(signal: i32) {
    let pid = getpid();
    // SAFETY: tgkill takes plain numbers; the main thread has the number of the process.
    if blocks(pid, signal) || unsafe { libc::syscall(libc::SYS_tgkill, pid, pid, signal) } != 0 {
        send_to_process(signal);
    }
}

/// Sends a signal to this process. If the main thread sends it and does not block it, the main thread receives it at
/// once.
fn send_to_process(signal: i32) {
    if kill(getpid(), signal).is_err() {
        // SAFETY: raise takes a plain number.
        unsafe { libc::raise(signal) };
    }
}

/// The signals that one caller records until [`Recorded::release`].
#[derive(Debug)]
#[must_use]
struct Recorded([bool; COUNT]);

/// Records `signals` until [`Recorded::release`]. Skips a signal that has no handler or is not in `DEFERRALS`, and one
/// whose handler the system refuses to replace.
fn record(signals: &[i32]) -> Recorded {
    Recorded(DEFERRALS.each_ref().map(|it| signals.contains(&it.signal) && it.begin()))
}

impl Recorded {
    /// Restores the handlers, then sends the signals again that arrived and that no other caller records. Sends them
    /// last, because an exception from a handler ends the caller's work.
    fn release(self) {
        let deferrals = || DEFERRALS.iter().zip(self.0).filter(|(_, deferred)| *deferred).map(|(it, _)| it);
        let arrived: Vec<i32> = deferrals().filter(|it| it.end()).map(|it| it.signal).collect();
        arrived.into_iter().for_each(send_to_process);
    }
}

extern "C" fn handler(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(deferral) = deferral_of(signal) else { return };
    let pid = getpid();
    if deferral.owner.load(Ordering::SeqCst) == pid {
        deferral.arrived.store(true, Ordering::SeqCst);
        // `Deferral::end` sees this store, unless it ran between the load of `owner` and the store.
        if deferral.owner.load(Ordering::SeqCst) == pid || !deferral.arrived.swap(false, Ordering::SeqCst) {
            return;
        }
    }
    let old = deferral.old.load(Ordering::Relaxed);
    if deferral.old_takes_info.load(Ordering::Relaxed) {
        // SAFETY: the handler was installed with SA_SIGINFO, so it has this type.
        let old: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { std::mem::transmute(old) };
        old(signal, info, context);
    } else {
        // SAFETY: the handler was installed without SA_SIGINFO, so it has this type.
        let old: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(old) };
        old(signal);
    }
}

fn deferral_of(signal: i32) -> Option<&'static Deferral> {
    DEFERRALS.iter().find(|it| it.signal == signal)
}

fn getpid() -> i32 {
    std::process::id() as i32
}

impl Deferral {
    const fn new(signal: i32) -> Self {
        Self {
            signal,
            owner: AtomicI32::new(0),
            holders: AtomicU32::new(0),
            arrived: AtomicBool::new(false),
            old: AtomicUsize::new(0),
            old_takes_info: AtomicBool::new(false),
            installed: AtomicBool::new(false),
        }
    }

    /// Starts to defer the signal. Returns true if it is deferred.
    fn begin(&self) -> bool {
        let pid = getpid();
        if self.owner.load(Ordering::Relaxed) == pid {
            self.holders.fetch_add(1, Ordering::Relaxed);
            return true;
        }
        let Some(mut action) = self.action() else { return false };
        if [libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction) {
            return false;
        }
        self.arrived.store(false, Ordering::Relaxed);
        self.holders.store(1, Ordering::Relaxed);
        // A child of a process that deferred the signal already has the recording handler. A handler that has replaced
        // the recording handler may call it. If the recording handler replaced that handler in turn, the two would call
        // each other endlessly. So that handler stays installed, and the signals that it passes on are deferred.
        let old = self.old.load(Ordering::Relaxed);
        let replaced = self.installed.load(Ordering::Relaxed) && action.sa_sigaction != old;
        if action.sa_sigaction != handler as *const () as usize && !replaced {
            self.old.store(action.sa_sigaction, Ordering::Relaxed);
            self.old_takes_info.store(action.sa_flags & libc::SA_SIGINFO != 0, Ordering::Relaxed);
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags |= libc::SA_SIGINFO;
            if !self.set(&action) {
                return false;
            }
            self.installed.store(true, Ordering::Relaxed);
        }
        self.owner.store(pid, Ordering::SeqCst);
        true
    }

    /// Undoes one [`Deferral::begin`]. The last of these calls ends the deferral and restores the handler; it returns
    /// true if the signal arrived during the deferral. All other calls return false.
    fn end(&self) -> bool {
        if self.owner.load(Ordering::Relaxed) != getpid() || self.holders.fetch_sub(1, Ordering::Relaxed) > 1 {
            return false;
        }
        self.owner.store(0, Ordering::SeqCst);
        // The handler is not restored if the program has installed another one.
        if let Some(mut action) = self.action().filter(|action| action.sa_sigaction == handler as *const () as usize) {
            action.sa_sigaction = self.old.load(Ordering::Relaxed);
            if !self.old_takes_info.load(Ordering::Relaxed) {
                action.sa_flags &= !libc::SA_SIGINFO;
            }
            let removed = self.set(&action);
            self.installed.store(!removed, Ordering::Relaxed);
        }
        self.arrived.swap(false, Ordering::SeqCst)
    }

    /// Returns the signal's current action.
    fn action(&self) -> Option<libc::sigaction> {
        action_of(self.signal)
    }

    fn set(&self, action: &libc::sigaction) -> bool {
        // SAFETY: the handler is `handler`, or one that was installed before.
        unsafe { set_action(self.signal, action) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    static SEEN: AtomicU32 = AtomicU32::new(0);
    /// Number of SIGINTs whose handler found SIGTERM still deferred.
    static TOO_SOON: AtomicU32 = AtomicU32::new(0);

    extern "C" fn note(signal: libc::c_int) {
        SEEN.fetch_add(1, Ordering::SeqCst);
        let term = deferral_of(libc::SIGTERM).unwrap().owner.load(Ordering::SeqCst);
        TOO_SOON.fetch_add(u32::from(signal == libc::SIGINT && term != 0), Ordering::SeqCst);
    }

    /// Number of calls of a library's handler.
    static CHAINED: AtomicU32 = AtomicU32::new(0);
    /// The handler that the library's handler has replaced.
    static REPLACED: AtomicUsize = AtomicUsize::new(0);

    extern "C" fn chaining(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        // A limit, so that a failure does not overflow the stack.
        if CHAINED.fetch_add(1, Ordering::SeqCst) < 100 {
            // SAFETY: the test stores a handler that was installed with SA_SIGINFO.
            let replaced: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                unsafe { std::mem::transmute(REPLACED.load(Ordering::SeqCst)) };
            replaced(signal, info, context);
        }
    }

    /// Number of calls of the program's handler.
    static PROGRAM_CALLS: AtomicU32 = AtomicU32::new(0);

    extern "C" fn program_handler(_signal: libc::c_int) {
        PROGRAM_CALLS.fetch_add(1, Ordering::SeqCst);
    }

    /// Uses a signal that no other test uses, because tests run at the same time.
    #[test]
    fn a_handler_that_calls_the_recording_one_is_not_called_by_it() {
        let signal = libc::SIGVTALRM;
        let deferral = deferral_of(signal).unwrap();
        let default = deferral.action().unwrap();
        let install = |handler: usize, flags| {
            let mut action = default;
            (action.sa_sigaction, action.sa_flags) = (handler, flags);
            assert!(deferral.set(&action));
        };
        // Returns and resets the numbers of calls of the library's handler and of the program's handler.
        let calls = || (CHAINED.swap(0, Ordering::SeqCst), PROGRAM_CALLS.swap(0, Ordering::SeqCst));
        let release = |recorded: Recorded| {
            recorded.release();
            wait_for(|| PROGRAM_CALLS.load(Ordering::SeqCst) > 0);
        };
        install(program_handler as *const () as usize, 0);

        let recorded = record(&[signal]);
        REPLACED.store(deferral.action().unwrap().sa_sigaction, Ordering::SeqCst);
        install(chaining as *const () as usize, libc::SA_SIGINFO);
        recorded.release();
        for _ in 0..2 {
            let recorded = record(&[signal]);
            raise(signal);
            assert_eq!(PROGRAM_CALLS.load(Ordering::SeqCst), 0, "the call of the recording handler is deferred");
            release(recorded);
            assert_eq!(calls(), (2, 1), "the library's handler runs at once and at the release");
            raise(signal);
            assert_eq!(calls(), (1, 1));
        }

        // The library restores the handler that it replaced, which brings back the initial state.
        install(REPLACED.load(Ordering::SeqCst), libc::SA_SIGINFO);
        raise(signal);
        assert_eq!(calls(), (0, 1));
        let recorded = record(&[signal]);
        raise(signal);
        assert_eq!(calls(), (0, 0));
        release(recorded);
        assert_eq!(calls(), (0, 1));
        assert_eq!(deferral.action().unwrap().sa_sigaction, program_handler as *const () as usize);

        // Meanwhile the program installs its handler again. That handler calls no other, so it is replaced as usual.
        let recorded = record(&[signal]);
        install(program_handler as *const () as usize, 0);
        recorded.release();
        let recorded = record(&[signal]);
        raise(signal);
        assert_eq!(calls(), (0, 0));
        release(recorded);
        assert_eq!(calls(), (0, 1));
        assert!(deferral.set(&default));
    }

    fn raise(signal: i32) {
        // SAFETY: raise takes a plain number.
        unsafe { libc::raise(signal) };
    }

    fn seen() -> u32 {
        SEEN.load(Ordering::SeqCst)
    }

    /// Waits until `condition` is true: another thread may run the handler of a released signal.
    fn wait_for(condition: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(60);
        while !condition() {
            assert!(Instant::now() < end, "the signal has not arrived");
            std::thread::yield_now();
        }
    }

    /// A single test, because the signals are global to the process.
    #[test]
    fn a_deferred_signal_arrives_once_after_the_release() {
        let (signal, both) = (libc::SIGTERM, [libc::SIGINT, libc::SIGTERM]);
        assert_eq!(record(&[libc::SIGUSR1, signal]).0, [false; COUNT], "without a handler there is nothing to defer");
        let defaults = both.map(|signal| deferral_of(signal).unwrap().action().unwrap());
        for (signal, mut action) in both.into_iter().zip(defaults) {
            action.sa_sigaction = note as *const () as usize;
            assert!(deferral_of(signal).unwrap().set(&action));
        }
        let deferral = deferral_of(signal).unwrap();

        let (first, second) = (record(&[signal]), record(&[signal]));
        raise(signal);
        raise(signal);
        first.release();
        assert_eq!(seen(), 0, "one caller still defers it");
        second.release();
        wait_for(|| seen() > 0);
        assert_eq!(seen(), 1);
        assert_eq!(deferral.action().unwrap().sa_sigaction, note as *const () as usize);
        raise(signal);
        assert_eq!(seen(), 2);

        // Two signals are released together, because the handler of one may raise.
        let recorded = record(&both);
        both.into_iter().for_each(raise);
        assert_eq!(seen(), 2);
        recorded.release();
        wait_for(|| seen() > 3);
        assert_eq!((seen(), TOO_SOON.load(Ordering::SeqCst)), (4, 0));

        // In a forked child the signal has the same effect as before.
        let parents = record(&[signal]);
        deferral.owner.store(getpid() + 1, Ordering::SeqCst);
        raise(signal);
        assert_eq!(seen(), 5);
        let own = record(&[signal]);
        raise(signal);
        assert_eq!(seen(), 5);
        own.release();
        wait_for(|| seen() > 5);
        parents.release();
        assert_eq!(seen(), 6, "there is nothing to release");
        for (signal, action) in both.into_iter().zip(defaults) {
            assert!(deferral_of(signal).unwrap().set(&action));
        }
    }
}
