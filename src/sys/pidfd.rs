//! Processes: liveness, exit status, signals.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::failpoint::failpoint;
use super::owned::KnownFd;
use super::{descriptor_hint, errno, read_file, retry};
use crate::error::{Error, Result};

/// `_IOWR(0xFF, 11, struct pidfd_info)` of <linux/pidfd.h>, for the struct's first 64 bytes.
const PIDFD_GET_INFO: u64 = 0xC040_FF0B;
/// Requests `exit_code`, and reports that it is valid (Linux 6.15).
const PIDFD_INFO_EXIT: u64 = 1 << 3;

/// `struct pidfd_info` of <linux/pidfd.h>, its first published size.
#[repr(C)]
#[derive(Default)]
struct PidfdInfo {
    mask: u64,
    cgroup_id: u64,
    pid: u32,
    tgid: u32,
    ppid: u32,
    /// Real, effective, saved and file system user and group ids.
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

/// A process, protected from recycling of its number.
#[derive(Debug)]
pub struct PidFd(KnownFd);

impl PidFd {
    /// Opens the process `pid`, alive or not yet reaped. The descriptor is closed on exec.
    pub fn open(pid: i32) -> Result<Self> {
        // SAFETY: pidfd_open takes plain numbers.
        let call = || unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        let fd = failpoint!("pidfd_open", -1, call());
        if fd == -1 {
            let hint = |errno| match errno {
                libc::ESRCH => format!("there is no process {pid} any more"),
                libc::EINVAL => format!("{pid} is no process"),
                errno => descriptor_hint(errno).to_owned(),
            };
            return Err(Error::last_os_with("pidfd_open", hint));
        }
        // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
        Ok(Self(KnownFd::new(unsafe { OwnedFd::from_raw_fd(fd as i32) })))
    }

    /// Whether the descriptor still names the process.
    pub fn is_intact(&self) -> bool {
        self.0.is_intact()
    }

    /// Whether the process has ended, reaped or not. Never blocks.
    pub fn has_exited(&self) -> Result<bool> {
        let mut entry = libc::pollfd { fd: self.0.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: `entry` is one entry.
        let answer = retry(|| failpoint!("pidfd_poll", -1, unsafe { libc::poll(&mut entry, 1, 0) }));
        if answer == -1 {
            return Err(Error::last_os("poll(pidfd)", ""));
        }
        if entry.revents & libc::POLLNVAL != 0 {
            let hint = "the descriptor was closed by other code".to_owned();
            return Err(Error::Os { call: "poll(pidfd)", errno: libc::EBADF, hint });
        }
        Ok(entry.revents != 0)
    }

    /// The exit status, without reaping. `None` while the process lives, or if the kernel does not report it: before Linux
    /// 6.15 it does only for unreaped children of this process.
    pub fn status(&self) -> Option<ExitStatus> {
        match wait_status(libc::P_PIDFD, self.0.as_fd().as_raw_fd() as libc::id_t) {
            Ok(status) => status,
            Err(()) => self.recorded_status(),
        }
    }

    /// The kernel's record of a process reaped elsewhere.
    fn recorded_status(&self) -> Option<ExitStatus> {
        let mut info = PidfdInfo { mask: PIDFD_INFO_EXIT, ..PidfdInfo::default() };
        // SAFETY: the request number encodes a size of 64 bytes, that of `info`.
        let mut call =
            || unsafe { libc::ioctl(self.0.as_fd().as_raw_fd(), PIDFD_GET_INFO as _, &raw mut info) };
        let answer = failpoint!("pidfd_get_info", -1, call());
        if answer == -1 || info.mask & PIDFD_INFO_EXIT == 0 {
            return None;
        }
        let status = info.exit_code;
        Some(match libc::WIFSIGNALED(status) {
            true => ExitStatus::Signal(libc::WTERMSIG(status)),
            false => ExitStatus::Code(libc::WEXITSTATUS(status)),
        })
    }

    /// Sends `signal` to the process; an ended one is no error.
    pub fn send_signal(&self, signal: i32) -> Result<()> {
        let (fd, none) = (self.0.as_fd().as_raw_fd(), std::ptr::null::<libc::siginfo_t>());
        // SAFETY: a null siginfo asks the kernel to fill in what kill(2) would.
        let call = || unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, signal, none, 0) };
        if failpoint!("pidfd_send_signal", -1, call()) == 0 || errno() == libc::ESRCH {
            return Ok(());
        }
        Err(Error::last_os_with("pidfd_send_signal", |_| format!("signal {signal} to a worker process")))
    }

    /// The descriptor, readable once the process has ended.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Whether the process `pid` started at `start_time` (0: any) has ended, for systems without pidfds. Children are
/// checked by waitid: /proc shows a zombie while other threads of it run, before its status is available.
pub fn has_exited(pid: i32, start_time: u64) -> bool {
    match wait_status(libc::P_PID, pid as libc::id_t) {
        Ok(Some(_)) => true,
        // A different start time: another child reused the number.
        Ok(None) => self::start_time(pid).is_ok_and(|time| start_time != 0 && time != start_time),
        Err(()) => !runs(pid, start_time),
    }
}

/// The exit status of the child `pid`, without reaping, for systems without pidfds. `None` while it lives, and for a
/// process that is no child or was reaped.
pub fn child_status(pid: i32) -> Option<ExitStatus> {
    wait_status(libc::P_PID, libc::id_t::try_from(pid).ok()?).ok().flatten()
}

/// A process's status by waitid, without reaping; an error where waitid fails.
fn wait_status(kind: libc::idtype_t, id: libc::id_t) -> std::result::Result<Option<ExitStatus>, ()> {
    // SAFETY: a siginfo_t of zeroes is a valid one.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: `info` is a local struct that the kernel fills.
    let mut call = || unsafe { libc::waitid(kind, id, &mut info, flags) };
    if retry(|| failpoint!("waitid", -1, call())) == -1 {
        return Err(());
    }
    // SAFETY: waitid has filled in a child's fields, or left the zeroes.
    let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
    Ok(match info.si_code {
        _ if pid == 0 => None,
        libc::CLD_EXITED => Some(ExitStatus::Code(status)),
        libc::CLD_KILLED | libc::CLD_DUMPED => Some(ExitStatus::Signal(status)),
        _ => None,
    })
}

/// Whether the process `pid` is an unreaped child of this process.
pub fn is_child(pid: i32) -> bool {
    wait_status(libc::P_PID, pid as libc::id_t).is_ok()
}

/// Whether the process `pid` is a child or grandchild of this one, as under multiprocessing's fork server. False for
/// this process, and for a number that names a group or no process.
pub fn descends(pid: i32) -> bool {
    let me = std::process::id() as i32;
    if pid <= 0 || pid == me {
        return false;
    }
    let parent = parent(pid);
    // waitid serves where /proc is unreadable or shows other numbers.
    parent == Some(me) || is_child(pid) || parent.is_some_and(|parent| parent > 0 && is_child(parent))
}

/// The parent of the process `pid`, if /proc shows it.
fn parent(pid: i32) -> Option<i32> {
    let stat = read_file(format!("/proc/{pid}/stat").as_ref()).ok()?;
    parse_field(&stat, 4)
}

/// The start time of the process `pid`, in clock ticks since boot. With the number it identifies the process.
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

/// Whether the process `pid` started at `start_time` (0: any) runs; a zombie does not. Where /proc is unreadable, signal
/// 0 decides, which counts a zombie as running.
pub fn runs(pid: i32, start_time: u64) -> bool {
    let stat = match read_file(format!("/proc/{pid}/stat").as_ref()) {
        Ok(stat) => stat,
        // A missing file means a dead process only if other files of /proc exist; other errors (no descriptor left, say)
        // do not tell.
        Err(error)
            if error.kind() == std::io::ErrorKind::NotFound
                && read_file("/proc/self/stat".as_ref()).is_ok() =>
        {
            return false;
        }
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return false,
        Err(_) => return exists(pid),
    };
    let state = stat.iter().rposition(|byte| *byte == b')').and_then(|end| stat.get(end + 2));
    let ended = matches!(state, Some(b'Z' | b'X'));
    !ended && (start_time == 0 || parse_start_time(&stat).is_none_or(|time| time == start_time))
}

/// Whether the process `pid` exists, perhaps as a zombie.
fn exists(pid: i32) -> bool {
    // SAFETY: signal 0 only checks.
    let answer = failpoint!("kill", -1, unsafe { libc::kill(pid, 0) });
    answer == 0 || errno() != libc::ESRCH
}

fn parse_start_time(stat: &[u8]) -> Option<u64> {
    parse_field(stat, 22)
}

/// A field by its number in proc(5), from 3. Field 2 is the program's name in parentheses, which may contain blanks and
/// parentheses.
fn parse_field<T: std::str::FromStr>(stat: &[u8], number: usize) -> Option<T> {
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(&stat[end + 1..]).ok()?;
    rest.split_ascii_whitespace().nth(number - 3)?.parse().ok()
}

/// The C library's name of a signal, like "Killed" or "Segmentation fault".
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
    fn this_process_lives() {
        let me = std::process::id() as i32;
        let process = PidFd::open(me).unwrap();
        assert!(!process.has_exited().unwrap());
        assert_eq!(process.status(), None);
        process.send_signal(0).unwrap();
        assert_eq!(start_time(me).unwrap(), start_time(me).unwrap());
    }

    #[test]
    fn a_number_without_a_process_is_refused() {
        assert!(matches!(
            PidFd::open(i32::MAX),
            Err(Error::Os { call: "pidfd_open", errno: libc::ESRCH, .. })
        ));
        assert!(matches!(PidFd::open(-1), Err(Error::Os { errno: libc::EINVAL, .. })));
        assert!(matches!(start_time(i32::MAX), Err(Error::Os { errno: libc::ENOENT, .. })));
    }

    #[test]
    fn signals_have_the_names_that_torch_shows() {
        assert_eq!(signal_name(libc::SIGKILL), "Killed");
        assert_eq!(signal_name(libc::SIGSEGV), "Segmentation fault");
    }
}
