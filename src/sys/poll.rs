//! Waits for many descriptors at once.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use super::clock::timespec;
use super::failpoint::failpoint;
use super::{descriptor_hint, errno};
use crate::config::{EPOLL_EVENTS, POLL_MAX};
use crate::error::{Error, Result};

/// Why [`PollSet::wait`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitOutcome {
    /// Some descriptors are readable, or at their end.
    Ready,
    /// The timeout expired.
    TimedOut,
    /// A signal was handled.
    Interrupted,
}

/// Descriptors to wait on until one is readable, each with a token of the caller's: ppoll for a few, epoll for more.
///
/// A descriptor must be removed before it is closed. The set works only in the process that made it: a forked child
/// shares the epoll with its parent, where its changes would apply too. In a child, dropping it does nothing.
#[derive(Debug)]
pub struct PollSet {
    /// `array[i]` belongs to `tokens[i]`.
    array: Vec<libc::pollfd>,
    tokens: Vec<u64>,
    /// Used once there were more than [`POLL_MAX`] descriptors, unless refused.
    epoll: Option<OwnedFd>,
    pid: u32,
}

impl Default for PollSet {
    fn default() -> Self {
        Self::new()
    }
}

impl PollSet {
    /// An empty set of this process.
    pub fn new() -> Self {
        Self { array: Vec::new(), tokens: Vec::new(), epoll: None, pid: std::process::id() }
    }

    /// The number of descriptors.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Adds `fd`, which the caller keeps open until [`PollSet::remove`].
    ///
    /// Errors: [`Error::Usage`] for a token or descriptor already in the set, or in a forked child.
    pub fn add(&mut self, fd: RawFd, token: u64) -> Result<()> {
        self.check_process()?;
        if self.tokens.contains(&token) {
            return Err(Error::usage(format!("token {token} is waited on twice")));
        }
        if self.array.iter().any(|entry| entry.fd == fd) {
            return Err(Error::usage(format!("descriptor {fd} is waited on twice")));
        }
        if self.epoll.as_ref().is_some_and(|epoll| register(epoll, fd, token).is_err()) {
            self.epoll = None;
        }
        self.array.push(libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
        self.tokens.push(token);
        if self.epoll.is_none() && self.array.len() > POLL_MAX {
            // If that fails (no descriptor left), ppoll serves any number.
            self.epoll = self.new_epoll().ok();
        }
        Ok(())
    }

    /// Removes the descriptor of `token`.
    ///
    /// Errors: [`Error::Usage`] for a token that is not in the set, or in a forked child.
    pub fn remove(&mut self, token: u64) -> Result<()> {
        self.check_process()?;
        let Some(at) = self.tokens.iter().position(|other| *other == token) else {
            return Err(Error::usage(format!("token {token} is not waited on")));
        };
        let fd = self.array.swap_remove(at).fd;
        self.tokens.swap_remove(at);
        let Some(epoll) = &self.epoll else { return Ok(()) };
        let (epoll, none) = (epoll.as_raw_fd(), std::ptr::null_mut());
        // SAFETY: EPOLL_CTL_DEL reads no event.
        let call = || unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_DEL, fd, none) };
        if failpoint!("epoll_ctl", -1, call()) == 0 {
            return Ok(());
        }
        // It was closed before. If a forked process still holds its file, the epoll reports it forever and only a new one
        // forgets it. Where that fails too, ppoll names the descriptor.
        self.epoll = self.new_epoll().ok();
        Ok(())
    }

    /// Waits until a descriptor is readable, for at most `timeout`, and writes the tokens of those that are into `ready`.
    /// An end of file, an error and an exited process count as readable. epoll reports at most 64 per wait.
    ///
    /// Errors: [`Error::Os`] `EBADF` for a descriptor closed before it was removed, [`Error::Usage`] in a forked child.
    pub fn wait(&mut self, timeout: Option<Duration>, ready: &mut Vec<u64>) -> Result<WaitOutcome> {
        ready.clear();
        self.check_process()?;
        match self.epoll.as_ref().map(|epoll| epoll_wait(epoll, timeout, ready)) {
            Some(Ok(outcome)) => Ok(outcome),
            refused => {
                if refused.is_some() {
                    self.epoll = None;
                }
                self.ppoll(timeout, ready)
            }
        }
    }

    fn ppoll(&mut self, timeout: Option<Duration>, ready: &mut Vec<u64>) -> Result<WaitOutcome> {
        let timeout = timeout.map(timespec);
        let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let (entries, count) = (self.array.as_mut_ptr(), self.array.len() as libc::nfds_t);
        // SAFETY: the array has `count` entries, and `timeout` is null or points to a timespec that outlives the call.
        let call = || unsafe { libc::ppoll(entries, count, timeout, std::ptr::null()) };
        let answer = failpoint!("ppoll", -1, call());
        if answer <= 0 {
            return nothing(answer, "ppoll");
        }
        for (entry, token) in self.array.iter().zip(&self.tokens) {
            if entry.revents & libc::POLLNVAL != 0 {
                let hint = format!("descriptor {} was closed by other code", entry.fd);
                return Err(Error::Os { call: "ppoll", errno: libc::EBADF, hint });
            }
            if entry.revents != 0 {
                ready.push(*token);
            }
        }
        Ok(WaitOutcome::Ready)
    }

    /// An epoll of all descriptors.
    fn new_epoll(&self) -> Result<OwnedFd> {
        // SAFETY: epoll_create1 takes a plain number.
        let fd = failpoint!("epoll_create", -1, unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) });
        if fd == -1 {
            return Err(Error::last_os("epoll_create1", descriptor_hint(errno())));
        }
        // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
        let epoll = unsafe { OwnedFd::from_raw_fd(fd) };
        for (entry, token) in self.array.iter().zip(&self.tokens) {
            register(&epoll, entry.fd, *token)?;
        }
        Ok(epoll)
    }

    fn check_process(&self) -> Result<()> {
        if self.pid == std::process::id() {
            return Ok(());
        }
        Err(Error::usage("a poll set was used in a forked child of the process that made it"))
    }
}

impl Drop for PollSet {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            // The number may name a file of the child's by now.
            std::mem::forget(self.epoll.take());
        }
    }
}

fn register(epoll: &OwnedFd, fd: RawFd, token: u64) -> Result<()> {
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: token };
    // SAFETY: `event` outlives the call, which copies it.
    let mut call = || unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &mut event) };
    if failpoint!("epoll_ctl", -1, call()) == 0 {
        return Ok(());
    }
    Err(Error::last_os_with("epoll_ctl", |errno| match errno {
        libc::ENOSPC => "raise the sysctl fs.epoll.max_user_watches".to_owned(),
        _ => format!("descriptor {fd} cannot be waited on"),
    }))
}

fn epoll_wait(epoll: &OwnedFd, timeout: Option<Duration>, ready: &mut Vec<u64>) -> Result<WaitOutcome> {
    // Rounded up, so that the caller does not spin through the last fraction of a millisecond.
    let millis =
        timeout.map_or(-1, |time| i32::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX));
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; EPOLL_EVENTS];
    let (fd, buffer) = (epoll.as_raw_fd(), events.as_mut_ptr());
    // SAFETY: `events` has room for EPOLL_EVENTS entries.
    let call = || unsafe { libc::epoll_wait(fd, buffer, EPOLL_EVENTS as i32, millis) };
    let answer = failpoint!("epoll_wait", -1, call());
    if answer <= 0 {
        return nothing(answer, "epoll_wait");
    }
    ready.extend(events[..answer as usize].iter().map(|event| event.u64));
    Ok(WaitOutcome::Ready)
}

/// The outcome for an answer of 0 or -1.
fn nothing(answer: i32, call: &'static str) -> Result<WaitOutcome> {
    match errno() {
        _ if answer == 0 => Ok(WaitOutcome::TimedOut),
        libc::EINTR => Ok(WaitOutcome::Interrupted),
        errno => Err(Error::last_os(call, descriptor_hint(errno))),
    }
}
