//! Detects forks, and installs hooks around them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::failpoint::failpoint;
use crate::error::{Error, Result};

/// Forks between this process and the one that called first.
static GENERATION: AtomicU64 = AtomicU64::new(0);
/// Whether the handler that raises [`GENERATION`] is installed.
static COUNTING: AtomicBool = AtomicBool::new(false);
/// Whether the crate's handlers are installed.
static HANDLING: AtomicBool = AtomicBool::new(false);

extern "C" fn raise_generation() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// A number that differs in every forked child: an object that stores it knows later whether it was made before a
/// fork. One atomic load. `vfork` and a bare `clone` do not raise it.
#[inline]
pub fn generation() -> u64 {
    // SYNC: forks-counted (pairs with the Release in `install_counter`): the flag implies the handler.
    if !COUNTING.load(Ordering::Acquire) {
        // Callers that depend on it have called `count_forks` before.
        let _ = install_counter();
    }
    GENERATION.load(Ordering::Relaxed)
}

/// Installs the counter of [`generation`].
pub fn count_forks() -> Result<()> {
    // SYNC: forks-counted (pairs with the Release in `install_counter`).
    if COUNTING.load(Ordering::Acquire) { Ok(()) } else { install_counter() }
}

#[cold]
fn install_counter() -> Result<()> {
    // Two concurrent calls install it twice; a fork then counts two, which does no harm.
    // SAFETY: the handler touches one atomic only and stays as long as the process (the library is not unloaded).
    at_fork(|| unsafe { libc::pthread_atfork(None, None, Some(raise_generation)) })?;
    // SYNC: forks-counted (pairs with the Acquires in `generation` and `count_forks`).
    COUNTING.store(true, Ordering::Release);
    Ok(())
}

/// Runs a call of pthread_atfork.
fn at_fork(call: impl Fn() -> i32) -> Result<()> {
    let refused = failpoint!("atfork", libc::ENOMEM, call());
    if refused == 0 {
        return Ok(());
    }
    let hint = "the C library has no memory left".to_owned();
    Err(Error::Os { call: "pthread_atfork", errno: refused, hint })
}

/// Runs `prepare` before every fork, in the forking thread, then `parent` in the parent and `child` in the child, after
/// [`generation`] was raised. A second call in a process changes nothing and returns false. Two concurrent calls may
/// install the handlers twice, which these must tolerate. They must not panic; `child` must be safe after a fork of a
/// process with threads.
pub fn on_fork(prepare: extern "C" fn(), parent: extern "C" fn(), child: extern "C" fn()) -> Result<bool> {
    count_forks()?;
    if HANDLING.load(Ordering::Acquire) {
        return Ok(false);
    }
    // SAFETY: the handlers are plain functions that stay as long as the process (the library is not unloaded).
    let call = || unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
    at_fork(call)?;
    // SYNC: forks-handled (pairs with the Acquire above). Last: the flag implies the handlers.
    HANDLING.store(true, Ordering::Release);
    Ok(true)
}
