//! The doorbell: an eventfd.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::EventfdFlags;
use rustix::io::Errno;

use super::failpoint::failpoint;
use super::owned::KnownFd;
use super::{descriptor_hint, refused, retry_on_intr};
use crate::error::Result;

/// The hint for the error of a descriptor that no longer names the eventfd.
const REPLACED: &str = "the descriptor was closed or replaced by other code";

/// A kernel counter that is readable while it is not zero. Neither ringing nor draining it blocks.
///
/// If other code has closed the descriptor and its number names another file, ringing and draining do nothing. So code
/// that waits for a ring must also check periodically.
#[derive(Debug)]
pub struct EventFd(KnownFd);

impl EventFd {
    /// Creates an eventfd at zero, which is closed on exec.
    pub fn new() -> Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let fd = failpoint!("eventfd", rustix::event::eventfd(0, flags));
        fd.map(Self::from_owned_fd).map_err(|errno| refused("eventfd", errno, descriptor_hint(errno)))
    }

    /// Wraps a descriptor of an eventfd that [`EventFd::new`] created, perhaps in another process. Such an eventfd is
    /// non-blocking.
    pub fn from_owned_fd(fd: OwnedFd) -> Self {
        Self(KnownFd::new(fd))
    }

    /// Makes the eventfd readable.
    pub fn ring(&self) -> Result<()> {
        if !self.0.is_intact() {
            return Ok(());
        }
        let one = 1_u64.to_ne_bytes();
        match retry_on_intr(|| failpoint!("eventfd_write", rustix::io::write(self.as_fd(), &one))) {
            // A full counter is readable already.
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(errno) => Err(refused("write(eventfd)", errno, REPLACED)),
        }
    }

    /// Makes the eventfd unreadable until the next ring. Returns false if the descriptor's number names another file.
    /// Call it before you check for the work that the rings announced.
    pub fn drain(&self) -> Result<bool> {
        if !self.0.is_intact() {
            return Ok(false);
        }
        let mut count = [0_u8; 8];
        match retry_on_intr(|| failpoint!("eventfd_read", rustix::io::read(self.as_fd(), &mut count))) {
            Ok(_) | Err(Errno::AGAIN) => Ok(true),
            Err(errno) => Err(refused("read(eventfd)", errno, REPLACED)),
        }
    }

    /// Returns the descriptor to wait on.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;

    use rustix::event::{PollFd, PollFlags, Timespec};

    use super::*;
    use crate::error::Error;

    fn readable(event: &EventFd) -> bool {
        let mut entries = [PollFd::from_borrowed_fd(event.as_fd(), PollFlags::IN)];
        rustix::event::poll(&mut entries, Some(&Timespec::default())) == Ok(1)
    }

    #[test]
    fn many_rings_are_one_and_draining_twice_is_fine() {
        let event = EventFd::new().unwrap();
        assert!(!readable(&event));
        for _ in 0..3 {
            event.ring().unwrap();
        }
        assert!(readable(&event));
        assert!(event.drain().unwrap());
        assert!(!readable(&event));
        assert!(event.drain().unwrap());
    }

    #[test]
    fn a_full_counter_is_no_error() {
        let original = EventFd::new().unwrap();
        let event = EventFd::from_owned_fd(original.as_fd().try_clone_to_owned().unwrap());
        let max = (u64::MAX - 1).to_ne_bytes();
        assert_eq!(rustix::io::write(event.as_fd(), &max), Ok(8));
        event.ring().unwrap();
        assert!(readable(&event));
    }

    #[test]
    fn another_file_with_its_number_is_neither_written_nor_read() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(b"another file's").unwrap();
        for other in [reader.as_raw_fd(), writer.as_raw_fd()] {
            let event = EventFd::new().unwrap();
            // SAFETY: dup2 takes plain numbers; the number that it replaces is `event`'s.
            assert!(unsafe { libc::dup2(other, event.as_fd().as_raw_fd()) } != -1);
            event.ring().unwrap();
            assert!(!event.drain().unwrap());
        }
        drop(writer);
        assert_eq!(std::io::read_to_string(reader).unwrap(), "another file's");
    }

    #[test]
    fn a_descriptor_of_another_file_is_an_error() {
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let error = EventFd::from_owned_fd(file.into()).ring().unwrap_err();
        assert!(matches!(error, Error::Os { call: "write(eventfd)", errno: libc::EBADF, .. }), "{error}");
    }
}
