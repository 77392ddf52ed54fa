//! Files of another process, read through /proc.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::failpoint::failpoint;
use super::identity::FdIdentity;
use super::{descriptor_hint, errno};
use crate::error::{Error, Result};

/// Opens what the process `pid` has under the number `fd`, if it is the file of this device and inode.
///
/// Errors: [`Error::Os`]: `EBADF` for another file; else that of `open`, where /proc is not mounted, hides the
/// process's files, or shows none of that number.
pub fn open(pid: i32, fd: i32, place: (u64, u64)) -> Result<OwnedFd> {
    let path = format!("/proc/{pid}/fd/{fd}\0");
    // Whatever the number names by now, opening it must neither wait nor make it this process's terminal.
    let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY;
    // SAFETY: `path` ends with a NUL byte.
    let call = || unsafe { libc::open(path.as_ptr().cast(), flags) };
    let file = failpoint!("peek", -1, call());
    if file == -1 {
        return Err(Error::last_os("open(/proc/PID/fd)", descriptor_hint(errno())));
    }
    // SAFETY: the kernel has just made this descriptor, and nobody else owns it.
    let file = unsafe { OwnedFd::from_raw_fd(file) };
    if FdIdentity::of(file.as_raw_fd())?.place() == place {
        return Ok(file);
    }
    let hint = format!("process {pid} has another file under the number {fd} by now");
    Err(Error::Os { call: "open(/proc/PID/fd)", errno: libc::EBADF, hint })
}

/// What the file holds from `start` on, at most `most` bytes.
pub fn read(file: BorrowedFd<'_>, start: usize, most: usize) -> Vec<u8> {
    let mut bytes = vec![0; most];
    // SAFETY: `bytes` has the room that is said.
    let len = unsafe { libc::pread(file.as_raw_fd(), bytes.as_mut_ptr().cast(), most, start as libc::off_t) };
    bytes.truncate(usize::try_from(len).unwrap_or(0));
    bytes
}

/// Bytes of the file; 0 where that cannot be told.
pub fn len(file: BorrowedFd<'_>) -> usize {
    // SAFETY: lseek takes plain numbers, and the descriptor's place in the file matters to nobody.
    let end = unsafe { libc::lseek(file.as_raw_fd(), 0, libc::SEEK_END) };
    usize::try_from(end).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use super::super::memfd;
    use super::*;

    #[test]
    fn only_the_file_that_is_meant_is_opened() {
        let me = std::process::id() as i32;
        let file = memfd::create("rustloader-test", 0).unwrap();
        let place = FdIdentity::of(file.as_raw_fd()).unwrap().place();
        let peeked = open(me, file.as_raw_fd(), place).unwrap();
        assert_eq!(len(peeked.as_fd()), 0);
        std::fs::File::from(file.try_clone().unwrap()).write_all_at(b"before after", 0).unwrap();
        assert_eq!(len(peeked.as_fd()), 12);
        assert_eq!(read(peeked.as_fd(), 7, 100), b"after");
        assert_eq!(read(peeked.as_fd(), 7, 2), b"af");
        let (reader, _writer) = std::io::pipe().unwrap();
        assert!(matches!(open(me, reader.as_raw_fd(), place), Err(Error::Os { errno: libc::EBADF, .. })));
        assert!(matches!(open(me, 1 << 20, place), Err(Error::Os { errno: libc::ENOENT, .. })));
    }
}
