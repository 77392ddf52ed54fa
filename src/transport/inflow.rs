//! The receiving direction of a socket: whole parts of frames, over a buffer.

use std::ptr::NonNull;

use super::frame::{HEAD, Head};
use crate::config::{LINK_BUFFER, YIELD_FOR};
use crate::error::{Error, Result};
use crate::sys;
use crate::sys::socket::{Moved, Socket};

/// Receives parts of a known size.
#[derive(Debug)]
pub(super) struct Inflow {
    buffer: Box<[u8]>,
    begin: usize,
    end: usize,
    /// Bytes received so far.
    pub total: u64,
}

impl Inflow {
    pub(super) fn new() -> Self {
        Self { buffer: vec![0; LINK_BUFFER].into(), begin: 0, end: 0, total: 0 }
    }

    /// The head of the next frame; `None` at an end of the connection between two frames. `rest` waits for bytes.
    pub(super) fn head(
        &mut self,
        socket: &Socket,
        most: u64,
        rest: &mut impl FnMut() -> Result<()>,
    ) -> Result<Option<Head>> {
        while self.end - self.begin < HEAD {
            if !self.refill(socket, rest)? {
                return if self.begin == self.end { Ok(None) } else { Err(cut()) };
            }
        }
        let mut bytes = [0; HEAD];
        bytes.copy_from_slice(&self.buffer[self.begin..self.begin + HEAD]);
        self.begin += HEAD;
        Head::from_bytes(&bytes, most).map(Some)
    }

    /// Receives more into the buffer; false at the end of the connection. Yields for a moment before it waits: the next frame is
    /// often under way.
    fn refill(&mut self, socket: &Socket, rest: &mut impl FnMut() -> Result<()>) -> Result<bool> {
        self.buffer.copy_within(self.begin..self.end, 0);
        (self.begin, self.end) = (0, self.end - self.begin);
        let free = &mut self.buffer[self.end..];
        // SAFETY: the memory is the rest of the buffer.
        let mut receive =
            || unsafe { socket.receive((free.as_mut_ptr(), free.len()), (NonNull::dangling().as_ptr(), 0)) };
        let start = sys::clock::monotonic();
        let mut rest = || {
            if sys::clock::monotonic() - start >= YIELD_FOR {
                return rest();
            }
            sys::clock::yield_now();
            Ok(())
        };
        match until_moved(&mut rest, &mut receive)? {
            None => Ok(false),
            Some(count) => {
                self.end += count;
                self.total += count as u64;
                Ok(true)
            }
        }
    }

    /// Receives exactly `len` bytes to `memory`.
    ///
    /// # Safety
    /// The caller owns these bytes.
    pub(super) unsafe fn read(
        &mut self,
        socket: &Socket,
        memory: *mut u8,
        len: usize,
        rest: &mut impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let there = (self.end - self.begin).min(len);
        // SAFETY: the caller owns `len` bytes; the buffer has `there` bytes from `begin` on.
        unsafe { std::ptr::copy_nonoverlapping(self.buffer[self.begin..].as_ptr(), memory, there) };
        self.begin += there;
        let mut done = there;
        while done < len {
            // The buffer is empty. What follows these bytes goes there in the same call.
            let (buffer, wanted) = (&mut self.buffer, len - done);
            // SAFETY: the rest of the caller's bytes, and the buffer.
            let receive =
                || unsafe { socket.receive((memory.add(done), wanted), (buffer.as_mut_ptr(), buffer.len())) };
            let count = until_moved(rest, receive)?.ok_or_else(cut)?;
            self.total += count as u64;
            done += count.min(wanted);
            (self.begin, self.end) = (0, count.saturating_sub(wanted));
        }
        Ok(())
    }

    /// Receives exactly `out`.
    pub(super) fn fill(
        &mut self,
        socket: &Socket,
        out: &mut [u8],
        rest: &mut impl FnMut() -> Result<()>,
    ) -> Result<()> {
        // SAFETY: the slice is the caller's.
        unsafe { self.read(socket, out.as_mut_ptr(), out.len(), rest) }
    }
}

fn until_moved(
    rest: &mut impl FnMut() -> Result<()>,
    mut receive: impl FnMut() -> Result<Moved>,
) -> Result<Option<usize>> {
    loop {
        match receive()? {
            Moved::Bytes(count) => return Ok(Some(count)),
            Moved::End => return Ok(None),
            Moved::Nothing => rest()?,
        }
    }
}

fn cut() -> Error {
    Error::corrupt("the connection ended inside a frame")
}
