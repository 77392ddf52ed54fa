//! Detects forks, and installs hooks around them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::failpoint::failpoint;
use crate::error::{Error, Result};

/// Forks between this process and the one that called first.
static GENERATION: AtomicU64 = AtomicU64::new(0);
/// Whether the handler that raises [`GENERATION`] is installed.
static COUNTING: AtomicBool = AtomicBool::new(false);

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

/// Handlers around forks.
#[derive(Debug)]
pub struct ForkHandlers {
    /// Runs before every fork, in the forking thread.
    pub prepare: extern "C" fn(),
    /// Runs in the parent after it, in the same thread, also if the fork fails.
    pub parent: extern "C" fn(),
    /// Runs in the child, after [`generation`] was raised. Must be safe after a fork of a process with threads.
    pub child: extern "C" fn(),
}

/// Installs handlers, which must not panic; `installed` belongs to them. A second call in a process changes nothing and returns
/// false. Two concurrent calls may install them twice, which they must tolerate.
pub fn on_fork(handlers: ForkHandlers, installed: &'static AtomicBool) -> Result<bool> {
    count_forks()?;
    if installed.load(Ordering::Acquire) {
        return Ok(false);
    }
    let ForkHandlers { prepare, parent, child } = handlers;
    // SAFETY: the handlers are plain functions that stay as long as the process (the library is not unloaded).
    let call = || unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
    at_fork(call)?;
    // SYNC: forks-handled (pairs with the Acquire above). Last: the flag implies the handlers.
    installed.store(true, Ordering::Release);
    Ok(true)
}
