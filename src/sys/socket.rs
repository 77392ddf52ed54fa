//! A connected stream socket. Only [`Socket::wait`] blocks.

use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::Shutdown;

use super::clock::timespec;
use super::failpoint::failpoint;
use super::left_behind;
use super::owned::KnownFd;
use super::{checked, refused, retry_on_intr};
use crate::error::Result;

/// The hint for the error of a broken connection.
const BROKEN: &str = "the other end is gone, or the network between the machines is down";

/// The hint for the error of a descriptor that no longer names the socket.
const REPLACED: &str = "the descriptor was closed or replaced by other code";

/// The outcome of one call that sends or receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// This many bytes were transferred; at least one.
    Bytes(usize),
    /// No bytes can be transferred at the moment.
    Nothing,
    /// No more bytes will come: the other end has closed its side.
    End,
}

/// The outcome of [`Socket::wait`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// The socket has bytes, or is at its end.
    pub readable: bool,
    /// The bell is readable.
    pub rung: bool,
}

/// Bytes to send, as a pointer and a length. Other processes may change the bytes during the call, which a slice does
/// not allow.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Part<'a>(libc::iovec, PhantomData<&'a [u8]>);

impl<'a> Part<'a> {
    /// Describes the bytes of a slice.
    pub fn new(bytes: &'a [u8]) -> Self {
        // SAFETY: a slice can be read for its lifetime.
        unsafe { Self::raw(bytes.as_ptr(), bytes.len()) }
    }

    /// Describes the `len` bytes at `memory`.
    ///
    /// # Safety
    /// The bytes stay mapped and readable for `'a`. Their values may change.
    pub unsafe fn raw(memory: *const u8, len: usize) -> Self {
        Self(libc::iovec { iov_base: memory.cast_mut().cast(), iov_len: len }, PhantomData)
    }

    /// Removes the first `count` bytes of `parts`, and the leading parts that are then empty. Panics if there are fewer
    /// bytes.
    pub fn advance(parts: &mut &mut [Self], mut count: usize) {
        let mut done = 0;
        for Self(part, _) in parts.iter_mut() {
            let skipped = part.iov_len.min(count);
            // The part has at least this many bytes.
            part.iov_base = part.iov_base.wrapping_byte_add(skipped);
            part.iov_len -= skipped;
            count -= skipped;
            if part.iov_len > 0 {
                break;
            }
            done += 1;
        }
        assert!(count == 0, "{count} bytes more than the parts have");
        *parts = &mut std::mem::take(parts)[done..];
    }
}

/// A connected stream socket. A forked child closes its copy at once. If other code has closed the descriptor and its
/// number names another file, sending and receiving return an error.
#[derive(Debug)]
pub struct Socket(KnownFd);

impl Socket {
    /// Takes ownership of a connected socket.
    pub fn new(fd: OwnedFd) -> Self {
        left_behind::leave_behind(fd.as_fd());
        Self(KnownFd::new(fd))
    }

    /// Returns the descriptor.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn raw(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }

    fn check(&self, call: &'static str) -> Result<()> {
        match self.0.is_replaced() {
            true => Err(refused(call, Errno::BADF, REPLACED)),
            false => Ok(()),
        }
    }

    /// Makes the kernel detect that the other end is gone, even if no packet says so: the kernel probes an idle
    /// connection, and ends a connection whose bytes are not acknowledged within `limit`. Also makes TCP send small
    /// packets without delay. Has no effect on sockets other than TCP sockets.
    pub fn keep_alive(&self, limit: Duration) {
        let millis = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX) as u32;
        let part = |n| Duration::from_secs(u64::from(millis / 1000 / n).max(1));
        let _ = rustix::net::sockopt::set_socket_keepalive(self.as_fd(), true);
        let _ = rustix::net::sockopt::set_tcp_nodelay(self.as_fd(), true);
        let _ = rustix::net::sockopt::set_tcp_keepidle(self.as_fd(), part(2));
        let _ = rustix::net::sockopt::set_tcp_keepintvl(self.as_fd(), part(6));
        let _ = rustix::net::sockopt::set_tcp_keepcnt(self.as_fd(), 3);
        let _ = rustix::net::sockopt::set_tcp_user_timeout(self.as_fd(), millis);
    }

    /// Sends as many bytes as fit into the socket's buffer.
    pub fn send(&self, parts: &[Part<'_>]) -> Result<Transfer> {
        self.check("sendmsg")?;
        // SAFETY: an all-zero message header is valid: it has no address and no control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        // A Part has the layout of an iovec.
        message.msg_iov = parts.as_ptr().cast_mut().cast();
        message.msg_iovlen = parts.len() as _;
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: the header names `parts`, whose bytes stay readable during the call. Only the kernel reads them: if
        // they change during the call, old or new bytes are sent.
        let call = || unsafe { libc::sendmsg(self.raw(), &message, flags) };
        transfer(retry_on_intr(|| failpoint!("socket_send", checked(call()))), "sendmsg", false)
    }

    /// Receives the available bytes into `first` and, once that is full, into `second`. Both are given as an address
    /// and a length in bytes.
    ///
    /// # Safety
    /// The caller owns the bytes of `first` and `second`.
    pub unsafe fn receive(&self, first: (*mut u8, usize), second: (*mut u8, usize)) -> Result<Transfer> {
        self.check("recvmsg")?;
        let mut parts = [first, second].map(|(memory, len)| libc::iovec { iov_base: memory.cast(), iov_len: len });
        // SAFETY: an all-zero message header is valid: it has no address and no control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = parts.as_mut_ptr();
        message.msg_iovlen = parts.len() as _;
        // SAFETY: the header names `parts`, whose bytes the caller owns.
        let mut call = || unsafe { libc::recvmsg(self.raw(), &raw mut message, libc::MSG_DONTWAIT) };
        transfer(retry_on_intr(|| failpoint!("socket_receive", checked(call()))), "recvmsg", true)
    }

    /// Waits for bytes to receive if `receives` is set, for room to send if `sends` is set, for `bell` to become
    /// readable, or for a signal. Waits for at most `limit`.
    pub fn wait(
        &self,
        receives: bool,
        sends: bool,
        bell: Option<BorrowedFd<'_>>,
        limit: Option<Duration>,
    ) -> Result<Readiness> {
        let mut events = PollFlags::empty();
        events.set(PollFlags::IN, receives);
        events.set(PollFlags::OUT, sends);
        let second = bell.unwrap_or(self.as_fd());
        let mut entries =
            [(self.as_fd(), events), (second, PollFlags::IN)].map(|(fd, events)| PollFd::from_borrowed_fd(fd, events));
        let watched = &mut entries[..=usize::from(bell.is_some())];
        match failpoint!("ppoll", rustix::event::poll(watched, limit.map(timespec).as_ref())) {
            Err(Errno::INTR) => Ok(Readiness::default()),
            Err(errno) => Err(refused("ppoll", errno, BROKEN)),
            Ok(_) => Ok(Readiness {
                readable: !entries[0].revents().difference(PollFlags::OUT).is_empty(),
                rung: !entries[1].revents().is_empty(),
            }),
        }
    }

    /// Ends the connection in one or both directions, for all processes that share it.
    pub fn shut_down(&self, how: std::net::Shutdown) {
        if self.0.is_replaced() {
            return;
        }
        let how = match how {
            std::net::Shutdown::Read => Shutdown::Read,
            std::net::Shutdown::Write => Shutdown::Write,
            std::net::Shutdown::Both => Shutdown::Both,
        };
        // The system refuses this only if the connection has already ended.
        let _ = rustix::net::shutdown(self.as_fd(), how);
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        left_behind::forget(self.as_fd());
    }
}

fn transfer(count: rustix::io::Result<isize>, call: &'static str, receives: bool) -> Result<Transfer> {
    match count {
        Ok(0) if receives => Ok(Transfer::End),
        Ok(0) | Err(Errno::AGAIN) => Ok(Transfer::Nothing),
        Ok(count) => Ok(Transfer::Bytes(count as usize)),
        Err(errno) => Err(refused(call, errno, BROKEN)),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::error::Error;
    use crate::sys::event::EventFd;

    #[test]
    fn a_call_transfers_available_bytes_and_reports_the_end() {
        let (one, other) = UnixStream::pair().unwrap();
        let (one, other) = (Socket::new(one.into()), Socket::new(other.into()));
        one.keep_alive(Duration::from_secs(10));
        let mut bytes = [0; 8];
        // SAFETY: `bytes` is a local array.
        let mut receive = || unsafe {
            let (first, second) = bytes.split_at_mut(2);
            other.receive((first.as_mut_ptr(), 2), (second.as_mut_ptr(), 6))
        };
        assert_eq!(receive().unwrap(), Transfer::Nothing);
        assert_eq!(one.send(&[Part::new(b"ab"), Part::new(b"c")]).unwrap(), Transfer::Bytes(3));
        assert_eq!(receive().unwrap(), Transfer::Bytes(3));
        while one.send(&[Part::new(&[0; 4096])]).unwrap() != Transfer::Nothing {}
        while receive().unwrap() != Transfer::Nothing {}
        one.shut_down(std::net::Shutdown::Both);
        assert_eq!(receive().unwrap(), Transfer::End);
        assert!(one.send(&[Part::new(b"d")]).is_err());
        assert_eq!(&bytes[..1], [0]);
    }

    #[test]
    fn bytes_of_parts_are_skipped_and_empty_parts_removed() {
        let all: Vec<u8> = (0..10).collect();
        let parts = || [&all[..0], &all[..3], &all[3..3], &all[3..4], &all[4..]].map(Part::new);
        for step in 1..=10 {
            let mut parts = parts();
            let mut left = &mut parts[..];
            Part::advance(&mut left, 0);
            for begin in (0..10).step_by(step) {
                let part = left[0].0;
                // SAFETY: the remainder of a part is in `all`.
                let first = unsafe { *part.iov_base.cast::<u8>() };
                assert_eq!(usize::from(first), begin);
                assert_eq!(left.iter().map(|part| part.0.iov_len).sum::<usize>(), 10 - begin);
                Part::advance(&mut left, step.min(10 - begin));
            }
            assert!(left.is_empty());
        }
    }

    #[test]
    #[should_panic(expected = "1 bytes more than the parts have")]
    fn more_bytes_than_there_are_cannot_be_skipped() {
        Part::advance(&mut &mut [Part::new(b"ab")][..], 3);
    }

    #[test]
    fn another_socket_with_its_number_is_neither_read_nor_written_nor_shut_down() {
        let (one, _other) = UnixStream::pair().unwrap();
        let (mut theirs, mut reader) = UnixStream::pair().unwrap();
        theirs.write_all(b"not our message").unwrap();
        let socket = Socket::new(one.into());
        // SAFETY: dup2 takes plain numbers; the number that it replaces is `socket`'s.
        assert!(unsafe { libc::dup2(reader.as_raw_fd(), socket.raw()) } != -1);
        let mut bytes = [0; 15];
        let replaced = |transfer| matches!(transfer, Err(Error::Os { errno: libc::EBADF, .. }));
        // SAFETY: `bytes` is a local array.
        assert!(replaced(unsafe { socket.receive((bytes.as_mut_ptr(), 8), (bytes.as_mut_ptr(), 0)) }));
        assert!(replaced(socket.send(&[Part::new(b"a")])));
        socket.shut_down(std::net::Shutdown::Both);
        reader.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"not our message");
        reader.write_all(b"b").unwrap();
        theirs.read_exact(&mut bytes[..1]).unwrap();
        assert_eq!(bytes[0], b'b');
    }

    #[test]
    fn a_wait_ends_with_bytes_with_the_bell_or_at_its_limit() {
        let (one, other) = UnixStream::pair().unwrap();
        let (one, other) = (Socket::new(one.into()), Socket::new(other.into()));
        let bell = EventFd::new().unwrap();
        let soon = Some(Duration::from_millis(1));
        let nothing = Readiness { readable: false, rung: false };
        let bell_fd = || Some(bell.as_fd());
        assert_eq!(one.wait(true, false, bell_fd(), soon).unwrap(), nothing);
        assert_eq!(one.wait(true, true, bell_fd(), None).unwrap(), nothing);
        other.send(&[Part::new(b"a")]).unwrap();
        assert_eq!(one.wait(true, false, bell_fd(), None).unwrap(), Readiness { readable: true, rung: false });
        assert_eq!(one.wait(false, false, None, soon).unwrap(), nothing);
        bell.ring().unwrap();
        assert_eq!(one.wait(true, false, bell_fd(), None).unwrap(), Readiness { readable: true, rung: true });
    }
}
