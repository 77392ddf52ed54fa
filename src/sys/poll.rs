//! Waiting on many descriptors at once.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::event::epoll::{CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::clock::timespec;
use super::failpoint::failpoint;
use super::{by_number, descriptor_hint, refused};
use crate::config::{EPOLL_EVENTS, POLL_MAX};
use crate::error::{Error, Result};

/// The reason why [`PollSet::wait`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitOutcome {
    /// At least one descriptor is readable, or at its end of file.
    Ready,
    /// The timeout expired.
    TimedOut,
    /// A signal was handled.
    Interrupted,
}

/// A set of descriptors to wait on, each with a token that the caller chooses. Uses ppoll for a few descriptors, and
/// epoll for more.
///
/// A descriptor must be removed before it is closed. The set works only in the process that created it: a forked child
/// shares the epoll instance with its parent, so the child's changes would apply to the parent too. In a child,
/// dropping the set does nothing.
#[derive(Debug)]
pub struct PollSet {
    /// `array[i]` belongs to `tokens[i]`.
    array: Vec<PollFd<'static>>,
    tokens: Vec<u64>,
    /// The epoll instance, created when the set first exceeds [`POLL_MAX`] descriptors; `None` before that, and if the
    /// system refuses to create it.
    epoll: Option<OwnedFd>,
    pid: u32,
}

impl Default for PollSet {
    fn default() -> Self {
        Self::new()
    }
}

impl PollSet {
    /// Creates an empty set of this process.
    pub fn new() -> Self {
        Self { array: Vec::new(), tokens: Vec::new(), epoll: None, pid: std::process::id() }
    }

    /// Returns the number of descriptors.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns true if there are no descriptors.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Adds `fd`, which the caller must keep open until [`PollSet::remove`].
    ///
    /// Errors: [`Error::Usage`] for a token or descriptor already in the set, or in a forked child.
    pub fn add(&mut self, fd: RawFd, token: u64) -> Result<()> {
        self.check_process()?;
        if self.tokens.contains(&token) {
            return Err(Error::usage(format!("token {token} is already in the poll set")));
        }
        if self.array.iter().any(|entry| entry.as_fd().as_raw_fd() == fd) {
            return Err(Error::usage(format!("descriptor {fd} is already in the poll set")));
        }
        let fd = by_number(fd).map_err(|errno| refused("poll", errno, "the number is not a descriptor"))?;
        if self.epoll.as_ref().is_some_and(|epoll| register(epoll, fd, token).is_err()) {
            self.epoll = None;
        }
        self.array.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
        self.tokens.push(token);
        if self.epoll.is_none() && self.array.len() > POLL_MAX {
            // If this fails (for lack of a descriptor, say), ppoll is used: it works for any number of descriptors.
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
            return Err(Error::usage(format!("token {token} is not in the poll set")));
        };
        let entry = self.array.swap_remove(at);
        self.tokens.swap_remove(at);
        let Some(epoll) = &self.epoll else { return Ok(()) };
        if failpoint!("epoll_ctl", rustix::event::epoll::delete(epoll, entry.as_fd())).is_ok() {
            return Ok(());
        }
        // The descriptor was closed before it was removed. If a forked process still has the file open, the epoll
        // instance would report the file forever, so a new one replaces it. If that fails because another descriptor
        // was closed too, ppoll reports that descriptor.
        self.epoll = self.new_epoll().ok();
        Ok(())
    }

    /// Waits until a descriptor is readable, for at most `timeout`, and stores the tokens of the readable ones in
    /// `ready`. A descriptor at its end of file, with an error, or of an exited process counts as readable. epoll
    /// reports at most [`EPOLL_EVENTS`] descriptors per wait.
    ///
    /// Errors: [`Error::Os`] with `EBADF` for a descriptor that was closed before it was removed, [`Error::Usage`] in a
    /// forked child.
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
        let result = failpoint!("ppoll", rustix::event::poll(&mut self.array, timeout.as_ref()));
        if !matches!(result, Ok(1..)) {
            return no_event(result, "ppoll");
        }
        for (entry, token) in self.array.iter().zip(&self.tokens) {
            if entry.revents().contains(PollFlags::NVAL) {
                let hint = format!("descriptor {} was closed by other code", entry.as_fd().as_raw_fd());
                return Err(refused("ppoll", Errno::BADF, hint));
            }
            if !entry.revents().is_empty() {
                ready.push(*token);
            }
        }
        Ok(WaitOutcome::Ready)
    }

    /// Creates an epoll instance with all descriptors.
    fn new_epoll(&self) -> Result<OwnedFd> {
        let epoll = failpoint!("epoll_create", rustix::event::epoll::create(CreateFlags::CLOEXEC))
            .map_err(|errno| refused("epoll_create1", errno, descriptor_hint(errno)))?;
        for (entry, token) in self.array.iter().zip(&self.tokens) {
            register(&epoll, entry.as_fd(), *token)?;
        }
        Ok(epoll)
    }

    fn check_process(&self) -> Result<()> {
        if self.pid == std::process::id() {
            return Ok(());
        }
        Err(Error::usage("a poll set was used in a forked child of the process that created it"))
    }
}

impl Drop for PollSet {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            // In the child, the number may name another file by now.
            std::mem::forget(self.epoll.take());
        }
    }
}

fn register(epoll: &OwnedFd, fd: BorrowedFd<'_>, token: u64) -> Result<()> {
    let data = EventData::new_u64(token);
    failpoint!("epoll_ctl", rustix::event::epoll::add(epoll, fd, data, EventFlags::IN)).map_err(|errno| {
        let hint = match errno {
            Errno::NOSPC => "raise the sysctl fs.epoll.max_user_watches".to_owned(),
            _ => format!("descriptor {} cannot be waited on", fd.as_raw_fd()),
        };
        refused("epoll_ctl", errno, hint)
    })
}

fn epoll_wait(epoll: &OwnedFd, timeout: Option<Duration>, ready: &mut Vec<u64>) -> Result<WaitOutcome> {
    // epoll_wait takes at most this many milliseconds. rustix rounds up, so that the caller does not spin during the
    // last fraction of a millisecond.
    let timeout = timeout.map(|time| timespec(time.min(Duration::from_millis(i32::MAX as u64))));
    let mut events = [const { MaybeUninit::uninit() }; EPOLL_EVENTS];
    match failpoint!("epoll_wait", rustix::event::epoll::wait(epoll, &mut events, timeout.as_ref())) {
        Ok((occurred, _)) if !occurred.is_empty() => {
            ready.extend(occurred.iter().map(|event| event.data.u64()));
            Ok(WaitOutcome::Ready)
        }
        result => no_event(result.map(|_| 0), "epoll_wait"),
    }
}

/// Returns the outcome of a wait in which no descriptor became readable.
fn no_event(result: rustix::io::Result<usize>, call: &'static str) -> Result<WaitOutcome> {
    match result {
        Ok(_) => Ok(WaitOutcome::TimedOut),
        Err(Errno::INTR) => Ok(WaitOutcome::Interrupted),
        Err(errno) => Err(refused(call, errno, descriptor_hint(errno))),
    }
}
