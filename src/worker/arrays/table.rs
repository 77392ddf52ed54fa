//! The table of the arrays in a region.

use std::collections::HashMap;

/// An array, which has a block to itself.
#[derive(Debug)]
pub(super) struct Array {
    pub(super) len: u64,
    /// True if an unpublished message includes the array.
    pub(super) noted: bool,
    /// True if the array was freed while it was noted.
    pub(super) freed: bool,
}

/// The arrays in a region.
#[derive(Debug, Default)]
pub(in crate::worker) struct Arrays {
    /// The live arrays, by the numbers of their blocks.
    pub(super) live: HashMap<u32, Array>,
    /// Total bytes of the live arrays.
    pub(super) bytes: u64,
    /// True if the worker has left: the region may no longer be changed.
    pub(super) ended: bool,
}

impl Arrays {
    pub(super) fn forget(&mut self, block: u32) {
        if let Some(array) = self.live.remove(&block) {
            self.bytes -= array.len;
        }
    }
}
