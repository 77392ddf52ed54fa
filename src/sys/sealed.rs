//! Immutable memfds: they are written once with system calls, then sealed, then mapped.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::Resource;

use super::failpoint::failpoint;
use super::map::{map_file, size_of_file};
use super::{limit, refused, retry_on_intr};
use crate::error::{Error, Result};

/// The seals of an immutable memfd: no access to a mapping of it can raise SIGBUS, and its bytes never change.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::WRITE).union(SealFlags::SEAL);

/// Writes all of `bytes` at the position `at` of a memfd. The system call allocates the pages, so a lack of memory is
/// an error and not a SIGBUS.
///
/// Errors: [`Error::Os`], with `ENOMEM` or `ENOSPC` if the kernel has no page.
pub fn write_at(fd: BorrowedFd<'_>, mut bytes: &[u8], mut at: u64) -> Result<()> {
    while !bytes.is_empty() {
        let end = at.checked_add(bytes.len() as u64).filter(|end| i64::try_from(*end).is_ok());
        let Some(end) = end else { return Err(too_long(at)) };
        // Beyond the limit the call would raise SIGXFSZ.
        if limit(Resource::Fsize).is_some_and(|limit| end > limit) {
            return Err(too_long(end));
        }
        match retry_on_intr(|| failpoint!("pwrite", rustix::io::pwrite(fd, bytes, at))) {
            Ok(0) => return Err(Error::usage("pwrite wrote nothing")),
            Ok(written) => {
                bytes = bytes.get(written..).unwrap_or_default();
                at += written as u64;
            }
            Err(Errno::FBIG) => return Err(too_long(end)),
            Err(errno) => {
                return Err(refused("pwrite", errno, "a shared object or a cached sample could not be written"));
            }
        }
    }
    Ok(())
}

fn too_long(len: u64) -> Error {
    let hint =
        format!("a file of {len} bytes in memory is needed: raise the limit of file sizes (`ulimit -f`, RLIMIT_FSIZE)");
    Error::Os { call: "pwrite", errno: libc::EFBIG, hint }
}

/// Seals a memfd against every change of its bytes, its length and its seals.
pub fn seal_all(fd: BorrowedFd<'_>) -> Result<()> {
    failpoint!("seal", rustix::fs::fcntl_add_seals(fd, SEALS))
        .map_err(|errno| refused("fcntl(F_ADD_SEALS)", errno, "the kernel or its sandbox does not allow seals"))
}

/// A private mapping of a sealed file, inherited by forked children. A write through a writable mapping changes only
/// this process's copy of a page.
#[derive(Debug)]
pub struct SealedMap {
    /// The address of the first byte; on a page boundary.
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for SealedMap {}
// SAFETY: as above; `bytes` requires a mapping to which nothing writes.
unsafe impl Sync for SealedMap {}

impl SealedMap {
    /// Maps a whole file, which must have all seals.
    ///
    /// Errors: [`Error::Foreign`] if the file lacks a seal or is empty, [`Error::Os`] for a refused call.
    pub fn new(fd: BorrowedFd<'_>, is_writable: bool) -> Result<Self> {
        match failpoint!("get_seals", rustix::fs::fcntl_get_seals(fd)) {
            Ok(seals) if seals.contains(SEALS) => {}
            Err(errno @ Errno::BADF) => {
                let hint = "the descriptor was closed by other code";
                return Err(refused("fcntl(F_GET_SEALS)", errno, hint));
            }
            _ => return Err(Error::foreign("it is not a sealed file in memory")),
        }
        let Some(len) = usize::try_from(size_of_file(fd)?).ok().filter(|len| *len > 0) else {
            return Err(Error::foreign("it is empty"));
        };
        let writing = if is_writable { ProtFlags::WRITE } else { ProtFlags::empty() };
        let start = map_file(fd, len, ProtFlags::READ | writing, MapFlags::PRIVATE)?;
        Ok(Self { start, len })
    }

    /// Returns the address of the first byte, valid for [`SealedMap::len`] bytes while the mapping lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns the length in bytes; never 0.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the bytes.
    ///
    /// # Safety
    /// The mapping must not be writable, so that nothing can write through it.
    pub unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: the file has this length, and its seals preserve length and bytes.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for SealedMap {
    fn drop(&mut self) {
        // SAFETY: the range is this value's mapping, which is no longer used.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;
    use crate::sys::memfd;

    #[test]
    fn a_sealed_file_is_read_and_never_changes() {
        let fd = memfd::create("rustloader-test", 0).unwrap();
        write_at(fd.as_fd(), b"hello", 0).unwrap();
        write_at(fd.as_fd(), b"p!", 3).unwrap();
        assert!(matches!(SealedMap::new(fd.as_fd(), false), Err(Error::Foreign { .. })));
        seal_all(fd.as_fd()).unwrap();
        let (read, written) = (SealedMap::new(fd.as_fd(), false).unwrap(), SealedMap::new(fd.as_fd(), true).unwrap());
        // SAFETY: only the other mapping is writable, and it is private.
        assert_eq!(unsafe { read.bytes() }, b"help!");
        // SAFETY: the mapping is writable and has 5 bytes.
        unsafe { written.as_ptr().write(b'y') };
        // SAFETY: as above.
        assert_eq!(unsafe { read.bytes() }, b"help!");
        assert!(matches!(write_at(fd.as_fd(), b"x", 0), Err(Error::Os { errno: libc::EPERM, .. })));
        assert_eq!(File::from(fd).set_len(0).unwrap_err().raw_os_error(), Some(libc::EPERM));
    }

    #[test]
    fn other_files_are_refused() {
        let file = File::open("/proc/self/exe").unwrap();
        assert!(matches!(SealedMap::new(file.as_fd(), false), Err(Error::Foreign { .. })));
        let empty = memfd::create("rustloader-test", 0).unwrap();
        seal_all(empty.as_fd()).unwrap();
        assert!(matches!(SealedMap::new(empty.as_fd(), false), Err(Error::Foreign { .. })));
        assert!(matches!(write_at(empty.as_fd(), b"x", u64::MAX), Err(Error::Os { errno: libc::EFBIG, .. })));
    }
}
