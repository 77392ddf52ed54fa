//! What a batch has shown so far: objects, and the memory of its leaves.

use std::collections::HashSet;

/// Objects searched one by one before they are hashed.
const FEW: usize = 16;

/// Notes objects and memory, and says whether something came twice.
pub struct Seen {
    few: [usize; FEW],
    count: usize,
    many: HashSet<usize>,
    /// Start and end of each leaf's memory.
    extents: Vec<(usize, usize)>,
    /// Whether each began behind the end of the one before.
    ascending: bool,
}

impl Seen {
    /// Nothing seen.
    pub fn new() -> Self {
        Self { few: [0; FEW], count: 0, many: HashSet::new(), extents: Vec::new(), ascending: true }
    }

    /// Notes an object by its address; false if it has been noted before. The batch keeps it alive.
    #[inline]
    pub fn object(&mut self, address: usize) -> bool {
        if self.count < FEW {
            if self.few[..self.count].contains(&address) {
                return false;
            }
            self.few[self.count] = address;
            self.count += 1;
            return true;
        }
        !self.few.contains(&address) && self.many.insert(address)
    }

    /// Notes memory of `len` bytes.
    #[inline]
    pub fn memory(&mut self, start: usize, len: usize) {
        let end = start.saturating_add(len);
        self.ascending &= self.extents.last().is_none_or(|last| last.1 <= start);
        self.extents.push((start, end));
    }

    /// Whether two leaves share memory.
    pub fn overlaps(&mut self) -> bool {
        if self.ascending {
            return false;
        }
        self.extents.sort_unstable();
        self.extents.windows(2).any(|pair| pair[0].1 > pair[1].0)
    }
}
