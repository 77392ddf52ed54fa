//! A worker does not outlive the main process, not even inside an item of its dataset.
//!
//! A thread waits for the main process's end: on a pidfd, or where that is refused by looking every
//! [`PARENT_CHECK`] whether a process of that number and start time exists. Not PR_SET_PDEATHSIG: that fires when the
//! *thread* ends that forked. Once the main process is gone the worker is told to stop, and after [`ORPHAN_GRACE`] it is ended.

use std::sync::Arc;

use super::port::Port;
use crate::config::{ORPHAN_GRACE, PARENT_CHECK, WATCHDOG_STACK};
use crate::sys;

/// The main process, known by its number and its start time, so that a number used again is not taken for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parent {
    /// Process id.
    pub pid: i32,
    /// Start time in the kernel's ticks since boot; 0 where it could not be read.
    pub start_time: u64,
    /// It is the parent of the process that looks, which another one becomes at its end.
    is_direct: bool,
}

impl Parent {
    /// The calling process, to be told to its workers.
    pub fn this_process() -> Self {
        let pid = std::process::id() as i32;
        Self { pid, start_time: sys::pidfd::start_time(pid).unwrap_or(0), is_direct: false }
    }

    /// The main process, as one of its workers was told about it.
    pub fn told(pid: i32, start_time: u64) -> Self {
        Self { pid, start_time, is_direct: sys::signal::getppid() == pid }
    }

    /// Whether it still runs.
    pub fn is_alive(&self) -> bool {
        match self.is_direct {
            true => sys::signal::getppid() == self.pid,
            false => sys::pidfd::runs(self.pid, self.start_time),
        }
    }
}

/// Starts the watch.
pub fn start(port: Arc<Port>, parent: Parent) -> std::io::Result<()> {
    let watch = move || {
        sys::signal::block_all_in_this_thread();
        sys::thread::set_name("rl_watchdog");
        wait_for_the_end(parent);
        port.stop();
        std::thread::sleep(ORPHAN_GRACE);
        sys::signal::exit_now(1);
    };
    sys::thread::spawn("rl_watchdog", WATCHDOG_STACK, watch)
}

fn wait_for_the_end(parent: Parent) {
    // The descriptor is polled in one call: whatever a dataset does to the number meanwhile, the kernel waits on the
    // file that it named. Each answer is checked by pid and start time, because the next call may get another file.
    let pidfd = sys::pidfd::PidFd::open(parent.pid).ok();
    if let Some(pidfd) = &pidfd
        && parent.is_alive()
    {
        let mut set = sys::poll::PollSet::new();
        let mut ready = Vec::new();
        if set.add(std::os::fd::AsRawFd::as_raw_fd(&pidfd.as_fd()), 0).is_ok() {
            let _ = set.wait(None, &mut ready);
        }
    }
    // The number may be somebody else's file by now.
    std::mem::forget(pidfd);
    while parent.is_alive() {
        std::thread::sleep(PARENT_CHECK);
    }
}
