//! Sleeping on a word in memory that processes share, and waking the sleepers.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::io::Errno;
use rustix::thread::futex::Flags;

use super::clock::timespec;
use super::failpoint::failpoint;
use super::refused;
use crate::error::Result;

/// The hint for the error of a refused call.
const UNMAPPED: &str = "the word must be in mapped memory";

/// The reason why [`wait`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// [`wake`] was called, or the wake-up is spurious: check the word again.
    Woken,
    /// The word differed from the expected value, so the call did not sleep.
    Changed,
    /// The timeout expired.
    TimedOut,
    /// A signal was handled.
    Interrupted,
}

/// If `word` is `expected`, sleeps until [`wake`], the timeout or a signal. Without a timeout, the sleep may last
/// forever. The futex is not private: the word may be in a mapping that other processes share.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) -> Result<Wake> {
    let timeout = timeout.map(timespec);
    let call = || rustix::thread::futex::wait(word, Flags::empty(), expected, timeout.as_ref());
    match failpoint!("futex_wait", call()) {
        Ok(()) => Ok(Wake::Woken),
        Err(Errno::AGAIN) => Ok(Wake::Changed),
        Err(Errno::TIMEDOUT) => Ok(Wake::TimedOut),
        Err(Errno::INTR) => Ok(Wake::Interrupted),
        Err(errno) => Err(refused("futex(FUTEX_WAIT)", errno, UNMAPPED)),
    }
}

/// Wakes up to `n` threads, of any process, that sleep on `word`. Returns the number of threads that it woke.
pub fn wake(word: &AtomicU32, n: u32) -> Result<u32> {
    let n = n.min(i32::MAX as u32);
    let woken = failpoint!("futex_wake", rustix::thread::futex::wake(word, Flags::empty(), n));
    woken.map(|woken| woken as u32).map_err(|errno| refused("futex(FUTEX_WAKE)", errno, UNMAPPED))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn a_wait_on_a_changed_word_does_not_sleep() {
        let word = AtomicU32::new(1);
        assert_eq!(wait(&word, 0, None).unwrap(), Wake::Changed);
        assert_eq!(wake(&word, u32::MAX).unwrap(), 0);
    }

    #[test]
    fn a_wait_times_out() {
        let word = AtomicU32::new(0);
        assert_eq!(wait(&word, 0, Some(Duration::from_millis(1))).unwrap(), Wake::TimedOut);
        assert_eq!(wait(&word, 0, Some(Duration::ZERO)).unwrap(), Wake::TimedOut);
    }

    #[test]
    fn a_sleeper_is_woken() {
        let word = AtomicU32::new(0);
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| wait(&word, 0, Some(Duration::MAX)).unwrap());
            while wake(&word, 1).unwrap() == 0 {
                std::thread::yield_now();
            }
            assert_eq!(sleeper.join().unwrap(), Wake::Woken);
        });
        assert_eq!(word.load(Ordering::Relaxed), 0);
    }
}
