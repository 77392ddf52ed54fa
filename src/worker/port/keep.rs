//! The worker's hold on the blocks of a message's leaves.

/// The worker's hold on a leaf's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// The block was allocated for this message.
    No,
    /// The block contains an object of the worker.
    Yes,
    /// The block contained an object of the worker that may no longer exist. The consumer already holds the block.
    TransferredEarly,
    /// The block contains an array, which begins `offset` bytes into the leaf. Whether the worker keeps the array is
    /// known only after the batch is dropped.
    Unknown {
        /// Number of the leaf's bytes before the array.
        offset: u64,
    },
    /// The block contained an array, whose memory was freed.
    Freed,
}
