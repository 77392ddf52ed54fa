//! Anonymous files in memory.

use std::ffi::CString;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::process::Resource;

use super::failpoint::failpoint;
use super::{descriptor_hint, limit, refused, retry_on_intr};
use crate::error::{Error, Result};

/// Creates a file of `len` bytes without pages. The descriptor is closed on exec; /proc shows the file as `name`.
///
/// Errors: [`Error::Os`] from `memfd_create`, or from `ftruncate` if `len` is too large (`EFBIG`, `ENOSPC`, `EINVAL`).
pub fn create(name: &str, len: u64) -> Result<OwnedFd> {
    let name = CString::new(name).map_err(|_| Error::usage("the name of a memfd has a NUL byte"))?;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let open = |flags| failpoint!("memfd_create", rustix::fs::memfd_create(&name, flags));
    // With this flag (Linux 6.3) the file can never be made executable. The flag also sets `F_SEAL_EXEC`.
    let fd = match open(flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => open(flags),
        result => result,
    };
    let fd = fd.map_err(|errno| refused("memfd_create", errno, descriptor_hint(errno)))?;
    set_len(&fd, len)?;
    Ok(fd)
}

/// Sets the length of a file. Checks the limit on file sizes first: exceeding it would raise SIGXFSZ, which ends a
/// process that does not ignore the signal.
pub fn set_len(fd: &OwnedFd, len: u64) -> Result<()> {
    let refused = |errno, remedy: &str| {
        let hint = format!("a file of {len} bytes in memory is needed{remedy}");
        refused("ftruncate", errno, hint)
    };
    let too_long = ": raise the limit of file sizes (`ulimit -f`, RLIMIT_FSIZE)";
    if i64::try_from(len).is_err() {
        return Err(refused(Errno::FBIG, ""));
    }
    if limit(Resource::Fsize).is_some_and(|limit| len > limit) {
        return Err(refused(Errno::FBIG, too_long));
    }
    retry_on_intr(|| failpoint!("ftruncate", rustix::fs::ftruncate(fd, len)))
        .map_err(|errno| refused(errno, if errno == Errno::FBIG { too_long } else { "" }))
}

/// Seals the length of a file that [`create`] made, so that no access to a mapping of it can raise SIGBUS because the
/// file was truncated. No other seals can be added afterwards, but holes can still be punched. Sealing a file twice is
/// no error.
pub fn seal(fd: BorrowedFd<'_>) -> Result<()> {
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let is_sealed = || rustix::fs::fcntl_get_seals(fd).is_ok_and(|present| present.contains(seals));
    match failpoint!("seal", rustix::fs::fcntl_add_seals(fd, seals)) {
        Err(errno) if !is_sealed() => {
            Err(refused("fcntl(F_ADD_SEALS)", errno, "the file must be a memfd that allows seals"))
        }
        _ => Ok(()),
    }
}

/// Seals a file that [`create`] made against writing. The kernel refuses this while any process has a writable mapping
/// of the file. Returns true if the file is sealed.
pub fn seal_writing(fd: BorrowedFd<'_>) -> bool {
    failpoint!("seal_write", rustix::fs::fcntl_add_seals(fd, SealFlags::WRITE)).is_ok()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_sealed_file_keeps_its_length() {
        let fd = create("rustloader-test", 1 << 20).unwrap();
        assert_eq!(rustix::io::fcntl_getfd(&fd), Ok(rustix::io::FdFlags::CLOEXEC));
        seal(fd.as_fd()).unwrap();
        seal(fd.as_fd()).unwrap();
        let file = File::from(fd);
        assert_eq!(file.metadata().unwrap().len(), 1 << 20);
        assert_eq!(file.set_len(0).unwrap_err().raw_os_error(), Some(libc::EPERM));
        assert_eq!(file.set_len(1 << 21).unwrap_err().raw_os_error(), Some(libc::EPERM));
    }

    #[test]
    fn a_length_that_is_too_large_is_refused() {
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
