//! A worker's process: its exit, its exit status, and signals to it. For a worker on another machine, the connection
//! stands in for the process.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Error;
use crate::sys;
use crate::sys::pidfd::ExitStatus;
use crate::transport::Link;

/// A worker's process.
#[derive(Debug)]
pub struct Process {
    /// The process ID; for a worker on another machine, the ID there.
    pub pid: i32,
    /// The pidfd. `None` if the system refuses pidfds, if the process was already gone, or for a worker on another
    /// machine.
    pub pidfd: Option<sys::pidfd::PidFd>,
    /// The start time in /proc, which distinguishes processes that reuse a pid; 0 if unreadable.
    start_time: u64,
    /// The monotonic time at which the process was registered.
    pub started: Duration,
    /// True if the process had already been reaped when it was registered, so that its pid may be reused.
    was_gone: bool,
    /// True if the worker is a descendant of the main process. Only descendants are signaled.
    pub(super) descends: bool,
    /// The connection to the worker, if it is on another machine.
    pub link: Option<Arc<Link>>,
}

impl Process {
    pub(super) fn open(pid: i32) -> Self {
        let start_time = sys::pidfd::start_time(pid).unwrap_or(0);
        let started = sys::clock::monotonic();
        let (pidfd, was_gone) = match sys::pidfd::PidFd::open(pid) {
            Ok(pidfd) => (Some(pidfd), false),
            Err(error) => (None, matches!(error, Error::Os { errno: libc::ESRCH, .. })),
        };
        let descends = sys::pidfd::descends(pid);
        Self { pid, pidfd, start_time, started, was_gone, descends, link: None }
    }

    /// Creates the record of a worker's process on another machine, which is connected through `link`.
    pub(super) fn remote(pid: i32, link: Arc<Link>) -> Self {
        let started = sys::clock::monotonic();
        let link = Some(link);
        Self { pid, pidfd: None, start_time: 0, started, was_gone: false, descends: false, link }
    }

    /// Returns a descriptor that becomes readable when the process ends, if there is one.
    pub(super) fn end_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.link {
            Some(link) => Some(link.end_fd()),
            None => self.pidfd.as_ref().map(sys::pidfd::PidFd::as_fd),
        }
    }

    /// Returns true if the process has ended, whether or not it has been reaped.
    pub fn has_exited(&self) -> bool {
        if let Some(link) = &self.link {
            return link.has_ended();
        }
        match &self.pidfd {
            // If the pidfd was closed, its number may now belong to a file that is readable, as the pidfd of an ended
            // process is.
            Some(pidfd) if !pidfd.is_intact() => self.has_exited_by_number(),
            Some(pidfd) => pidfd.has_exited().unwrap_or_else(|_| self.has_exited_by_number()),
            None => self.was_gone || self.has_exited_by_number(),
        }
    }

    fn has_exited_by_number(&self) -> bool {
        sys::pidfd::has_exited(self.pid, self.start_time)
    }

    /// Returns the exit status, if known.
    pub fn status(&self) -> Option<ExitStatus> {
        match &self.pidfd {
            Some(pidfd) => pidfd.status(),
            None if self.was_gone || self.link.is_some() => None,
            None => sys::pidfd::child_status(self.pid),
        }
    }

    pub(super) fn signal(&self, signal: i32) {
        if let Some(link) = &self.link {
            link.kill();
            // The process may be stopped, or its machine may be gone, so do not wait for a clean exit.
            if signal == libc::SIGKILL {
                link.cut("the main process has killed the worker");
            }
            return;
        }
        if !self.descends || self.has_exited() {
            return;
        }
        let sent = self.pidfd.as_ref().is_some_and(|pidfd| pidfd.send_signal(signal).is_ok());
        // Use the pid only if it certainly still belongs to the worker: the start time matches, or the process is a
        // child.
        let same =
            || self.start_time != 0 && sys::pidfd::start_time(self.pid).is_ok_and(|time| time == self.start_time);
        if !sent && (same() || sys::pidfd::is_child(self.pid)) {
            let _ = sys::signal::kill(self.pid, signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::{Command, Stdio};

    use super::*;
    use crate::sys::pidfd::PidFd;

    #[test]
    fn a_process_that_was_reaped_before_it_was_opened_has_exited() {
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let process = Process::open(child.id() as i32);
        assert!(process.has_exited() && process.was_gone);
        assert_eq!(process.status(), None);
        // Simulate another process that reuses the pid.
        let process = Process { pid: std::process::id() as i32, ..process };
        assert!(process.has_exited());
        process.signal(libc::SIGKILL);
    }

    #[test]
    fn this_process_and_unrelated_processes_are_not_signaled() {
        // Use SIGKILL, because a delivered signal 0 would go unnoticed, and SIGKILL would end the test.
        Process::open(std::process::id() as i32).signal(libc::SIGKILL);
        let parent = std::os::unix::process::parent_id() as i32;
        for pid in [0, -1, i32::MIN, 1, parent, i32::MAX] {
            assert!(!Process::open(pid).descends, "{pid}");
        }
    }

    #[test]
    fn a_grandchild_is_signaled_if_its_parent_was_a_child_at_registration() {
        // The shell and its child stand for a fork server and its worker.
        let mut shell = Command::new("sh")
            .args(["-c", "sleep 100 >&- & echo $!; exec >&-; wait"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut number = String::new();
        shell.stdout.take().unwrap().read_to_string(&mut number).unwrap();
        let process = Process::open(number.trim().parse().unwrap());
        assert!(process.descends);
        // The parent may end now, because the process is registered.
        shell.kill().unwrap();
        shell.wait().unwrap();
        process.signal(libc::SIGKILL);
        let deadline = sys::clock::monotonic() + Duration::from_secs(30);
        while !process.has_exited() {
            assert!(sys::clock::monotonic() < deadline);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn without_pidfd_and_start_time_only_a_child_is_signaled() {
        // The shell's child is not a child of this process. After the shell exits, init adopts it.
        let mut shell =
            Command::new("sh").args(["-c", "sleep 100 >&- & echo $!"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut number = String::new();
        shell.stdout.take().unwrap().read_to_string(&mut number).unwrap();
        shell.wait().unwrap();
        let started = Duration::ZERO;
        let unknown =
            |pid| Process { pid, pidfd: None, start_time: 0, started, was_gone: false, descends: true, link: None };
        let stranger = number.trim().parse().unwrap();
        let watch = PidFd::open(stranger).unwrap();
        unknown(stranger).signal(libc::SIGKILL);
        std::thread::sleep(Duration::from_millis(50));
        assert!(!watch.has_exited().unwrap());
        watch.send_signal(libc::SIGKILL).unwrap();

        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        unknown(child.id() as i32).signal(libc::SIGKILL);
        child.wait().unwrap();
    }
}
