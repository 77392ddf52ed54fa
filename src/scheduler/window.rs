//! The byte limit of a window.

/// The bytes of the ready results, and an estimate for the outstanding tasks, each of which counts as the largest
/// result so far.
#[derive(Debug)]
pub(super) struct Bytes {
    limit: u64,
    /// Bytes of the ready results of this epoch.
    ready: u64,
    /// Bytes of the largest result so far, in all epochs; 0 before the first result.
    largest: u64,
}

impl Bytes {
    pub fn new(limit: u64) -> Self {
        Self { limit, ready: 0, largest: 0 }
    }

    /// Counts a result that waits for delivery. The sum saturates, because sizes come from other processes and may be
    /// wrong.
    pub fn add(&mut self, bytes: u64) {
        self.ready = self.ready.saturating_add(bytes);
        self.largest = self.largest.max(bytes);
    }

    /// Counts the delivery of a result.
    pub fn remove(&mut self, bytes: u64) {
        self.ready = self.ready.saturating_sub(bytes);
    }

    /// Forgets the results of the previous epoch, but not the largest size.
    pub fn begin_epoch(&mut self) {
        self.ready = 0;
    }

    /// Returns true if there is room for one more task in addition to the outstanding ones.
    pub fn admits(&self, outstanding: u32) -> bool {
        let expected = self.largest.saturating_mul(u64::from(outstanding) + 1);
        self.ready.saturating_add(expected) <= self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_outstanding_task_counts_as_the_largest_result() {
        let mut bytes = Bytes::new(100);
        assert!(bytes.admits(1_000), "no size is known");
        bytes.add(20);
        assert!(bytes.admits(3) && !bytes.admits(4), "20 + 4 x 20 fit");
        bytes.add(10);
        assert!(bytes.admits(2) && !bytes.admits(3));
        bytes.remove(20);
        assert!(bytes.admits(3) && !bytes.admits(4), "10 + 4 x 20 fit");
        bytes.begin_epoch();
        assert!(bytes.admits(4) && !bytes.admits(5), "the size is still known");
        bytes.add(u64::MAX);
        bytes.add(u64::MAX);
        assert!(!bytes.admits(u32::MAX));
    }
}
