//! Forks: who is a child, and whether a child still lives.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::failpoint::failpoint;
use super::{descriptor_hint, errno, retry};
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
pub fn generation() -> u64 {
    // Who cannot do without has asked before.
    let _ = count_forks();
    GENERATION.load(Ordering::Relaxed)
}

/// Sees to it that [`generation`] counts.
pub fn count_forks() -> Result<()> {
    if !COUNTING.load(Ordering::Acquire) {
        // Two threads that come here at once install it twice, and a fork then counts two, which is as good.
        // SAFETY: the handler touches one atomic only and stays as long as the process (the library is not unloaded).
        at_fork(|| unsafe { libc::pthread_atfork(None, None, Some(raise_generation)) })?;
        COUNTING.store(true, Ordering::Release);
    }
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
/// answers false. The handlers must not panic; `child` may do only what is safe after a fork with other threads about.
pub fn on_fork(prepare: extern "C" fn(), parent: extern "C" fn(), child: extern "C" fn()) -> Result<bool> {
    count_forks()?;
    if HANDLING.swap(true, Ordering::AcqRel) {
        return Ok(false);
    }
    // SAFETY: the handlers are plain functions that stay as long as the process (the library is not unloaded).
    let call = || unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
    at_fork(call).inspect_err(|_| HANDLING.store(false, Ordering::Release))?;
    Ok(true)
}

/// The read end and the write end of a new pipe, both closed on exec. Processes forked from here on hold the write end
/// until they end or exec, which [`reads_eof`] sees.
pub fn pipe_cloexec() -> Result<(OwnedFd, OwnedFd)> {
    let mut ends = [-1; 2];
    // SAFETY: `ends` has room for the two descriptors.
    let mut call = || unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) };
    if failpoint!("pipe2", -1, call()) == -1 {
        return Err(Error::last_os("pipe2", descriptor_hint(errno())));
    }
    // SAFETY: the kernel has just made both descriptors, and nobody else owns them.
    Ok(unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) })
}

/// Whether every holder of the pipe's write end is gone. Never blocks. False where it cannot be told.
pub fn reads_eof(fd: BorrowedFd<'_>) -> bool {
    let mut entry = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: `entry` is one entry, as said.
    let answer = retry(|| failpoint!("pipe_poll", -1, unsafe { libc::poll(&mut entry, 1, 0) }));
    answer == 1 && entry.revents & libc::POLLHUP != 0
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn the_end_comes_with_the_last_writer() {
        let (reader, writer) = pipe_cloexec().unwrap();
        let twin = writer.try_clone().unwrap();
        assert!(!reads_eof(reader.as_fd()));
        drop(writer);
        assert!(!reads_eof(reader.as_fd()));
        drop(twin);
        assert!(reads_eof(reader.as_fd()));
    }
}
