//! Exclusive access to an iterator.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

use crate::sync::lock;

/// A lock whose waits are bounded, so that callers can check for signals in between. It reports reentry by a signal
/// handler instead of deadlocking.
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    owner: Option<ThreadId>,
    /// Number of threads that wait for `freed`. If it is 0, `leave` makes no system call.
    waiting: usize,
}

/// The result of an attempt to enter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attempt {
    /// The caller has exclusive access until [`Gate::leave`].
    Entered,
    /// The calling thread already had exclusive access.
    Reentered,
    /// Another thread has exclusive access.
    Busy,
}

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Takes exclusive access if no thread has it.
    #[inline]
    pub fn try_enter(&self) -> Attempt {
        let (mut state, me) = (self.state(), thread::current().id());
        match state.owner {
            None => {
                state.owner = Some(me);
                Attempt::Entered
            }
            Some(owner) if owner == me => Attempt::Reentered,
            Some(_) => Attempt::Busy,
        }
    }

    /// Waits until another thread gives up exclusive access, for at most `limit`. Returns at once if no thread has it.
    /// The caller must try to enter again.
    pub fn wait(&self, limit: Duration) {
        let mut state = self.state();
        if state.owner.is_some() {
            state.waiting += 1;
            (state, _) = self.freed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
    }

    /// Ends the caller's exclusive access.
    #[inline]
    pub fn leave(&self) {
        let mut state = self.state();
        state.owner = None;
        if state.waiting > 0 {
            self.freed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_thread_cannot_enter_twice_nor_while_another_is_inside() {
        let gate = Arc::new(Gate::default());
        assert_eq!(gate.try_enter(), Attempt::Entered);
        assert_eq!(gate.try_enter(), Attempt::Reentered);
        let other = Arc::clone(&gate);
        assert_eq!(thread::spawn(move || other.try_enter()).join().unwrap(), Attempt::Busy);
        gate.leave();
        let other = Arc::clone(&gate);
        assert_eq!(thread::spawn(move || other.try_enter()).join().unwrap(), Attempt::Entered);
    }

    #[test]
    fn one_thread_at_a_time_is_inside_and_each_gets_in() {
        let (gate, inside) = (Arc::new(Gate::default()), Arc::new(AtomicUsize::new(0)));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let (gate, inside) = (Arc::clone(&gate), Arc::clone(&inside));
                thread::spawn(move || {
                    for _ in 0..200 {
                        while gate.try_enter() != Attempt::Entered {
                            gate.wait(Duration::from_secs(10));
                        }
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        inside.fetch_sub(1, Ordering::SeqCst);
                        gate.leave();
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(gate.state().waiting, 0);
    }

    #[test]
    fn a_wait_ends_after_its_slice() {
        let gate = Gate::default();
        gate.wait(Duration::from_secs(600));
        assert_eq!(gate.try_enter(), Attempt::Entered);
        gate.wait(Duration::from_millis(1));
        assert_eq!(gate.state().waiting, 0);
    }
}
