//! Processes: liveness, exit status, signals.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions};

use super::failpoint::failpoint;
use super::owned::KnownFd;
use super::{checked, descriptor_hint, read_file, refused, retry_on_intr};
use crate::error::{Error, Result};

/// `_IOWR(0xFF, 11, struct pidfd_info)` of <linux/pidfd.h>, for the struct's first 64 bytes.
const PIDFD_GET_INFO: u64 = 0xC040_FF0B;
/// In a request, asks for `exit_code`; in the reply, says that it is valid (Linux 6.15).
const PIDFD_INFO_EXIT: u64 = 1 << 3;

/// `struct pidfd_info` of <linux/pidfd.h>, in its first published size.
#[repr(C)]
#[derive(Default)]
struct PidfdInfo {
    mask: u64,
    cgroup_id: u64,
    pid: u32,
    tgid: u32,
    ppid: u32,
    /// Real, effective, saved and file system user and group IDs.
    ids: [u32; 8],
    exit_code: i32,
}

const _: () = assert!(size_of::<PidfdInfo>() == 64);

/// A process's exit status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitStatus {
    /// Exited with this code.
    Code(i32),
    /// Ended by this signal.
    Signal(i32),
}

/// A handle to a process. It never refers to a later process with the same pid.
#[derive(Debug)]
pub struct PidFd(KnownFd);

impl PidFd {
    /// Opens the process `pid`, which must be alive or not yet reaped. The descriptor is closed on exec.
    pub fn open(pid: i32) -> Result<Self> {
        let call = || rustix::process::pidfd_open(to_pid(pid)?, PidfdFlags::empty());
        let fd = failpoint!("pidfd_open", call()).map_err(|errno| {
            let hint = match errno {
                Errno::SRCH => format!("process {pid} no longer exists"),
                Errno::INVAL => format!("{pid} is not a process"),
                errno => descriptor_hint(errno).to_owned(),
            };
            refused("pidfd_open", errno, hint)
        })?;
        Ok(Self(KnownFd::new(fd)))
    }

    /// Returns true if the descriptor still names the process.
    pub fn is_intact(&self) -> bool {
        self.0.is_intact()
    }

    /// Returns true if the process has ended, reaped or not. Never blocks.
    pub fn has_exited(&self) -> Result<bool> {
        let mut entry = [PollFd::from_borrowed_fd(self.as_fd(), PollFlags::IN)];
        let mut call = || rustix::event::poll(&mut entry, Some(&Timespec::default()));
        retry_on_intr(|| failpoint!("pidfd_poll", call())).map_err(|errno| refused("poll(pidfd)", errno, ""))?;
        let events = entry[0].revents();
        if events.contains(PollFlags::NVAL) {
            return Err(refused("poll(pidfd)", Errno::BADF, "the descriptor was closed by other code"));
        }
        Ok(!events.is_empty())
    }

    /// Returns the exit status, without reaping. `None` while the process lives, or if the kernel does not report the
    /// status: before Linux 6.15, it does so only for unreaped children of this process.
    pub fn status(&self) -> Option<ExitStatus> {
        wait_status(WaitId::PidFd(self.as_fd())).unwrap_or_else(|_| self.recorded_status())
    }

    /// Returns the exit status that the kernel keeps for a process that was reaped elsewhere.
    fn recorded_status(&self) -> Option<ExitStatus> {
        let mut info = PidfdInfo { mask: PIDFD_INFO_EXIT, ..PidfdInfo::default() };
        // SAFETY: the request number encodes a size of 64 bytes, that of `info`.
        let mut call = || unsafe { libc::ioctl(self.0.as_fd().as_raw_fd(), PIDFD_GET_INFO as _, &raw mut info) };
        failpoint!("pidfd_get_info", checked(call())).ok()?;
        if info.mask & PIDFD_INFO_EXIT == 0 {
            return None;
        }
        let status = info.exit_code;
        Some(match libc::WIFSIGNALED(status) {
            true => ExitStatus::Signal(libc::WTERMSIG(status)),
            false => ExitStatus::Code(libc::WEXITSTATUS(status)),
        })
    }

    /// Sends `signal` to the process. Succeeds, without effect, if the process has ended.
    pub fn send_signal(&self, signal: i32) -> Result<()> {
        let (fd, none) = (self.0.as_fd().as_raw_fd(), std::ptr::null::<libc::siginfo_t>());
        // SAFETY: a null siginfo asks the kernel to fill in what kill(2) would.
        let call = || unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, signal, none, 0) };
        match failpoint!("pidfd_send_signal", checked(call())) {
            Ok(_) | Err(Errno::SRCH) => Ok(()),
            Err(errno) => {
                Err(refused("pidfd_send_signal", errno, format!("signal {signal} was not sent to a worker process")))
            }
        }
    }

    /// Returns the descriptor, which is readable after the process has ended.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Returns true if the process `pid` that started at `start_time` (at any time if 0) has ended, for systems without
/// pidfds. Children are checked with waitid, because /proc shows a zombie as soon as the main thread of a process has
/// ended, even while other threads run and there is no exit status yet.
pub fn has_exited(pid: i32, start_time: u64) -> bool {
    match status_of_child(pid) {
        Ok(Some(_)) => true,
        // If the start time differs, `pid` is now another child that reuses the number.
        Ok(None) => self::start_time(pid).is_ok_and(|time| start_time != 0 && time != start_time),
        Err(_) => !runs(pid, start_time),
    }
}

/// Returns the exit status of the child `pid`, without reaping, for systems without pidfds. `None` while the child
/// lives, and for a process that is not a child or was reaped.
pub fn child_status(pid: i32) -> Option<ExitStatus> {
    status_of_child(pid).ok().flatten()
}

fn status_of_child(pid: i32) -> rustix::io::Result<Option<ExitStatus>> {
    wait_status(WaitId::Pid(to_pid(pid)?))
}

/// Returns a process's exit status from waitid, without reaping.
fn wait_status(id: WaitId<'_>) -> rustix::io::Result<Option<ExitStatus>> {
    let flags = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    let status = retry_on_intr(|| failpoint!("waitid", rustix::process::waitid(id.clone(), flags)))?;
    Ok(status.and_then(|status| {
        let code = status.exit_status().map(ExitStatus::Code);
        code.or_else(|| status.terminating_signal().map(ExitStatus::Signal))
    }))
}

/// Converts a pid to rustix's type. Returns `EINVAL` for a number that cannot be a pid.
fn to_pid(pid: i32) -> rustix::io::Result<Pid> {
    Pid::from_raw(pid.max(0)).ok_or(Errno::INVAL)
}

/// Returns true if the process `pid` is an unreaped child of this process.
pub fn is_child(pid: i32) -> bool {
    status_of_child(pid).is_ok()
}

/// Returns true if the process `pid` is a child of this process, or a grandchild, as workers of multiprocessing's fork
/// server are. Returns false for this process, and for a number that names a process group or no process.
pub fn descends(pid: i32) -> bool {
    let me = std::process::id() as i32;
    if pid <= 0 || pid == me {
        return false;
    }
    let parent = parent(pid);
    // waitid works even if /proc is unreadable, or shows the pids of another namespace.
    parent == Some(me) || is_child(pid) || parent.is_some_and(|parent| parent > 0 && is_child(parent))
}

/// Returns the pid of the parent of the process `pid`, if /proc shows it.
fn parent(pid: i32) -> Option<i32> {
    let stat = read_file(format!("/proc/{pid}/stat").as_ref()).ok()?;
    parse_field(&stat, 4)
}

/// Returns the start time of the process `pid`, in clock ticks since boot. Together with the pid it identifies the
/// process.
pub fn start_time(pid: i32) -> Result<u64> {
    let path = format!("/proc/{pid}/stat");
    let text = read_file(path.as_ref()).map_err(|error| Error::Os {
        call: "read(/proc/PID/stat)",
        errno: error.raw_os_error().unwrap_or(libc::EIO),
        hint: format!("process {pid} is gone, or /proc is not mounted"),
    })?;
    parse_start_time(&text).ok_or_else(|| Error::Os {
        call: "read(/proc/PID/stat)",
        errno: libc::EIO,
        hint: format!("{path} has no field 22"),
    })
}

/// Returns true if the process `pid` that started at `start_time` (at any time if 0) is running; a zombie is not. If
/// /proc is unreadable, the result is that of signal 0, for which a zombie counts as running.
pub fn runs(pid: i32, start_time: u64) -> bool {
    let stat = match read_file(format!("/proc/{pid}/stat").as_ref()) {
        Ok(stat) => stat,
        // A missing file means a dead process only if other files of /proc exist. Other errors, such as a lack of
        // descriptors, do not show whether the process lives.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && read_file("/proc/self/stat".as_ref()).is_ok() => {
            return false;
        }
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return false,
        Err(_) => return exists(pid),
    };
    let state = stat.iter().rposition(|byte| *byte == b')').and_then(|end| stat.get(end + 2));
    let ended = matches!(state, Some(b'Z' | b'X'));
    !ended && (start_time == 0 || parse_start_time(&stat).is_none_or(|time| time == start_time))
}

/// Returns true if the process `pid` exists, perhaps as a zombie.
fn exists(pid: i32) -> bool {
    let call = || rustix::process::test_kill_process(to_pid(pid)?);
    failpoint!("kill", call()) != Err(Errno::SRCH)
}

fn parse_start_time(stat: &[u8]) -> Option<u64> {
    parse_field(stat, 22)
}

/// Returns a field by its number in proc(5), which must be at least 3. Field 2 is the program's name in parentheses,
/// and may itself contain spaces and parentheses.
fn parse_field<T: std::str::FromStr>(stat: &[u8], number: usize) -> Option<T> {
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let fields = std::str::from_utf8(&stat[end + 1..]).ok()?;
    fields.split_ascii_whitespace().nth(number - 3)?.parse().ok()
}

/// Returns the C library's name for a signal, such as "Killed" or "Segmentation fault".
pub fn signal_name(signal: i32) -> String {
    // SAFETY: strsignal returns null or a C string valid until this thread's next call.
    unsafe {
        let text = libc::strsignal(signal);
        if text.is_null() {
            return format!("Unknown signal {signal}");
        }
        CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_parentheses_do_not_shift_the_fields() {
        let tail = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21";
        assert_eq!(parse_start_time(format!("7 (a) 1 2 (b) {tail}").as_bytes()), Some(4711));
        assert_eq!(parse_field(format!("7 (a) 1 2 (b) {tail}").as_bytes(), 4), Some(1));
        assert_eq!(parse_start_time(b"7 (a"), None);
        assert_eq!(parse_start_time(b"7 (a) S 1"), None);
    }

    #[test]
    fn a_number_without_a_process_is_refused() {
        assert!(matches!(PidFd::open(i32::MAX), Err(Error::Os { call: "pidfd_open", errno: libc::ESRCH, .. })));
        assert!(matches!(PidFd::open(-1), Err(Error::Os { errno: libc::EINVAL, .. })));
        assert!(matches!(start_time(i32::MAX), Err(Error::Os { errno: libc::ENOENT, .. })));
    }

    #[test]
    fn signals_have_the_names_that_torch_shows() {
        assert_eq!(signal_name(libc::SIGKILL), "Killed");
        assert_eq!(signal_name(libc::SIGSEGV), "Segmentation fault");
    }
}
