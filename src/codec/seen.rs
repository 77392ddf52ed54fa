//! The objects of a batch so far, and the memory of its leaves.

use std::collections::HashMap;

use crate::tree::Kind;

/// Number of objects that are searched linearly; further ones are hashed.
const FEW: usize = 16;

/// An object of a batch, or a reference to it.
pub trait Object {
    /// Returns its identity while the batch lives.
    fn address(&self) -> usize;
}

/// A leaf with memory, in the order of the payload.
#[derive(Debug)]
pub struct Met<O> {
    pub object: O,
    pub kind: Kind,
    /// True if its elements share memory, so that it has only a gap.
    pub window: bool,
    /// Start and end of its encoding in the payload.
    pub written: (usize, usize),
    /// Address of its first byte.
    pub start: usize,
    /// Address after its last byte.
    pub end: usize,
}

/// A leaf's memory: the addresses of its first byte and after its last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Extent {
    pub start: usize,
    pub end: usize,
    /// Position in [`Seen::leaves`].
    pub leaf: usize,
}

/// Records objects and memory, and finds repetitions. The batch keeps all of it alive.
#[derive(Debug)]
pub struct Seen<O> {
    /// Addresses of objects, and the starts of their encodings.
    few: [(usize, usize); FEW],
    count: usize,
    many: HashMap<usize, usize>,
    /// Repeated objects: position of the gap, which is one byte wide, and start of the first encoding.
    pub again: Vec<(usize, usize)>,
    pub leaves: Vec<Met<O>>,
    /// True if each leaf begins after the end of the previous one.
    ascending: bool,
    /// True if a leaf is a window.
    pub windows: bool,
}

impl<O> Seen<O> {
    pub fn new() -> Self {
        Self {
            few: [(0, 0); FEW],
            count: 0,
            many: HashMap::new(),
            again: Vec::new(),
            leaves: Vec::new(),
            ascending: true,
            windows: false,
        }
    }

    /// Records an object whose encoding begins at `at`. For a repeated one returns the start of its first encoding.
    #[inline]
    pub fn object(&mut self, address: usize, at: usize) -> Option<usize> {
        let few = &mut self.few[..self.count];
        if let Some(found) = few.iter().find(|object| object.0 == address) {
            return Some(found.1);
        }
        if self.count < FEW {
            self.few[self.count] = (address, at);
            self.count += 1;
            return None;
        }
        match self.many.entry(address) {
            std::collections::hash_map::Entry::Occupied(found) => Some(*found.get()),
            std::collections::hash_map::Entry::Vacant(free) => {
                free.insert(at);
                None
            }
        }
    }

    #[inline]
    pub fn leaf(&mut self, met: Met<O>) {
        self.ascending &= self.leaves.last().is_none_or(|last| last.end <= met.start);
        self.leaves.push(met);
    }

    /// Returns the sorted extents of the leaves if aliases must be resolved: an object is repeated, leaves share
    /// memory, or there are windows.
    pub fn tangled(&self) -> Option<Vec<Extent>> {
        let certain = self.windows || !self.again.is_empty();
        if self.ascending && !certain {
            return None;
        }
        let extent = |(leaf, met): (usize, &Met<O>)| Extent { start: met.start, end: met.end, leaf };
        let mut extents: Vec<Extent> = self.leaves.iter().enumerate().map(extent).collect();
        extents.sort_unstable();
        (certain || extents.windows(2).any(|pair| pair[0].end > pair[1].start)).then_some(extents)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_object_is_found_again_where_it_stood_first(addresses in proptest::collection::vec(1usize..40, 0..120)) {
            let (mut seen, mut first) = (Seen::<()>::new(), HashMap::new());
            for (at, address) in addresses.into_iter().enumerate() {
                prop_assert_eq!(seen.object(address, at), first.get(&address).copied());
                first.entry(address).or_insert(at);
            }
        }

        #[test]
        fn leaves_are_tangled_where_two_extents_overlap(
            extents in proptest::collection::vec((0usize..60, 1usize..9), 0..12),
            windows: bool,
        ) {
            let mut seen = Seen::new();
            seen.windows = windows;
            for &(start, len) in &extents {
                let (kind, written) = (Kind::Tensor, (0, 0));
                seen.leaf(Met { object: (), kind, window: false, written, start, end: start + len });
            }
            let overlap = |(a, b): (&(usize, usize), &(usize, usize))| a.0 < b.0 + b.1 && b.0 < a.0 + a.1;
            let pairs = extents.iter().enumerate().flat_map(|(i, a)| extents[i + 1..].iter().map(move |b| (a, b)));
            let want = windows || pairs.into_iter().any(overlap);
            let found = seen.tangled();
            prop_assert_eq!(found.is_some(), want);
            if let Some(found) = found {
                prop_assert!(found.is_sorted());
                let starts = found.iter().map(|it| (extents[it.leaf].0, it.end - it.start));
                prop_assert!(starts.eq(found.iter().map(|it| (it.start, extents[it.leaf].1))));
                prop_assert_eq!(found.len(), extents.len());
            }
        }
    }
}
