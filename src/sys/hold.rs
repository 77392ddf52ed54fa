//! Keeps signals back that have a handler, for the moments in which workers are forked.
//!
//! To block them in the starting thread is not enough: the kernel gives a signal of the process to any thread that does not
//! block it, and libraries have threads of their own. Python would then run its handler within the hooks of the fork, and
//! what is raised there is lost. Here the process's handler is replaced by one that takes a note.
//!
//! Callers take turns (they hold the GIL). No lock: a process may be forked at any moment, and in the fork the signals must
//! have the effect that they had.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering};

use super::signal::{action_of, set_action};

/// One signal.
struct Slot {
    signal: i32,
    /// The process in which it is held back; 0: in none.
    owner: AtomicI32,
    /// How many hold it back there.
    holders: AtomicU32,
    /// It came meanwhile.
    came: AtomicBool,
    /// The handler that was there, and whether it takes three arguments.
    old: AtomicUsize,
    old_takes_info: AtomicBool,
}

static SLOTS: [Slot; 2] = [Slot::new(libc::SIGINT), Slot::new(libc::SIGTERM)];

/// Keeps `signal` back until [`release`]; false where that is not needed or not to be had: it has no handler, it is neither
/// SIGINT nor SIGTERM, or the system refuses.
pub fn hold(signal: i32) -> bool {
    let Some(slot) = slot_of(signal) else { return false };
    let pid = getpid();
    if slot.owner.load(Ordering::Relaxed) == pid {
        slot.holders.fetch_add(1, Ordering::Relaxed);
        return true;
    }
    let Some(mut action) = slot.action() else { return false };
    if [libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction) {
        return false;
    }
    slot.came.store(false, Ordering::Relaxed);
    slot.holders.store(1, Ordering::Relaxed);
    // In a fork out of a process that held it back ours is there already.
    if action.sa_sigaction != handler as *const () as usize {
        slot.old.store(action.sa_sigaction, Ordering::Relaxed);
        slot.old_takes_info.store(action.sa_flags & libc::SA_SIGINFO != 0, Ordering::Relaxed);
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags |= libc::SA_SIGINFO;
        if !slot.set(&action) {
            return false;
        }
    }
    slot.owner.store(pid, Ordering::SeqCst);
    true
}

/// Ends what [`hold`] answered true to. When the last one does, a signal that came meanwhile comes again, to this thread.
pub fn release(signal: i32) {
    let Some(slot) = slot_of(signal) else { return };
    if slot.owner.load(Ordering::Relaxed) != getpid() || slot.holders.fetch_sub(1, Ordering::Relaxed) > 1 {
        return;
    }
    slot.owner.store(0, Ordering::SeqCst);
    // The user may have set another one meanwhile.
    if let Some(mut action) =
        slot.action().filter(|action| action.sa_sigaction == handler as *const () as usize)
    {
        action.sa_sigaction = slot.old.load(Ordering::Relaxed);
        if !slot.old_takes_info.load(Ordering::Relaxed) {
            action.sa_flags &= !libc::SA_SIGINFO;
        }
        slot.set(&action);
    }
    if slot.came.swap(false, Ordering::SeqCst) {
        // SAFETY: raise takes a number.
        unsafe { libc::raise(signal) };
    }
}

extern "C" fn handler(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(slot) = slot_of(signal) else { return };
    let pid = getpid();
    if slot.owner.load(Ordering::SeqCst) == pid {
        slot.came.store(true, Ordering::SeqCst);
        // Unless `release` has gone by meanwhile, it sees the note.
        if slot.owner.load(Ordering::SeqCst) == pid || !slot.came.swap(false, Ordering::SeqCst) {
            return;
        }
    }
    let old = slot.old.load(Ordering::Relaxed);
    if slot.old_takes_info.load(Ordering::Relaxed) {
        // SAFETY: the kernel took it for a function of this type, as SA_SIGINFO says.
        let old: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { std::mem::transmute(old) };
        old(signal, info, context);
    } else {
        // SAFETY: as above, without SA_SIGINFO.
        let old: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(old) };
        old(signal);
    }
}

fn slot_of(signal: i32) -> Option<&'static Slot> {
    SLOTS.iter().find(|slot| slot.signal == signal)
}

fn getpid() -> i32 {
    std::process::id() as i32
}

impl Slot {
    const fn new(signal: i32) -> Self {
        Self {
            signal,
            owner: AtomicI32::new(0),
            holders: AtomicU32::new(0),
            came: AtomicBool::new(false),
            old: AtomicUsize::new(0),
            old_takes_info: AtomicBool::new(false),
        }
    }

    /// What the signal does now.
    fn action(&self) -> Option<libc::sigaction> {
        action_of(self.signal)
    }

    fn set(&self, action: &libc::sigaction) -> bool {
        // SAFETY: the handler in it is ours, or one that was there.
        unsafe { set_action(self.signal, action) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static SEEN: AtomicU32 = AtomicU32::new(0);

    extern "C" fn note(_signal: libc::c_int) {
        SEEN.fetch_add(1, Ordering::SeqCst);
    }

    /// One test: the signal is the process's.
    #[test]
    fn a_signal_that_is_held_back_comes_once_and_afterwards() {
        let signal = libc::SIGTERM;
        assert!(!hold(libc::SIGUSR1) && !hold(signal), "no handler, nothing to hold back");
        let slot = slot_of(signal).unwrap();
        let mut action = slot.action().unwrap();
        let default = action;
        action.sa_sigaction = note as *const () as usize;
        assert!(slot.set(&action));
        // SAFETY: raise takes a number.
        let raise = || unsafe { libc::raise(signal) };

        assert!(hold(signal) && hold(signal));
        raise();
        raise();
        release(signal);
        assert_eq!(SEEN.load(Ordering::SeqCst), 0, "one still holds it back");
        release(signal);
        assert_eq!(SEEN.load(Ordering::SeqCst), 1);
        assert_eq!(slot.action().unwrap().sa_sigaction, note as *const () as usize);
        raise();
        assert_eq!(SEEN.load(Ordering::SeqCst), 2);
        release(signal);
        assert_eq!(SEEN.load(Ordering::SeqCst), 2, "nothing to be released");

        // In a fork it has the effect that it had.
        assert!(hold(signal));
        slot.owner.store(getpid() + 1, Ordering::SeqCst);
        raise();
        assert_eq!(SEEN.load(Ordering::SeqCst), 3);
        assert!(hold(signal));
        raise();
        assert_eq!(SEEN.load(Ordering::SeqCst), 3);
        release(signal);
        assert_eq!(SEEN.load(Ordering::SeqCst), 4);
        assert!(slot.set(&default));
    }
}
