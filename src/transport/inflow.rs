//! The receiving direction of a socket: whole parts of frames, over a buffer.

use super::frame::{HEAD, Head};
use crate::config::LINK_BUFFER;
use crate::error::{Error, Result};
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

    /// Receives more into the buffer; false at the end of the connection.
    fn refill(&mut self, socket: &Socket, rest: &mut impl FnMut() -> Result<()>) -> Result<bool> {
        self.buffer.copy_within(self.begin..self.end, 0);
        (self.begin, self.end) = (0, self.end - self.begin);
        let free = &mut self.buffer[self.end..];
        // SAFETY: the memory is the rest of the buffer.
        match until_moved(rest, || unsafe { socket.receive(free.as_mut_ptr(), free.len()) })? {
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
        let mut done = 0;
        while done < len {
            let there = (self.end - self.begin).min(len - done);
            if there > 0 {
                // SAFETY: the caller owns `len` bytes, of which `done` are written; `there` fits into both.
                unsafe {
                    let from = self.buffer[self.begin..].as_ptr();
                    std::ptr::copy_nonoverlapping(from, memory.add(done), there);
                }
                self.begin += there;
                done += there;
            } else if len - done >= LINK_BUFFER / 2 {
                // SAFETY: as above; the rest of the caller's bytes.
                let receive = || unsafe { socket.receive(memory.add(done), len - done) };
                let count = until_moved(rest, receive)?.ok_or_else(cut)?;
                self.total += count as u64;
                done += count;
            } else if !self.refill(socket, rest)? {
                return Err(cut());
            }
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
