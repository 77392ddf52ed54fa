//! Whether a descriptor's number still names the file that it named before.

use std::os::fd::RawFd;

use super::failpoint::failpoint;
use crate::error::{Error, Result};

/// What tells an open file from others.
///
/// Files, pipes and memfds are told apart by device and inode; so are pidfds since Linux 6.9. All eventfds, epolls and
/// older pidfds of a machine share one inode; there the kernel's own number in /proc/self/fdinfo decides: `eventfd-id`
/// (no two live eventfds share one; a number is used again only when nobody holds the old eventfd any more) and `Pid`.
///
/// It cannot tell: two descriptors of one file or of one open file; two epolls, timerfds, signalfds or inotifys; two
/// eventfds where /proc is not mounted; a file that was deleted and whose inode went to a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FdIdentity {
    device: u64,
    inode: u64,
    /// The kind of the file; 0 for what has no inode of its own.
    kind: u32,
    /// The kernel's own number, where the inode says too little.
    number: Option<u64>,
}

impl FdIdentity {
    /// The identity of what `fd` names now. Takes no lock, so a forked child can call it.
    pub fn of(fd: RawFd) -> Result<Self> {
        // SAFETY: a stat64 of zeroes is a valid one.
        let mut stat: libc::stat64 = unsafe { std::mem::zeroed() };
        // SAFETY: `stat` is a struct of ours for the kernel to fill; any number may be asked about.
        if failpoint!("fstat", -1, unsafe { libc::fstat64(fd, &mut stat) }) == -1 {
            return Err(Error::last_os("fstat", format!("descriptor {fd} was closed by somebody else")));
        }
        let kind = stat.st_mode & libc::S_IFMT;
        let number = if kind == 0 { kernel_number(fd) } else { None };
        Ok(Self { device: stat.st_dev, inode: stat.st_ino, kind, number })
    }

    /// Whether `fd` names a file of the same inode now: less sure than [`FdIdentity::still_is`], for one system call.
    pub fn same_inode(&self, fd: RawFd) -> bool {
        // SAFETY: a stat64 of zeroes is a valid one.
        let mut stat: libc::stat64 = unsafe { std::mem::zeroed() };
        // SAFETY: `stat` is a struct of ours for the kernel to fill; any number may be asked about.
        let answer = failpoint!("fstat", -1, unsafe { libc::fstat64(fd, &mut stat) });
        answer == 0
            && (self.device, self.inode, self.kind) == (stat.st_dev, stat.st_ino, stat.st_mode & libc::S_IFMT)
    }

    /// Whether `fd` names the same file now. False for a closed one.
    pub fn still_is(&self, fd: RawFd) -> bool {
        Self::of(fd).is_ok_and(|now| now == *self)
    }
}

/// The number that /proc/self/fdinfo shows for an eventfd or a pidfd.
fn kernel_number(fd: RawFd) -> Option<u64> {
    let mut path = [0_u8; 48];
    std::io::Write::write_fmt(&mut &mut path[..47], format_args!("/proc/self/fdinfo/{fd}")).ok()?;
    let mut text = [0_u8; 1024];
    // SAFETY: `path` ends with a NUL byte.
    let call = || unsafe { libc::open(path.as_ptr().cast(), libc::O_RDONLY | libc::O_CLOEXEC) };
    let file = failpoint!("fdinfo", -1, call());
    if file == -1 {
        return None;
    }
    // SAFETY: `text` has the room that is said, and the descriptor, which is ours, is closed once.
    let len = unsafe {
        let len = libc::read(file, text.as_mut_ptr().cast(), text.len());
        libc::close(file);
        len
    };
    number_in(&text[..usize::try_from(len).ok()?])
}

fn number_in(fdinfo: &[u8]) -> Option<u64> {
    for line in fdinfo.split(|byte| *byte == b'\n') {
        let Some(value) = line.strip_prefix(b"eventfd-id:").or_else(|| line.strip_prefix(b"Pid:")) else {
            continue;
        };
        return std::str::from_utf8(value).ok()?.trim().parse().ok();
    }
    None
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use super::super::event::EventFd;
    use super::super::memfd;
    use super::*;

    #[test]
    fn files_pipes_and_memfds_are_told_apart() {
        let (one, two) = (memfd::create("a", 1).unwrap(), memfd::create("a", 1).unwrap());
        let (reader, writer) = super::super::fork::pipe_cloexec().unwrap();
        let file = File::open("/proc/self/exe").unwrap();
        let fds = [one.as_raw_fd(), two.as_raw_fd(), reader.as_raw_fd(), file.as_raw_fd()];
        for (at, fd) in fds.iter().enumerate() {
            let identity = FdIdentity::of(*fd).unwrap();
            for (other_at, other) in fds.iter().enumerate() {
                assert_eq!(identity.still_is(*other), at == other_at, "{at} {other_at}");
            }
        }
        assert!(FdIdentity::of(reader.as_raw_fd()).unwrap().still_is(writer.as_raw_fd()));
    }

    #[test]
    fn eventfds_are_told_apart_and_keep_their_identity_when_they_ring() {
        let (one, two) = (EventFd::new().unwrap(), EventFd::new().unwrap());
        let identity = FdIdentity::of(one.as_fd().as_raw_fd()).unwrap();
        assert!(!identity.still_is(two.as_fd().as_raw_fd()));
        one.ring().unwrap();
        assert!(identity.still_is(one.as_fd().as_raw_fd()));
        let twin = one.as_fd().try_clone_to_owned().unwrap();
        assert!(identity.still_is(twin.as_raw_fd()));
    }

    #[test]
    fn a_closed_descriptor_is_nothing() {
        assert!(matches!(FdIdentity::of(-1), Err(Error::Os { call: "fstat", errno: libc::EBADF, .. })));
        let event = EventFd::new().unwrap();
        let identity = FdIdentity::of(event.as_fd().as_raw_fd()).unwrap();
        assert!(!identity.still_is(-1));
    }

    #[test]
    fn fdinfo_is_read_by_line() {
        assert_eq!(number_in(b"pos:\t0\nflags:\t02\neventfd-count: 0\neventfd-id: 17\n"), Some(17));
        assert_eq!(number_in(b"pos:\t0\nPid:\t4711\nNSpid:\t4711\n"), Some(4711));
        assert_eq!(number_in(b"pos:\t0\n"), None);
        assert_eq!(number_in(b"eventfd-id: x\n"), None);
    }
}
