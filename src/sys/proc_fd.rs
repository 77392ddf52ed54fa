//! Access to the open files of another process through /proc.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use super::failpoint::failpoint;
use super::identity::FdIdentity;
use super::{descriptor_hint, refused};
use crate::error::Result;

/// Opens the file that descriptor `fd` of the process `pid` names, if `place` is the file's device and inode. Never
/// opens another file: opening a FIFO wakes its other end, and opening a device may have any effect.
///
/// Errors: [`Error::Os`] with `EBADF` if the descriptor names another file, or with the errno of `open` if /proc is not
/// mounted, hides the process's files, or does not have the descriptor.
pub fn open(pid: i32, fd: i32, place: (u64, u64)) -> Result<OwnedFd> {
    // O_PATH does not open the file itself: the descriptor only allows fstat, and opening the file through /proc.
    let file = open_path(&format!("/proc/{pid}/fd/{fd}"), OFlags::PATH)?;
    if FdIdentity::of(file.as_raw_fd())?.place() == place {
        return open_path(&format!("/proc/self/fd/{}", file.as_raw_fd()), OFlags::RDONLY);
    }
    let hint = format!("descriptor {fd} of process {pid} now names another file");
    Err(refused("open(/proc/PID/fd)", Errno::BADF, hint))
}

fn open_path(path: &str, flags: OFlags) -> Result<OwnedFd> {
    let call = || rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty());
    failpoint!("peek", call()).map_err(|errno| refused("open(/proc/PID/fd)", errno, descriptor_hint(errno)))
}

/// Reads at most `max_len` bytes from `start` on. Returns no bytes on an error.
pub fn read(file: BorrowedFd<'_>, start: usize, max_len: usize) -> Vec<u8> {
    let mut bytes = vec![0; max_len];
    let len = rustix::io::pread(file, &mut bytes, start as u64);
    bytes.truncate(len.unwrap_or(0));
    bytes
}

/// Returns the file's length in bytes; 0 if unknown.
pub fn len(file: BorrowedFd<'_>) -> usize {
    // Nothing else uses this descriptor's file position.
    rustix::fs::seek(file, SeekFrom::End(0)).map_or(0, |end| end as usize)
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::io::Read;
    use std::os::fd::{AsFd, FromRawFd};
    use std::os::unix::fs::FileExt;

    use super::super::memfd;
    use super::*;
    use crate::error::Error;

    #[test]
    fn only_the_expected_file_is_opened() {
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

    #[test]
    fn another_file_is_not_opened() {
        let me = std::process::id() as i32;
        let memfd = memfd::create("rustloader-test", 0).unwrap();
        let place = FdIdentity::of(memfd.as_raw_fd()).unwrap().place();
        let path = std::env::temp_dir().join(format!("rustloader-test-fifo-{me}"));
        let name = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: `name` is a C string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        let fifo = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        // SAFETY: the calls take plain numbers and `name`, a C string.
        let watch = unsafe {
            let watch = libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK);
            assert!(libc::inotify_add_watch(watch, name.as_ptr(), libc::IN_OPEN) >= 0);
            std::fs::File::from_raw_fd(watch)
        };
        let was_opened = || (&watch).read(&mut [0; 4096]).is_ok();
        assert!(matches!(open(me, fifo.as_raw_fd(), place), Err(Error::Os { errno: libc::EBADF, .. })));
        assert!(!was_opened());
        drop(std::fs::File::options().read(true).write(true).open(&path).unwrap());
        assert!(was_opened(), "inotify must report the opening");
        std::fs::remove_file(&path).unwrap();
    }
}
