//! Forks: whether this process is a forked child, and the hooks around a fork.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::failpoint::failpoint;
use crate::error::{Error, Result};

/// How many forks lie between this process and the one that asked first.
static GENERATION: AtomicU64 = AtomicU64::new(0);
/// The handler that raises [`GENERATION`] is in place.
static COUNTING: AtomicBool = AtomicBool::new(false);
/// The crate's handlers are in place.
static HANDLING: AtomicBool = AtomicBool::new(false);

extern "C" fn raise_generation() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// A number that is another one in every forked child. Whoever notes it when an object is made can tell later that the
/// object was made before a fork. One atomic load. `vfork` and a bare `clone` do not raise it.
#[inline]
pub fn generation() -> u64 {
    // SYNC: forks-counted (pairs with the Release in `install_counter`): who sees the flag relies on the handler.
    if !COUNTING.load(Ordering::Acquire) {
        // Who cannot do without has asked before.
        let _ = install_counter();
    }
    GENERATION.load(Ordering::Relaxed)
}

/// Sees to it that [`generation`] counts.
pub fn count_forks() -> Result<()> {
    // SYNC: forks-counted (pairs with the Release in `install_counter`).
    if COUNTING.load(Ordering::Acquire) { Ok(()) } else { install_counter() }
}

#[cold]
fn install_counter() -> Result<()> {
    // Two threads that come here at once install it twice, and a fork then counts two, which is as good.
    // SAFETY: the handler touches one atomic only and stays as long as the process (the library is not unloaded).
    at_fork(|| unsafe { libc::pthread_atfork(None, None, Some(raise_generation)) })?;
    // SYNC: forks-counted (pairs with the Acquires in `generation` and `count_forks`).
    COUNTING.store(true, Ordering::Release);
    Ok(())
}

/// Makes a call of pthread_atfork.
fn at_fork(call: impl Fn() -> i32) -> Result<()> {
    let refused = failpoint!("atfork", libc::ENOMEM, call());
    if refused == 0 {
        return Ok(());
    }
    let hint = "the C library has no memory left".to_owned();
    Err(Error::Os { call: "pthread_atfork", errno: refused, hint })
}

/// Has every fork of this process call `prepare` before it, in the forking thread, then `parent` in the parent and
/// `child` in the child, where [`generation`] has been raised before. Once a process: a later call changes nothing and
/// answers false. Two threads that call it at once may have them called twice, which they must bear. They must not panic;
/// `child` may do only what is safe after a fork with other threads about.
pub fn on_fork(prepare: extern "C" fn(), parent: extern "C" fn(), child: extern "C" fn()) -> Result<bool> {
    count_forks()?;
    if HANDLING.load(Ordering::Acquire) {
        return Ok(false);
    }
    // SAFETY: the handlers are plain functions that stay as long as the process (the library is not unloaded).
    let call = || unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
    at_fork(call)?;
    // SYNC: forks-handled (pairs with the Acquire above). Only now: whoever sees it relies on the handlers.
    HANDLING.store(true, Ordering::Release);
    Ok(true)
}
