//! Sleeps on a word in memory that processes share.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

use super::clock::timespec;
use super::errno;
use super::failpoint::failpoint;
use crate::error::{Error, Result};

/// Why [`wait`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// By [`wake`], or spuriously: check the word again.
    Woken,
    /// The word differed from the expected value, so there was no sleep.
    Changed,
    /// The timeout expired.
    TimedOut,
    /// A signal was handled.
    Interrupted,
}

/// Sleeps until [`wake`] while `word` is `expected`, without a timeout for as long as it takes. The futex is not private:
/// the word may lie in a mapping that other processes share.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) -> Result<Wake> {
    let timeout = timeout.map(timespec);
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `word` is a live aligned word, and `timeout` is null or points to a timespec that outlives the call.
    let call =
        || unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, expected, timeout) };
    if failpoint!("futex_wait", -1, call()) == 0 {
        return Ok(Wake::Woken);
    }
    match errno() {
        libc::EAGAIN => Ok(Wake::Changed),
        libc::ETIMEDOUT => Ok(Wake::TimedOut),
        libc::EINTR => Ok(Wake::Interrupted),
        _ => Err(Error::last_os("futex(FUTEX_WAIT)", "the word must lie in mapped memory")),
    }
}

/// Wakes up to `n` threads, of any process, that sleep on `word`; returns their number.
pub fn wake(word: &AtomicU32, n: u32) -> Result<u32> {
    let n = n.min(i32::MAX as u32);
    // SAFETY: `word` is a live aligned word; FUTEX_WAKE uses its address only.
    let call = || unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, n) };
    let woken = failpoint!("futex_wake", -1, call());
    if woken == -1 {
        return Err(Error::last_os("futex(FUTEX_WAKE)", "the word must lie in mapped memory"));
    }
    Ok(woken as u32)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn a_changed_word_does_not_sleep() {
        let word = AtomicU32::new(1);
        assert_eq!(wait(&word, 0, None).unwrap(), Wake::Changed);
        assert_eq!(wake(&word, u32::MAX).unwrap(), 0);
    }

    #[test]
    fn the_time_runs_out() {
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
