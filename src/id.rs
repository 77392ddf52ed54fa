//! Newtypes for the IDs that cross layers.

/// The ID of a worker in its iterator: 0 to `num_workers - 1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u32);

impl WorkerId {
    /// Returns the worker's ID as an index into a table.
    #[inline]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// The sequence number of a task. It is unique across all epochs of an iterator, so that stale results are recognized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TaskId(pub u64);
