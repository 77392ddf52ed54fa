//! A thread that ends the worker after the main process has ended, even while the dataset makes an item.
//!
//! It waits on a pidfd, or if that is refused checks every [`PARENT_CHECK`] for a process with that pid and start time.
//! (Not PR_SET_PDEATHSIG, which fires when the forking *thread* ends.) Then it stops the worker, and ends it after
//! [`ORPHAN_GRACE`].

use std::sync::Arc;

use super::port::Port;
use crate::config::{ORPHAN_GRACE, PARENT_CHECK, WATCHDOG_STACK};
use crate::sys;

/// The main process, identified by pid and start time, because pids are reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parent {
    /// Process id.
    pub pid: i32,
    /// Start time in kernel ticks since boot; 0 if unreadable.
    pub start_time: u64,
    /// True if it is the direct parent: when it ends, another process becomes the parent.
    is_direct: bool,
}

impl Parent {
    /// Returns the calling process.
    pub fn this_process() -> Self {
        let pid = std::process::id() as i32;
        Self { pid, start_time: sys::pidfd::start_time(pid).unwrap_or(0), is_direct: false }
    }

    /// Returns the main process, from the values of [`Parent::this_process`] there.
    pub fn of(pid: i32, start_time: u64) -> Self {
        Self { pid, start_time, is_direct: sys::signal::getppid() == pid }
    }

    /// Returns true if the main process runs.
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
    // A single poll: the kernel keeps waiting on the pidfd even if a dataset closes it. `is_alive` checks the result.
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
    // Forgotten instead of closed, because the number may belong to another file now.
    std::mem::forget(pidfd);
    while parent.is_alive() {
        std::thread::sleep(PARENT_CHECK);
    }
}
