//! The objects of a batch that the encoder has seen so far, and the memory of its leaves.

use std::collections::HashMap;

use crate::tree::Kind;

/// Maximum number of objects that are found by linear search. Further objects are hashed.
const LINEAR_MAX: usize = 16;

/// An object of a batch, or a reference to it.
pub trait Object {
    /// Returns the identity of the object, which is valid while the batch lives.
    fn address(&self) -> usize;
}

/// A leaf that has memory.
#[derive(Debug)]
pub struct SeenLeaf<O> {
    pub object: O,
    pub kind: Kind,
    /// True if the leaf's elements share memory with each other. The payload then has only a gap for the leaf.
    pub overlaps_itself: bool,
    /// Start and end of the leaf's encoding in the payload.
    pub written: (usize, usize),
    /// Address of the leaf's first byte.
    pub start: usize,
    /// Address just after the leaf's last byte.
    pub end: usize,
}

/// The address range of a leaf's memory; `end` is exclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Extent {
    pub start: usize,
    pub end: usize,
    /// Index in [`Seen::leaves`].
    pub leaf: usize,
}

/// The objects and leaves of a batch, recorded to find repetitions. The batch keeps the objects alive.
#[derive(Debug)]
pub struct Seen<O> {
    /// The first `LINEAR_MAX` objects: their addresses, and the starts of their encodings.
    linear: [(usize, usize); LINEAR_MAX],
    /// Number of used entries of `linear`.
    count: usize,
    hashed: HashMap<usize, usize>,
    /// For each repetition, the position of its gap, which is one byte wide, and the start of the object's first
    /// encoding.
    pub repeats: Vec<(usize, usize)>,
    /// The leaves with memory, in the order of the payload.
    pub leaves: Vec<SeenLeaf<O>>,
    /// True if no leaf begins before the end of the previous one.
    ascending: bool,
    /// True if a leaf overlaps itself.
    pub has_self_overlaps: bool,
}

impl<O> Seen<O> {
    pub fn new() -> Self {
        Self {
            linear: [(0, 0); LINEAR_MAX],
            count: 0,
            hashed: HashMap::new(),
            repeats: Vec::new(),
            leaves: Vec::new(),
            ascending: true,
            has_self_overlaps: false,
        }
    }

    /// Records an object whose encoding would begin at `at`. If the object was recorded before, returns the start of
    /// its first encoding.
    #[inline]
    pub fn object(&mut self, address: usize, at: usize) -> Option<usize> {
        let linear = &mut self.linear[..self.count];
        if let Some(known) = linear.iter().find(|object| object.0 == address) {
            return Some(known.1);
        }
        if self.count < LINEAR_MAX {
            self.linear[self.count] = (address, at);
            self.count += 1;
            return None;
        }
        match self.hashed.entry(address) {
            std::collections::hash_map::Entry::Occupied(known) => Some(*known.get()),
            std::collections::hash_map::Entry::Vacant(free) => {
                free.insert(at);
                None
            }
        }
    }

    #[inline]
    pub fn leaf(&mut self, leaf: SeenLeaf<O>) {
        self.ascending &= self.leaves.last().is_none_or(|last| last.end <= leaf.start);
        self.leaves.push(leaf);
    }

    /// Returns the sorted extents of the leaves if aliases must be resolved: an object is repeated, leaves share
    /// memory, or a leaf overlaps itself.
    pub fn aliased_extents(&self) -> Option<Vec<Extent>> {
        let certain = self.has_self_overlaps || !self.repeats.is_empty();
        if self.ascending && !certain {
            return None;
        }
        let extent = |(leaf, seen): (usize, &SeenLeaf<O>)| Extent { start: seen.start, end: seen.end, leaf };
        let mut extents: Vec<Extent> = self.leaves.iter().enumerate().map(extent).collect();
        extents.sort_unstable();
        (certain || extents.windows(2).any(|pair| pair[0].end > pair[1].start)).then_some(extents)
    }
}
