//! A thread that ends the worker after the main process has ended, even while the dataset is producing a sample.
//!
//! The thread waits on a pidfd of the main process. If the system refuses a pidfd, the thread checks every
//! [`PARENT_CHECK`] whether the main process is still running ([`Parent::is_alive`]). Once the main process has ended,
//! the thread asks the worker to stop, and ends the worker after [`ORPHAN_GRACE`]. (PR_SET_PDEATHSIG does not help,
//! because it fires when the forking *thread* ends.)

use std::sync::Arc;

use super::port::Port;
use crate::config::{ORPHAN_GRACE, PARENT_CHECK, WATCHDOG_STACK};
use crate::sys;

/// The main process, identified by pid and start time, because pids are reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parent {
    /// The process ID.
    pub pid: i32,
    /// The start time in clock ticks since boot; 0 if unreadable.
    pub start_time: u64,
    /// True if the main process is this process's direct parent. When a direct parent ends, another process becomes the
    /// parent.
    is_direct: bool,
}

impl Parent {
    /// Returns the identity of the calling process, for its future workers.
    pub fn this_process() -> Self {
        let pid = std::process::id() as i32;
        Self { pid, start_time: sys::pidfd::start_time(pid).unwrap_or(0), is_direct: false }
    }

    /// Returns the identity of the main process, in a worker. The arguments are the values that
    /// [`Parent::this_process`] returned in the main process.
    pub fn of(pid: i32, start_time: u64) -> Self {
        Self { pid, start_time, is_direct: sys::signal::getppid() == pid }
    }

    /// Returns true if the main process is still running.
    pub fn is_alive(&self) -> bool {
        match self.is_direct {
            true => sys::signal::getppid() == self.pid,
            false => sys::pidfd::runs(self.pid, self.start_time),
        }
    }
}

/// Starts the watchdog's thread.
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
    // Poll only once: during that call the kernel waits on the pidfd even if a dataset closes it. `is_alive` checks the
    // result.
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
    // Do not close the pidfd, because its number may belong to another file by now.
    std::mem::forget(pidfd);
    while parent.is_alive() {
        std::thread::sleep(PARENT_CHECK);
    }
}
