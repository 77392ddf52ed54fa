//! The holders of a leaf's block after its message was sent.

/// The worker's hold on a leaf's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// The block was allocated for this message.
    No,
    /// It contains an object of the worker.
    Yes,
    /// It contained one, which may have gone. The consumer holds it already.
    HandedOver,
    /// It contains an array, which begins at `offset` of the leaf. Whether the worker keeps it is known once the batch
    /// is dropped.
    Unknown {
        /// Bytes before the array.
        offset: u64,
    },
    /// An array lay in it, whose memory has been freed.
    Freed,
}
