//! Atomics from the standard library or, for the loom models (`--cfg loom`), from loom; and functions that lock a mutex
//! even if it is poisoned.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Locks a mutex, even if a thread panicked while it held the lock. Use it only for data that are consistent after each
/// step.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Like [`lock`], but returns `None` while another thread holds the lock.
pub fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_whose_holder_has_panicked_can_be_taken() {
        let mutex = Mutex::new(0);
        std::thread::scope(|scope| {
            let holder = scope.spawn(|| {
                let _held = lock(&mutex);
                std::panic::resume_unwind(Box::new(()));
            });
            assert!(holder.join().is_err());
        });
        *lock(&mutex) += 1;
        let held = try_lock(&mutex).unwrap();
        assert_eq!(*held, 1);
        assert!(try_lock(&mutex).is_none());
    }
}
