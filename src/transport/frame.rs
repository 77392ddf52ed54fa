//! The frames of a connection.
//!
//! ```text
//! head     kind u32, count u32, length u64                          all numbers are little-endian
//! task     kind of task in `count`, bytes of the payload in `length`; then the task's number u64, the payload
//! result   leaves in `count`, bytes of the payload in `length`; then the entry (8 words), the worker's counters,
//!          the leaves' lengths (u64 each), the payload, the leaves
//! sample   task u64; u64: index of the sample within its index batch, plus 1, or 0 if none is in progress
//! ready, stop, kill, left, replay: the head alone
//! ```

use super::counters::COUNTERS;
use crate::config::LINK_LEAVES;
use crate::error::{Error, Result};
use crate::numbered::numbered_enum;
use crate::shm::ring::Entry;

/// Bytes of a head.
pub const HEAD: usize = 16;
/// Bytes between a result's head and the lengths of its leaves.
pub const FIXED: usize = 8 * (crate::shm::layout::SLOT_WORDS + COUNTERS);
/// Bytes after the head of a sample's frame.
pub const SAMPLE: usize = 16;

numbered_enum! {
    /// The type of a frame.
    pub enum Kind {
        /// To the worker: a task.
        Task = 1,
        /// To the worker: leave the loop before the next sample.
        Stop = 2,
        /// To the worker: end the process at once.
        Kill = 3,
        /// From the worker: it is entering its loop.
        Ready = 4,
        /// From the worker: an answer to a task, or a snapshot.
        Result = 5,
        /// From the worker: it has left its loop; no frame follows.
        Left = 6,
        /// From the worker: it begins a sample of a task, or no sample is in progress any more.
        Sample = 7,
        /// From the worker: it begins a batch of a replay.
        Replay = 8,
    }
}

/// The beginning of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The type of the frame.
    pub kind: Kind,
    /// The kind of a task, or the number of leaves of a result.
    pub count: u32,
    /// Bytes of the payload.
    pub len: u64,
}

impl Head {
    /// Returns the head of a frame without a body.
    pub fn bare(kind: Kind) -> Self {
        Self { kind, count: 0, len: 0 }
    }

    /// Encodes the head.
    pub fn to_bytes(self) -> [u8; HEAD] {
        let mut bytes = [0; HEAD];
        bytes[..4].copy_from_slice(&(self.kind as u32).to_le_bytes());
        bytes[4..8].copy_from_slice(&self.count.to_le_bytes());
        bytes[8..].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    /// Decodes and checks a head. `max_len` limits the payload.
    pub fn from_bytes(bytes: &[u8; HEAD], max_len: u64) -> Result<Self> {
        let number = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let len = u64::from(number(8)) | u64::from(number(12)) << 32;
        let (kind, count) = (Kind::of_number(number(0)), number(4));
        let bad = || {
            let kind = number(0);
            Error::connection(format!("received an invalid frame: kind {kind}, count {count}, {len} bytes"))
        };
        let head = Self { kind: kind.ok_or_else(bad)?, count, len };
        let fits = match head.kind {
            Kind::Task => len <= max_len,
            Kind::Result => count <= LINK_LEAVES && len <= max_len,
            Kind::Stop | Kind::Kill | Kind::Ready | Kind::Left | Kind::Sample | Kind::Replay => count == 0 && len == 0,
        };
        if fits { Ok(head) } else { Err(bad()) }
    }
}

/// Appends words as little-endian bytes.
pub fn put_words(out: &mut Vec<u8>, words: &[u64]) {
    words.iter().for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
}

/// Returns the little-endian words in `bytes`.
pub fn words(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes))
}

/// Returns the entry and the counters of a result.
pub fn read_fixed(bytes: &[u8; FIXED]) -> (Entry, [u64; COUNTERS]) {
    let mut all = words(bytes);
    let mut next = || all.next().unwrap_or(0);
    (std::array::from_fn(|_| next()), std::array::from_fn(|_| next()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_decoded_as_encoded_and_damaged_ones_are_errors() {
        let max_len = 1 << 20;
        for head in [
            Head { kind: Kind::Task, count: 2, len: max_len },
            Head { kind: Kind::Result, count: LINK_LEAVES, len: 0 },
            Head::bare(Kind::Stop),
            Head::bare(Kind::Left),
        ] {
            assert_eq!(Head::from_bytes(&head.to_bytes(), max_len).unwrap(), head);
        }
        for head in [
            Head { kind: Kind::Task, count: 2, len: max_len + 1 },
            Head { kind: Kind::Result, count: LINK_LEAVES + 1, len: 0 },
            Head { kind: Kind::Result, count: 0, len: u64::MAX },
            Head { kind: Kind::Kill, count: 0, len: 1 },
            Head { kind: Kind::Ready, count: 1, len: 0 },
        ] {
            assert!(Head::from_bytes(&head.to_bytes(), max_len).is_err(), "{head:?}");
        }
        assert!(Head::from_bytes(&[0; HEAD], max_len).is_err());
        assert!(Head::from_bytes(&[0xff; HEAD], max_len).is_err());
    }
}
