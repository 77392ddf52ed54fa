//! The identity of an open file, which shows whether a descriptor's number still names the same file.

use std::os::fd::RawFd;

use super::failpoint::failpoint;
use super::{by_number, read_file, refused};
use crate::error::Result;

/// The identity of an open file: its device, inode and file type.
///
/// It cannot tell apart two descriptors of one file, two files that share an inode (eventfds, epoll instances, and
/// pidfds before Linux 6.9), or a deleted file and a later file that got its inode. /proc/self/fdinfo tells eventfds
/// apart, but reading it for each ring of a doorbell would cost three more system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FdIdentity {
    device: u64,
    inode: u64,
    /// The file type; 0 for files that share an anonymous inode.
    kind: u32,
}

impl FdIdentity {
    /// Returns the identity of the file that `fd` names. Takes no lock, so a forked child can call it.
    pub fn of(fd: RawFd) -> Result<Self> {
        Self::read(fd).map_err(|errno| refused("fstat", errno, format!("descriptor {fd} was closed by other code")))
    }

    fn read(fd: RawFd) -> rustix::io::Result<Self> {
        let stat = failpoint!("fstat", by_number(fd).and_then(rustix::fs::fstat))?;
        Ok(Self { device: stat.st_dev, inode: stat.st_ino, kind: stat.st_mode & libc::S_IFMT })
    }

    /// Returns the device and inode.
    pub fn place(&self) -> (u64, u64) {
        (self.device, self.inode)
    }

    /// Returns true if `fd` names a file with the same device, inode and file type; false if `fd` is closed.
    pub fn same_inode(&self, fd: RawFd) -> bool {
        Self::read(fd) == Ok(*self)
    }
}

/// Returns the ID that the kernel has given to the current boot of the machine; `None` if unknown.
pub fn boot_id() -> Option<Vec<u8>> {
    read_file("/proc/sys/kernel/random/boot_id".as_ref()).ok()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use super::super::event::EventFd;
    use super::super::memfd;
    use super::*;
    use crate::error::Error;

    #[test]
    fn files_pipes_and_memfds_are_distinguished() {
        let (one, two) = (memfd::create("a", 1).unwrap(), memfd::create("a", 1).unwrap());
        let (reader, writer) = std::io::pipe().unwrap();
        let file = File::open("/proc/self/exe").unwrap();
        let event = EventFd::new().unwrap();
        let fds = [one.as_raw_fd(), two.as_raw_fd(), reader.as_raw_fd(), file.as_raw_fd(), event.as_fd().as_raw_fd()];
        for (at, fd) in fds.iter().enumerate() {
            let identity = FdIdentity::of(*fd).unwrap();
            for (other_at, other) in fds.iter().enumerate() {
                assert_eq!(identity.same_inode(*other), at == other_at, "{at} {other_at}");
            }
        }
        assert!(FdIdentity::of(reader.as_raw_fd()).unwrap().same_inode(writer.as_raw_fd()));
    }

    #[test]
    fn a_closed_descriptor_has_no_identity() {
        assert!(matches!(FdIdentity::of(-1), Err(Error::Os { call: "fstat", errno: libc::EBADF, .. })));
        let event = EventFd::new().unwrap();
        let identity = FdIdentity::of(event.as_fd().as_raw_fd()).unwrap();
        assert!(!identity.same_inode(-1));
    }
}
