//! The receiving side of a socket, which reads frames part by part through a buffer.

use std::ptr::NonNull;

use super::frame::{self, FIXED, HEAD, Head, Kind, SAMPLE};
use crate::config::LINK_BUFFER;
use crate::error::{Error, Result};
use crate::sys::socket::{Socket, Transfer};

/// The outcome of [`FrameReader::arrived`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrived {
    /// The head of a frame.
    Head,
    /// Less than a head.
    Nothing,
    /// The end of the connection, between two frames.
    End,
}

/// A buffer for received bytes, from which the caller reads parts whose sizes it knows.
#[derive(Debug)]
pub(super) struct FrameReader {
    buffer: Box<[u8]>,
    begin: usize,
    end: usize,
    /// Bytes received so far.
    pub total: u64,
}

impl FrameReader {
    pub(super) fn new() -> Self {
        Self { buffer: vec![0; LINK_BUFFER].into(), begin: 0, end: 0, total: 0 }
    }

    /// Receives the available bytes if there is no complete head yet, and returns what has arrived. Does not wait.
    /// Returns an error if the connection has ended in the middle of a frame.
    pub(super) fn arrived(&mut self, socket: &Socket) -> Result<Arrived> {
        if self.end - self.begin >= HEAD {
            return Ok(Arrived::Head);
        }
        Ok(match self.refill(socket)? {
            Transfer::Bytes(_) if self.end - self.begin >= HEAD => Arrived::Head,
            Transfer::Bytes(_) | Transfer::Nothing => Arrived::Nothing,
            Transfer::End if self.begin == self.end => Arrived::End,
            Transfer::End => return Err(cut()),
        })
    }

    /// Takes the head of the next frame. Call it only after [`FrameReader::arrived`] has returned [`Arrived::Head`].
    pub(super) fn head(&mut self, max_len: u64) -> Result<Head> {
        let Some(bytes) = self.buffer[self.begin..self.end].first_chunk::<HEAD>() else {
            return Err(Error::usage("the head of a frame has not arrived"));
        };
        self.begin += HEAD;
        Head::from_bytes(bytes, max_len)
    }

    /// Returns true if a whole frame has arrived. Always returns false for a frame that is longer than the buffer. Does
    /// not wait.
    pub(super) fn has_arrived(&mut self, socket: &Socket, max_len: u64) -> Result<bool> {
        if self.has_whole(max_len)? {
            return Ok(true);
        }
        // The end of the connection is ignored here, because the link's thread also detects it.
        Ok(matches!(self.refill(socket)?, Transfer::Bytes(_)) && self.has_whole(max_len)?)
    }

    /// Returns true if the buffer holds a whole frame.
    fn has_whole(&self, max_len: u64) -> Result<bool> {
        let available = &self.buffer[self.begin..self.end];
        let Some(head) = available.first_chunk::<HEAD>() else { return Ok(false) };
        let head = Head::from_bytes(head, max_len)?;
        match head.kind {
            Kind::Result => {}
            Kind::Sample => return Ok(available.len() >= HEAD + SAMPLE),
            kind => return Ok(kind != Kind::Task),
        }
        let leaves = HEAD + FIXED..HEAD + FIXED + 8 * head.count as usize;
        let Some(lens) = available.get(leaves.clone()) else { return Ok(false) };
        let len = frame::words(lens).try_fold(head.len, |sum, len| sum.checked_add(len));
        Ok(len.is_some_and(|len| len <= (available.len() - leaves.end) as u64))
    }

    /// Returns the position of the next frame, for [`FrameReader::rewind`].
    pub(super) fn begin(&self) -> usize {
        self.begin
    }

    /// Goes back to the start of a frame that is still completely in the buffer, so that it can be read again.
    pub(super) fn rewind(&mut self, begin: usize) {
        self.begin = begin;
    }

    /// Receives the available bytes into the buffer.
    fn refill(&mut self, socket: &Socket) -> Result<Transfer> {
        self.buffer.copy_within(self.begin..self.end, 0);
        (self.begin, self.end) = (0, self.end - self.begin);
        let free = &mut self.buffer[self.end..];
        if free.is_empty() {
            return Ok(Transfer::Nothing);
        }
        // SAFETY: the memory is the free part of the buffer.
        let transfer = unsafe { socket.receive((free.as_mut_ptr(), free.len()), (NonNull::dangling().as_ptr(), 0)) }?;
        if let Transfer::Bytes(count) = transfer {
            self.end += count;
            self.total += count as u64;
        }
        Ok(transfer)
    }

    /// Receives exactly `len` bytes into `memory`. Calls `pause` to wait whenever no bytes have arrived.
    ///
    /// # Safety
    /// `memory` points to `len` bytes that the caller owns.
    pub(super) unsafe fn read(
        &mut self,
        socket: &Socket,
        memory: *mut u8,
        len: usize,
        pause: &mut impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let available = (self.end - self.begin).min(len);
        // SAFETY: the caller owns `len` bytes; the buffer has `available` bytes from `begin` on.
        unsafe { std::ptr::copy_nonoverlapping(self.buffer[self.begin..].as_ptr(), memory, available) };
        self.begin += available;
        let mut done = available;
        while done < len {
            // The buffer is empty now, so the same call also fills it with the bytes that follow.
            let (buffer, wanted) = (&mut self.buffer, len - done);
            // SAFETY: the targets are the remainder of the caller's bytes, and the buffer.
            let receive = || unsafe { socket.receive((memory.add(done), wanted), (buffer.as_mut_ptr(), buffer.len())) };
            let count = receive_some(pause, receive)?.ok_or_else(cut)?;
            self.total += count as u64;
            done += count.min(wanted);
            (self.begin, self.end) = (0, count.saturating_sub(wanted));
        }
        Ok(())
    }

    /// Fills `out` completely.
    pub(super) fn fill(
        &mut self,
        socket: &Socket,
        out: &mut [u8],
        pause: &mut impl FnMut() -> Result<()>,
    ) -> Result<()> {
        // SAFETY: the slice belongs to the caller.
        unsafe { self.read(socket, out.as_mut_ptr(), out.len(), pause) }
    }
}

/// Repeats `receive` until it has received bytes. Returns their number; `None` at the end of the connection.
fn receive_some(
    pause: &mut impl FnMut() -> Result<()>,
    mut receive: impl FnMut() -> Result<Transfer>,
) -> Result<Option<usize>> {
    loop {
        match receive()? {
            Transfer::Bytes(count) => return Ok(Some(count)),
            Transfer::End => return Ok(None),
            Transfer::Nothing => pause()?,
        }
    }
}

fn cut() -> Error {
    Error::connection("it was closed in the middle of a frame")
}
