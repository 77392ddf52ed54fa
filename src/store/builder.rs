//! The writing side: rows are appended one by one, and written to the file chunk by chunk.

use std::os::fd::{AsFd, OwnedFd};

use super::{CHUNK, HEADER, MAGIC, PLACE_BITS, ROW_BITS, ROWS, VERSION, form, tag};
use crate::config::{HEADROOM_CHECK, HEADROOM_MARGIN};
use crate::error::{Error, Result};
use crate::sys::cgroup::Roots;
use crate::sys::{map, memfd, memory, sealed};
use crate::tree::Writer;

/// Maximum number of words of a section that one call writes.
const PIECE: usize = 64 << 10;

/// The rows of the chunk that has not been written yet.
enum Pending {
    Ints(Vec<i64>),
    Floats(Vec<f64>),
    /// The offset at which each row ends, and the bytes of all rows.
    Records(Vec<u32>, Vec<u8>),
}

/// An image that is being written.
pub struct Builder {
    fd: OwnedFd,
    /// The file's length so far.
    at: u64,
    /// The file length up to which a memory check has succeeded.
    checked: u64,
    pending: Pending,
    rows: u64,
    /// The first row and the `place` word of each chunk.
    table: Vec<(u64, u64)>,
    /// True if all chunks so far are full, except perhaps the last.
    uniform: bool,
    /// The hash and index of each row that has a hash.
    hashes: Vec<(u64, u64)>,
    /// The indices of key rows without a hash.
    unhashed: Vec<u64>,
    /// Number of bytes of raw data.
    data: u64,
}

impl Builder {
    /// Creates an empty image in a new memfd.
    pub fn new() -> Result<Self> {
        Ok(Self {
            fd: memfd::create("rustloader-shared", 0)?,
            at: HEADER,
            checked: 0,
            pending: Pending::Records(Vec::new(), Vec::new()),
            rows: 0,
            table: Vec::new(),
            uniform: true,
            hashes: Vec::new(),
            unhashed: Vec::new(),
            data: 0,
        })
    }

    /// Returns the number of rows so far.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Returns the number of bytes written so far.
    pub fn len(&self) -> u64 {
        self.at
    }

    /// Returns true if no row or data has been added.
    pub fn is_empty(&self) -> bool {
        self.at == HEADER && self.rows == 0
    }

    /// Appends an int as a row.
    pub fn int(&mut self, value: i64) -> Result<()> {
        if let Pending::Records(ends, _) = &self.pending
            && ends.is_empty()
        {
            self.pending = Pending::Ints(Vec::new());
        }
        match &mut self.pending {
            Pending::Ints(values) => values.push(value),
            _ => return self.push_number(|writer| writer.int(value)),
        }
        self.count_row()
    }

    /// Appends a float as a row.
    pub fn float(&mut self, value: f64) -> Result<()> {
        if let Pending::Records(ends, _) = &self.pending
            && ends.is_empty()
        {
            self.pending = Pending::Floats(Vec::new());
        }
        match &mut self.pending {
            Pending::Floats(values) => values.push(value),
            _ => return self.push_number(|writer| writer.float(value)),
        }
        self.count_row()
    }

    /// Appends a number as a record that holds the number's tree, because the chunk has rows of another type.
    fn push_number(&mut self, write: impl FnOnce(&mut Writer<'_>)) -> Result<()> {
        let mut record = Vec::with_capacity(16);
        write(&mut Writer::new(&mut record));
        self.record(&[&record])
    }

    /// Appends a row of bytes, which is given in parts.
    pub fn record(&mut self, parts: &[&[u8]]) -> Result<()> {
        let len = parts.iter().map(|part| part.len()).sum::<usize>();
        if len >= CHUNK {
            self.flush()?;
            return self.push_alone(parts, len);
        }
        self.unify();
        if let Pending::Records(ends, bytes) = &mut self.pending {
            if bytes.len() + len > CHUNK {
                self.flush()?;
                return self.record(parts);
            }
            parts.iter().for_each(|part| bytes.extend_from_slice(part));
            // The length is at most 1 MiB, so it fits into a u32.
            ends.push(bytes.len() as u32);
        }
        self.count_row()
    }

    /// Converts pending numbers to records.
    fn unify(&mut self) {
        let (mut ends, mut bytes) = (Vec::new(), Vec::new());
        let mut add = |write: &dyn Fn(&mut Writer<'_>)| {
            write(&mut Writer::new(&mut bytes));
            ends.push(bytes.len() as u32);
        };
        match &self.pending {
            Pending::Ints(values) => values.iter().for_each(|value| add(&|out| out.int(*value))),
            Pending::Floats(values) => values.iter().for_each(|value| add(&|out| out.float(*value))),
            Pending::Records(..) => return,
        }
        self.pending = Pending::Records(ends, bytes);
    }

    /// Marks the last row as a key that has this hash, or no hash if `None`.
    pub fn key(&mut self, hash: Option<u64>) {
        let row = self.rows.saturating_sub(1);
        match hash {
            Some(hash) => self.hashes.push((hash, row)),
            None => self.unhashed.push(row),
        }
    }

    /// Appends raw data. An image has either rows or raw data.
    pub fn raw(&mut self, bytes: &[u8]) -> Result<()> {
        self.write(bytes)?;
        self.data += bytes.len() as u64;
        Ok(())
    }

    /// Checks that there is memory for `len` bytes of raw data, and address space for the two mappings that readers of
    /// raw data create.
    pub fn expect(&mut self, len: u64) -> Result<()> {
        self.check(len, len, 2)
    }

    /// Checks that there is memory for `len` more bytes, and address space for `mappings` mappings of the image. If
    /// there is memory even for `ahead` bytes, writing up to that many bytes needs no further check.
    fn check(&mut self, len: u64, ahead: u64, mappings: u64) -> Result<()> {
        if let Some(left) = map::address_space_left()
            && self.at.saturating_add(len).saturating_mul(mappings) > left
        {
            let times = if mappings == 1 { "" } else { " twice" };
            let limit = format!("all of them are mapped{times} into the address space (RLIMIT_AS, `ulimit -v`)");
            return Err(self.no_memory(len, limit, left));
        }
        let room = memory::available(&Roots::default());
        let suffices = |len: u64| {
            let margin = len.clamp(*HEADROOM_MARGIN.start(), *HEADROOM_MARGIN.end());
            room.bytes >= len.saturating_add(margin)
        };
        if !suffices(len) {
            return Err(self.no_memory(len, room.limit, room.bytes));
        }
        self.checked = self.at + if suffices(ahead) { ahead } else { len };
        Ok(())
    }

    fn no_memory(&self, wanted: u64, limit: String, headroom: u64) -> Error {
        Error::ShareMemory { wanted, written: self.at - HEADER, limit, headroom }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let len = bytes.len() as u64;
        if self.at + len > self.checked {
            self.check(len, len.max(HEADROOM_CHECK), 1)?;
        }
        match sealed::write_at(self.fd.as_fd(), bytes, self.at) {
            Ok(()) => {
                self.at += len;
                Ok(())
            }
            Err(Error::Os { errno: libc::ENOMEM | libc::ENOSPC, .. }) => {
                let room = memory::available(&Roots::default());
                Err(self.no_memory(len, format!("the kernel has no free page for them, {}", room.limit), room.bytes))
            }
            Err(error) => Err(error),
        }
    }

    fn count_row(&mut self) -> Result<()> {
        self.rows += 1;
        let pending = match &self.pending {
            Pending::Ints(values) => values.len(),
            Pending::Floats(values) => values.len(),
            Pending::Records(ends, _) => ends.len(),
        };
        if pending as u64 >= ROWS { self.flush() } else { Ok(()) }
    }

    /// Starts a chunk for the last `rows` rows, which are already counted.
    fn begin(&mut self, form: u64, rows: usize) {
        let first = self.rows - rows as u64;
        self.uniform &= first == self.table.len() as u64 * ROWS;
        self.table.push((first, form << PLACE_BITS | self.at));
    }

    fn flush(&mut self) -> Result<()> {
        let pending = std::mem::replace(&mut self.pending, Pending::Records(Vec::new(), Vec::new()));
        let (form, rows, mut chunk) = match pending {
            Pending::Ints(values) => {
                (form::INTS, values.len(), values.iter().flat_map(|value| value.to_le_bytes()).collect())
            }
            Pending::Floats(values) => {
                (form::FLOATS, values.len(), values.iter().flat_map(|value| value.to_le_bytes()).collect())
            }
            Pending::Records(ends, bytes) => {
                let mut chunk: Vec<u8> = ends.iter().flat_map(|end| end.to_le_bytes()).collect();
                chunk.extend_from_slice(&bytes);
                (form::RECORDS, ends.len(), chunk)
            }
        };
        if rows == 0 {
            return Ok(());
        }
        self.begin(form, rows);
        chunk.resize(chunk.len().next_multiple_of(8), 0);
        self.write(&chunk)
    }

    /// Writes a large row as its own chunk.
    fn push_alone(&mut self, parts: &[&[u8]], len: usize) -> Result<()> {
        self.check(len as u64, len as u64, 1)?;
        self.rows += 1;
        self.begin(form::LONE, 1);
        // The length is stored because the table's next entry does not give the exact end: chunks start at multiples of
        // 8.
        self.write(&(len as u64).to_le_bytes())?;
        for part in parts {
            self.write(part)?;
        }
        self.write(&[0; 8][..len.next_multiple_of(8) - len])
    }

    /// Writes words as a section. Returns the position and length of the section in bytes.
    fn section(&mut self, mut words: impl Iterator<Item = u64>) -> Result<[u64; 2]> {
        let at = self.at;
        loop {
            let bytes: Vec<u8> = words.by_ref().take(PIECE).flat_map(u64::to_le_bytes).collect();
            if bytes.is_empty() {
                return Ok([at, self.at - at]);
            }
            self.write(&bytes)?;
        }
    }

    /// Takes the collected hashes out of the builder, and returns an open-addressed hash table of them.
    fn slots(&mut self) -> Vec<u64> {
        let hashes = std::mem::take(&mut self.hashes);
        if hashes.is_empty() {
            return Vec::new();
        }
        let size = (hashes.len() * 3 / 2 + 1).next_power_of_two();
        let mut slots = vec![0; size];
        for (hash, row) in hashes {
            let mut at = hash as usize & (size - 1);
            while slots[at] != 0 {
                at = (at + 1) & (size - 1);
            }
            slots[at] = tag(hash) | (row + 1);
        }
        slots
    }

    /// Writes the remaining parts, seals the file and returns its descriptor. Readers get `kind` and `meta` unchanged.
    pub fn finish(mut self, kind: u64, meta: &[u8]) -> Result<OwnedFd> {
        self.flush()?;
        if self.rows >> (ROW_BITS - 1) != 0 {
            return Err(Error::usage("too many rows for a shared object"));
        }
        let data = [HEADER, self.data];
        let end = [(self.rows, self.at)];
        let table = std::mem::take(&mut self.table);
        let table = self.section(table.iter().chain(&end).flat_map(|(first, at)| [*first, *at]))?;
        let slots = self.slots();
        let slots = self.section(slots.into_iter())?;
        let unhashed = std::mem::take(&mut self.unhashed);
        let unhashed = self.section(unhashed.into_iter())?;
        let meta_at = [self.at, meta.len() as u64];
        self.write(meta)?;
        let head = [MAGIC, VERSION, kind, self.rows, if self.uniform { ROWS } else { 0 }];
        let header = head.into_iter().chain([table, slots, unhashed, meta_at, data].into_iter().flatten());
        let mut header: Vec<u8> = header.flat_map(u64::to_le_bytes).collect();
        // The rest of the header's page is zero.
        header.resize(HEADER as usize, 0);
        sealed::write_at(self.fd.as_fd(), &header, 0)?;
        sealed::seal_all(self.fd.as_fd())?;
        Ok(self.fd)
    }
}
