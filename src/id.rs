//! Newtypes for the numbers that the layers pass to each other.

/// The position of a worker in its iterator: 0 to `num_workers - 1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u32);

impl WorkerId {
    /// The worker's position as an index into a table.
    #[inline]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// The sequence number of a task. It counts up through all epochs of an iterator and is never used twice,
/// so that a result of an abandoned epoch cannot be taken for one of the present epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TaskId(pub u64);
