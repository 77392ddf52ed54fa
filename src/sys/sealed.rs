//! Memfds that nobody can change any more: written once by calls, sealed, then mapped.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

use super::failpoint::failpoint;
use super::map::address_space_hint;
use super::{errno, retry};
use crate::error::{Error, Result};

/// The seals of such a file: with them no access to a mapping of it can be SIGBUS, and its bytes never change.
const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_WRITE | libc::F_SEAL_SEAL;

/// Writes all bytes at a position of a memfd. Its pages come into being within the call, so that a lack of memory is an
/// error and not a SIGBUS.
///
/// Errors: [`Error::Os`], with `ENOMEM` or `ENOSPC` where the kernel has no page.
pub fn write_at(fd: BorrowedFd<'_>, mut bytes: &[u8], mut at: u64) -> Result<()> {
    while !bytes.is_empty() {
        let end = at.checked_add(bytes.len() as u64).and_then(|end| libc::off64_t::try_from(end).ok());
        let Some(end) = end else { return Err(too_long(at)) };
        let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: `limit` is a local struct that the kernel fills.
        let mut call = || unsafe { libc::getrlimit64(libc::RLIMIT_FSIZE, &mut limit) };
        // Beyond the limit the call would raise SIGXFSZ.
        let known = failpoint!("getrlimit", -1, call()) == 0;
        if known && limit.rlim_cur != libc::RLIM64_INFINITY && end as u64 > limit.rlim_cur {
            return Err(too_long(end as u64));
        }
        let (from, len, offset) = (bytes.as_ptr().cast(), bytes.len(), at as libc::off64_t);
        // SAFETY: the bytes are a slice's.
        let call = || failpoint!("pwrite", -1, unsafe { libc::pwrite64(fd.as_raw_fd(), from, len, offset) });
        match retry(call) {
            written @ 1.. => {
                bytes = bytes.get(written as usize..).unwrap_or_default();
                at += written as u64;
            }
            0 => return Err(Error::usage("pwrite wrote nothing")),
            _ if errno() == libc::EFBIG => return Err(too_long(end as u64)),
            _ => return Err(Error::last_os("pwrite", "the memory of a shared object could not be written")),
        }
    }
    Ok(())
}

fn too_long(len: u64) -> Error {
    let hint = format!(
        "a file of {len} bytes in memory was wanted: raise the limit of file sizes (`ulimit -f`, RLIMIT_FSIZE)"
    );
    Error::Os { call: "pwrite", errno: libc::EFBIG, hint }
}

/// Seals a memfd against every change, and the seals.
pub fn seal_all(fd: BorrowedFd<'_>) -> Result<()> {
    // SAFETY: fcntl with F_ADD_SEALS takes a number.
    if failpoint!("seal", -1, unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, SEALS) }) == 0 {
        return Ok(());
    }
    Err(Error::last_os("fcntl(F_ADD_SEALS)", "the kernel or its sandbox does not allow seals"))
}

/// A private mapping of a sealed file, inherited by forked children. A write through it, if it is writable, changes this
/// process's copy of a page alone.
#[derive(Debug)]
pub struct SealedMap {
    /// The first byte; on a page boundary.
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for SealedMap {}
// SAFETY: as above; `bytes` is only for mappings that nothing writes to.
unsafe impl Sync for SealedMap {}

impl SealedMap {
    /// Maps a whole file, which must have all seals.
    ///
    /// Errors: [`Error::Foreign`] if it lacks them or is empty, [`Error::Os`] of a refused call.
    pub fn new(fd: BorrowedFd<'_>, is_writable: bool) -> Result<Self> {
        // SAFETY: fcntl with F_GET_SEALS takes no further argument.
        let call = || unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
        let seals = failpoint!("get_seals", -1, call());
        if seals == -1 && errno() == libc::EBADF {
            return Err(Error::last_os("fcntl(F_GET_SEALS)", "the descriptor was closed by other code"));
        }
        if seals == -1 || seals & SEALS != SEALS {
            return Err(Error::foreign("it is no sealed file in memory"));
        }
        // SAFETY: a stat64 of zeroes is a valid one.
        let mut stat: libc::stat64 = unsafe { std::mem::zeroed() };
        // SAFETY: `stat` is a local struct that the kernel fills.
        if failpoint!("fstat", -1, unsafe { libc::fstat64(fd.as_raw_fd(), &mut stat) }) == -1 {
            return Err(Error::last_os("fstat", "the descriptor was closed by other code"));
        }
        let Some(len) = usize::try_from(stat.st_size).ok().filter(|len| *len > 0) else {
            return Err(Error::foreign("it is empty"));
        };
        let writing = if is_writable { libc::PROT_WRITE } else { 0 };
        // Pages that no process writes to need no swap space.
        let (protection, flags) = (libc::PROT_READ | writing, libc::MAP_PRIVATE | libc::MAP_NORESERVE);
        let (any, fd) = (std::ptr::null_mut(), fd.as_raw_fd());
        // SAFETY: the kernel chooses a free address range.
        let call = || unsafe { libc::mmap(any, len, protection, flags, fd, 0) };
        let start = failpoint!("mmap", libc::MAP_FAILED, call());
        if start == libc::MAP_FAILED {
            return Err(Error::last_os_with("mmap", |_| address_space_hint(len as u64)));
        }
        match NonNull::new(start.cast::<u8>()) {
            Some(start) => Ok(Self { start, len }),
            None => Err(Error::usage("mmap answered address 0")),
        }
    }

    /// The first byte, valid for [`SealedMap::len`] bytes while the mapping lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The length in bytes; never 0.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The bytes.
    ///
    /// # Safety
    /// Nothing writes through this mapping: it is not writable.
    pub unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: the file has this length, and its seals keep length and bytes.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for SealedMap {
    fn drop(&mut self) {
        // SAFETY: the range is this value's mapping, which nothing uses any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
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
        let (read, written) =
            (SealedMap::new(fd.as_fd(), false).unwrap(), SealedMap::new(fd.as_fd(), true).unwrap());
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
