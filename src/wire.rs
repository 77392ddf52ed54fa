//! The format of the ring entries and of the message head, with the functions that read and write them.
//!
//! A task entry is `[task, kind, block, length, inline ...]`. Index batches of up to [`INLINE_BYTES`] bytes travel in
//! the entry itself, others in a block of the main process's region. If the ring held bytes instead, a large index
//! batch would have to be written piece by piece while the worker reads it. The main process cannot do that during the
//! user's training step.
//!
//! A result entry is `[task, kind | block << 32, length, checksum, fetch us | collate us << 32, pack us | copies << 32,
//! bytes, copied bytes]`. Its block holds the message: the number of leaves, a table of the leaves' blocks and lengths,
//! and the payload.

use crate::error::{Error, Result};
use crate::numbered::numbered_enum;
use crate::shm::ring::Entry;

/// Maximum number of bytes of an index batch that fits into a task entry.
pub const INLINE_BYTES: usize = 32;
/// The block index that means "no block".
const NO_BLOCK: u32 = u32::MAX;
/// Bytes of a leaf's row in the table of a message.
const LEAF_ROW: usize = 16;
/// Bytes of the leaf count, with which a message begins.
pub const LEAF_COUNT_BYTES: usize = 8;

numbered_enum! {
    /// The kind of a task entry.
    pub enum TaskKind {
        /// Fetch a batch; the payload is encoded by the codec.
        Plain = 1,
        /// Fetch a batch; the payload is a pickle.
        Pickle = 2,
        /// Begin a new epoch: create a new fetcher, and answer with [`ResultKind::Resumed`]. The payload is an
        /// [`epoch_payload`].
        Resume = 3,
        /// Exit.
        Leave = 4,
        /// Begin the next epoch early: its tasks follow, and the worker sends no answer. The payload is an
        /// [`epoch_payload`].
        Early = 5,
        /// Like [`Self::Resume`], but the new epoch replaces the one that began early, which is withdrawn.
        Rewind = 6,
    }
}

numbered_enum! {
    /// The kind of a result entry.
    pub enum ResultKind {
        /// A batch, encoded by the codec.
        Plain = 1,
        /// A batch, as a pickle and a list of its out-of-band buffers, both encoded by the codec.
        Pickle = 2,
        /// An exception, as a pickle of torch's `ExceptionWrapper`.
        Error = 3,
        /// The worker's iterable dataset is exhausted.
        Exhausted = 4,
        /// The answer to [`TaskKind::Resume`] and [`TaskKind::Rewind`].
        Resumed = 5,
        /// Like [`Self::Pickle`], but unpickling requests something from the worker, such as a descriptor. So the batch
        /// is unpickled on receipt, before the worker may exit.
        Tied = 6,
        /// A snapshot of the worker's state, which answers no task. The entry's task is the number of answers that the
        /// worker had sent in the epoch. An entry without a block means that there was no memory for the snapshot.
        Snapshot = 7,
        /// An error in place of a [`Self::Snapshot`]. The entry's task is the same number.
        FailedSnapshot = 8,
    }
}

impl ResultKind {
    /// Returns true for a snapshot or an error in place of one. Neither answers a task.
    #[inline]
    pub fn is_snapshot(self) -> bool {
        matches!(self, Self::Snapshot | Self::FailedSnapshot)
    }

    /// Returns true if an entry of this kind may have a message (if `has_block` is true), or may lack one (if it is
    /// false).
    fn fits(self, has_block: bool) -> bool {
        match self {
            Self::Exhausted | Self::Resumed => !has_block,
            Self::Snapshot | Self::FailedSnapshot => true,
            Self::Plain | Self::Pickle | Self::Error | Self::Tied => has_block,
        }
    }
}

/// A decoded task entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskEntry {
    /// The task's number.
    pub task: u64,
    /// The kind of the task.
    pub kind: TaskKind,
    /// The payload's block in the main process's region; `None` if the payload is inline.
    pub block: Option<u32>,
    /// Bytes of the payload.
    pub len: u64,
    /// The payload, if inline.
    pub inline: [u8; INLINE_BYTES],
}

impl TaskEntry {
    /// Creates an entry with an inline payload. Returns `None` if the payload is too long.
    pub fn inline(task: u64, kind: TaskKind, payload: &[u8]) -> Option<Self> {
        let mut inline = [0; INLINE_BYTES];
        inline.get_mut(..payload.len())?.copy_from_slice(payload);
        Some(Self { task, kind, block: None, len: payload.len() as u64, inline })
    }

    /// Creates an entry whose payload is in a block.
    pub fn in_block(task: u64, kind: TaskKind, block: u32, len: u64) -> Self {
        Self { task, kind, block: Some(block), len, inline: [0; INLINE_BYTES] }
    }

    /// Encodes the entry.
    pub fn to_words(&self) -> Entry {
        let block = self.block.unwrap_or(NO_BLOCK);
        let mut words = [self.task, self.kind as u64, u64::from(block), self.len, 0, 0, 0, 0];
        for (word, bytes) in words[4..].iter_mut().zip(self.inline.as_chunks().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        words
    }

    /// Decodes an entry. Fails with [`Error::Corrupt`] if it is invalid.
    pub fn from_words(words: &Entry) -> Result<Self> {
        let kind = u32::try_from(words[1]).ok().and_then(TaskKind::of_number);
        let kind = kind.ok_or_else(|| Error::corrupt(format!("a task entry of kind {}", words[1])))?;
        let block = Some(words[2] as u32).filter(|&block| block != NO_BLOCK);
        if block.is_none() && words[3] > INLINE_BYTES as u64 {
            return Err(Error::corrupt(format!("a task entry with {} bytes inline", words[3])));
        }
        let mut inline = [0; INLINE_BYTES];
        for (bytes, word) in inline.chunks_exact_mut(8).zip(&words[4..]) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        Ok(Self { task: words[0], kind, block, len: words[3], inline })
    }
}

impl TaskKind {
    /// Returns true if an entry of this kind begins an epoch.
    #[inline]
    pub fn begins_epoch(self) -> bool {
        matches!(self, Self::Resume | Self::Early | Self::Rewind)
    }
}

/// Returns the payload of an entry that begins an epoch ([`TaskKind::begins_epoch`]): the number of the epoch's first
/// task, followed by a message for the worker's Python code.
pub fn epoch_payload(first_task: u64, message: &[u8]) -> Vec<u8> {
    [&first_task.to_le_bytes(), message].concat()
}

/// Splits an [`epoch_payload`] into the number of the first task and the message.
pub fn read_epoch(payload: &[u8]) -> Result<(u64, &[u8])> {
    let bad = || Error::corrupt(format!("an entry that begins an epoch, with {} bytes", payload.len()));
    let (first_task, message) = payload.split_first_chunk().ok_or_else(bad)?;
    Ok((u64::from_le_bytes(*first_task), message))
}

/// Durations of the parts of a task, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// Time in the dataset.
    pub fetch_us: u32,
    /// Time in `collate_fn`.
    pub collate_us: u32,
    /// Time to encode the batch into the arena.
    pub pack_us: u32,
}

impl Timings {
    /// Returns the sum of all parts.
    #[inline]
    pub fn total_us(&self) -> u64 {
        u64::from(self.fetch_us) + u64::from(self.collate_us) + u64::from(self.pack_us)
    }
}

/// The size of a result, for statistics and the byte limit of a window. No read or allocation depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Bytes of the message and of its leaves.
    pub bytes: u64,
    /// Number of leaves copied into the arena, because they were made outside it.
    pub copies: u32,
    /// Bytes of these leaves.
    pub copied_bytes: u64,
}

/// A decoded result entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResultEntry {
    /// The task that the result answers; for a snapshot, the number of answers before it.
    pub task: u64,
    /// The kind of the result.
    pub kind: ResultKind,
    /// The block of the message, if there is a message.
    pub block: Option<u32>,
    /// Bytes of the message.
    pub len: u64,
    /// Checksum of the message's payload, if the payload is a pickle.
    pub checksum: u64,
    /// Durations of the task's parts; the status page has their sums.
    pub timings: Timings,
    /// The size of the result.
    pub load: Load,
}

impl ResultEntry {
    /// Encodes the entry.
    pub fn to_words(&self) -> Entry {
        let block = u64::from(self.block.unwrap_or(NO_BLOCK));
        let Timings { fetch_us, collate_us, pack_us } = self.timings;
        let Load { bytes, copies, copied_bytes } = self.load;
        let kind = self.kind as u64 | block << 32;
        let times = u64::from(fetch_us) | u64::from(collate_us) << 32;
        let pack = u64::from(pack_us) | u64::from(copies) << 32;
        [self.task, kind, self.len, self.checksum, times, pack, bytes, copied_bytes]
    }

    /// Decodes an entry. Fails with [`Error::Corrupt`] if it is invalid.
    pub fn from_words(words: &Entry) -> Result<Self> {
        let number = words[1] as u32;
        let kind = ResultKind::of_number(number);
        let kind = kind.ok_or_else(|| Error::corrupt(format!("a result entry of kind {number}")))?;
        let block = Some((words[1] >> 32) as u32).filter(|&block| block != NO_BLOCK);
        if !kind.fits(block.is_some()) {
            return Err(Error::corrupt(format!("a result entry of kind {kind:?} with block {block:?}")));
        }
        let timings =
            Timings { fetch_us: words[4] as u32, collate_us: (words[4] >> 32) as u32, pack_us: words[5] as u32 };
        let load = Load { bytes: words[6], copies: (words[5] >> 32) as u32, copied_bytes: words[7] };
        Ok(Self { task: words[0], kind, block, len: words[2], checksum: words[3], timings, load })
    }
}

/// A leaf of a message: the first `len` bytes of a block of the worker's region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// Index of the block.
    pub block: u32,
    /// Bytes of the leaf.
    pub len: u64,
}

/// Returns the length of a message in bytes, given its number of leaves and the length of its payload.
pub fn message_len(leaves: usize, payload: usize) -> u64 {
    (LEAF_COUNT_BYTES + leaves * LEAF_ROW + payload) as u64
}

/// Returns the offset of the payload in a message of `len` bytes, computed from its first [`LEAF_COUNT_BYTES`] bytes.
/// Fails with [`Error::Corrupt`] if the message is too short for its leaf table.
pub fn payload_start(first: &[u8], len: u64) -> Result<u64> {
    let count = word(first, 0).filter(|count| *count <= len / LEAF_ROW as u64);
    let start = count.map(|count| message_len(count as usize, 0)).filter(|start| *start <= len);
    start.ok_or_else(|| Error::corrupt(format!("the leaf table of a message of {len} bytes")))
}

/// Replaces the contents of `out` with the head of a message, that is, everything before its payload.
pub fn message_head<'a>(leaves: impl ExactSizeIterator<Item = &'a Leaf>, out: &mut Vec<u8>) {
    out.clear();
    out.extend_from_slice(&(leaves.len() as u64).to_le_bytes());
    for leaf in leaves {
        out.extend_from_slice(&u64::from(leaf.block).to_le_bytes());
        out.extend_from_slice(&leaf.len.to_le_bytes());
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

/// Returns the leaves of a message, and the offset of its payload. Fails with [`Error::Corrupt`] if the leaf table is
/// invalid.
pub fn read_message(message: &[u8]) -> Result<(Vec<Leaf>, usize)> {
    let bad = || Error::corrupt(format!("the leaf table of a message of {} bytes", message.len()));
    let count = word(message, 0).ok_or_else(bad)?;
    if count > (message.len() / LEAF_ROW) as u64 {
        return Err(bad());
    }
    let start = LEAF_COUNT_BYTES + count as usize * LEAF_ROW;
    let rows = message.get(LEAF_COUNT_BYTES..start).ok_or_else(bad)?;
    let row = |row: &[u8]| {
        let block = u32::try_from(word(row, 0)?).ok()?;
        Some(Leaf { block, len: word(row, 8)? })
    };
    let leaves: Option<Vec<Leaf>> = rows.chunks_exact(LEAF_ROW).map(row).collect();
    Ok((leaves.ok_or_else(bad)?, start))
}

/// Returns a checksum that detects accidental damage, not attacks: an FNV-like multiplication over words, then the
/// first and the last step of the final mix of Vigna's splitmix64.
pub fn checksum(bytes: &[u8]) -> u64 {
    const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut sum = bytes.len() as u64 ^ MULTIPLIER;
    let (chunks, tail) = bytes.as_chunks();
    let mut last = [0; 8];
    last[..tail.len()].copy_from_slice(tail);
    for chunk in chunks {
        sum = (sum ^ u64::from_le_bytes(*chunk)).wrapping_mul(MULTIPLIER).rotate_left(29);
    }
    sum = (sum ^ u64::from_le_bytes(last)).wrapping_mul(MULTIPLIER);
    sum = (sum ^ (sum >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    sum ^ (sum >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_decoded_as_they_were_encoded() {
        let inline = TaskEntry::inline(7, TaskKind::Plain, b"abc").unwrap();
        assert_eq!(TaskEntry::from_words(&inline.to_words()).unwrap(), inline);
        assert!(TaskEntry::inline(7, TaskKind::Plain, &[0; INLINE_BYTES + 1]).is_none());
        let block = TaskEntry::in_block(8, TaskKind::Pickle, 3, 99);
        assert_eq!(TaskEntry::from_words(&block.to_words()).unwrap(), block);
        let timings = Timings { fetch_us: 1, collate_us: u32::MAX, pack_us: 3 };
        let result = ResultEntry {
            task: 1 << 40,
            kind: ResultKind::Pickle,
            block: Some(5),
            len: 6,
            checksum: 7,
            timings,
            load: Load { bytes: 1 << 50, copies: u32::MAX, copied_bytes: 8 },
        };
        assert_eq!(ResultEntry::from_words(&result.to_words()).unwrap(), result);
    }

    #[test]
    fn the_payload_of_an_epoch_is_read_back_and_a_truncated_one_is_an_error() {
        let payload = epoch_payload(1 << 40, b"message");
        assert_eq!(read_epoch(&payload).unwrap(), (1 << 40, &b"message"[..]));
        assert_eq!(read_epoch(&epoch_payload(7, b"")).unwrap(), (7, &b""[..]));
        assert!(read_epoch(&payload[..7]).is_err());
    }

    #[test]
    fn a_message_is_read_back_and_a_truncated_one_is_an_error() {
        let leaves = [Leaf { block: 1, len: 2 }, Leaf { block: 3, len: 1 << 40 }];
        let mut message = Vec::new();
        message_head(leaves.iter(), &mut message);
        assert_eq!(message.len() as u64, message_len(2, 0));
        message.extend_from_slice(b"payload");
        assert_eq!(read_message(&message).unwrap(), (leaves.to_vec(), message.len() - 7));
        let start = message_len(2, 0);
        assert_eq!(payload_start(&message[..LEAF_COUNT_BYTES], start).unwrap(), start);
        assert!(payload_start(&u64::MAX.to_le_bytes(), start).is_err());
        for cut in 0..start as usize {
            assert!(read_message(&message[..cut]).is_err());
            assert!(payload_start(&message[..cut.min(LEAF_COUNT_BYTES)], cut as u64).is_err());
        }
    }

    #[test]
    fn the_checksum_depends_on_each_bit() {
        let bytes: Vec<u8> = (0..100).collect();
        let sum = checksum(&bytes);
        for bit in 0..800 {
            let mut other = bytes.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(checksum(&other), sum);
        }
        assert_ne!(checksum(&bytes[..99]), sum);
        assert_ne!(checksum(&[0; 3]), checksum(&[0; 4]));
    }
}
