//! Anonymous files in memory.

use std::ffi::CString;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::failpoint::failpoint;
use super::{descriptor_hint, errno, retry};
use crate::error::{Error, Result};

/// The file can never be made executable (Linux 6.3). It also sets `F_SEAL_EXEC`.
const MFD_NOEXEC_SEAL: libc::c_uint = 0x0008;

/// Creates a file of `len` bytes without pages, closed on exec. /proc shows `name`.
///
/// Errors: [`Error::Os`] of `memfd_create`, or of `ftruncate` where `len` is too much (`EFBIG`, `ENOSPC`, `EINVAL`).
pub fn create(name: &str, len: u64) -> Result<OwnedFd> {
    let name = CString::new(name).map_err(|_| Error::usage("the name of a memfd has a NUL byte"))?;
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: `name` is a C string that outlives the call.
    let open = |flags| failpoint!("memfd_create", -1, unsafe { libc::memfd_create(name.as_ptr(), flags) });
    let mut fd = open(flags | MFD_NOEXEC_SEAL);
    if fd == -1 && errno() == libc::EINVAL {
        fd = open(flags);
    }
    if fd == -1 {
        return Err(Error::last_os("memfd_create", descriptor_hint(errno())));
    }
    // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    set_len(&fd, len)?;
    Ok(fd)
}

/// Sets the length of a new file. Checks the limit of file sizes first: exceeding it raises SIGXFSZ, which ends a
/// process that does not ignore it.
fn set_len(fd: &OwnedFd, len: u64) -> Result<()> {
    let refused = |errno, why: &str| {
        let hint = format!("a file of {len} bytes in memory was wanted{why}");
        Error::Os { call: "ftruncate", errno, hint }
    };
    let too_long = ": raise the limit of file sizes (`ulimit -f`, RLIMIT_FSIZE)";
    let Ok(wanted) = libc::off64_t::try_from(len) else { return Err(refused(libc::EFBIG, "")) };
    let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a local struct that the kernel fills.
    let mut call = || unsafe { libc::getrlimit64(libc::RLIMIT_FSIZE, &mut limit) };
    let known = failpoint!("getrlimit", -1, call()) == 0;
    if known && limit.rlim_cur != libc::RLIM64_INFINITY && len > limit.rlim_cur {
        return Err(refused(libc::EFBIG, too_long));
    }
    // SAFETY: ftruncate64 takes an open descriptor and a number.
    let call = || failpoint!("ftruncate", -1, unsafe { libc::ftruncate64(fd.as_raw_fd(), wanted) });
    if retry(call) == -1 {
        let errno = errno();
        return Err(refused(errno, if errno == libc::EFBIG { too_long } else { "" }));
    }
    Ok(())
}

/// Seals the length of a file of [`create`], so that no access to its mapping can be SIGBUS for want of length, and seals
/// the seals. Punching holes stays allowed. Sealing again is no error.
pub fn seal(fd: BorrowedFd<'_>) -> Result<()> {
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: fcntl with F_ADD_SEALS takes a number.
    if failpoint!("seal", -1, unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) }) == 0 {
        return Ok(());
    }
    let error = Error::last_os("fcntl(F_ADD_SEALS)", "the file must be a memfd that allows seals");
    // SAFETY: fcntl with F_GET_SEALS takes no further argument.
    let present = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    if present != -1 && present & seals == seals { Ok(()) } else { Err(error) }
}

/// Seals a file of [`create`] against writing, which the kernel refuses while any process maps it writable; returns
/// whether it is sealed.
pub fn seal_writing(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: fcntl with F_ADD_SEALS takes a number.
    let call = || unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_WRITE) };
    failpoint!("seal_write", -1, call()) == 0
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    fn descriptor_flags(fd: BorrowedFd<'_>) -> i32 {
        // SAFETY: fcntl with F_GETFD takes no further argument.
        unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) }
    }

    #[test]
    fn a_sealed_file_keeps_its_length() {
        let fd = create("rustloader-test", 1 << 20).unwrap();
        assert_eq!(descriptor_flags(fd.as_fd()), libc::FD_CLOEXEC);
        seal(fd.as_fd()).unwrap();
        seal(fd.as_fd()).unwrap();
        let file = File::from(fd);
        assert_eq!(file.metadata().unwrap().len(), 1 << 20);
        assert_eq!(file.set_len(0).unwrap_err().raw_os_error(), Some(libc::EPERM));
        assert_eq!(file.set_len(1 << 21).unwrap_err().raw_os_error(), Some(libc::EPERM));
    }

    #[test]
    fn a_length_that_the_kernel_cannot_have_is_refused() {
        let error = create("rustloader-test", u64::MAX).unwrap_err();
        assert!(matches!(error, Error::Os { call: "ftruncate", errno: libc::EFBIG, .. }), "{error}");
        assert!(matches!(create("a\0b", 1), Err(Error::Usage { .. })));
    }

    #[test]
    fn only_memfds_can_be_sealed() {
        let file = File::open("/proc/self/exe").unwrap();
        assert!(matches!(seal(file.as_fd()), Err(Error::Os { .. })));
    }
}
