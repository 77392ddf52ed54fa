//! Single-producer single-consumer rings of fixed-size entries: Lamport's bounded queue of 1983, with Acquire/Release
//! orderings instead of sequential consistency, and with cached counters as in rtrb.
//!
//! Counters wrap at 2^32; capacities are powers of two. Once the words of an entry are written, a single Release store
//! of `tail` publishes it, so a producer that is killed earlier publishes no partial entry.

use super::layout::{RingControl, RingSlot, SLOT_WORDS};
use crate::error::{Error, Result};
use crate::sync::Ordering;

/// The words of an entry.
pub type Entry = [u64; SLOT_WORDS];

/// The memory of one ring.
pub trait RingMemory {
    /// Returns the counters.
    fn control(&self) -> &RingControl;
    /// Returns the slots. Their count is a power of two and never changes.
    fn slots(&self) -> &[RingSlot];
}

/// The error for a push to a ring or queue that has no free slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// The producer's end, used by one thread at a time.
#[derive(Debug)]
pub struct Producer<M> {
    memory: M,
    /// The producer's private counter, whose value is stored into the shared `tail`.
    tail: u32,
    /// The last value read from the shared `head`. It gives a lower bound on the number of free slots.
    head: u32,
}

/// The consumer's end, used by one thread at a time.
#[derive(Debug)]
pub struct Consumer<M> {
    memory: M,
    /// The consumer's private counter, whose value is stored into the shared `head`.
    head: u32,
    /// The last value read from the shared `tail`. It gives a lower bound on the number of entries.
    tail: u32,
}

impl<M: RingMemory> Producer<M> {
    /// Returns the producer's end of a ring. It continues with the counters that an earlier producer left.
    pub fn new(memory: M) -> Self {
        let tail = memory.control().tail.0.load(Ordering::Relaxed);
        let head = memory.control().head.0.load(Ordering::Acquire);
        Self { memory, tail, head }
    }

    /// Publishes an entry, or returns [`Full`] if there is no free slot.
    #[inline]
    pub fn push(&mut self, entry: &Entry) -> std::result::Result<(), Full> {
        let slots = self.memory.slots();
        let capacity = slots.len() as u32;
        if self.tail.wrapping_sub(self.head) >= capacity {
            // SYNC: slot-taken (pairs with the Release store in `Consumer::pop`).
            self.head = self.memory.control().head.0.load(Ordering::Acquire);
            if self.tail.wrapping_sub(self.head) >= capacity {
                return Err(Full);
            }
        }
        let slot = &slots[(self.tail & (capacity - 1)) as usize];
        for (word, value) in slot.0.iter().zip(entry) {
            word.store(*value, Ordering::Relaxed);
        }
        self.tail = self.tail.wrapping_add(1);
        // SYNC: entry-published (pairs with the Acquire load in `Consumer::pop`).
        self.memory.control().tail.0.store(self.tail, Ordering::Release);
        Ok(())
    }
}

impl<M: RingMemory> Producer<M> {
    /// Returns the number of entries published so far, modulo 2^32.
    pub fn published(&self) -> u32 {
        self.tail
    }

    /// Returns true if the consumer has taken the first `published` entries. `published` is an earlier result of
    /// [`Producer::published`], after which fewer than 2^31 entries were published.
    pub fn has_taken(&mut self, published: u32) -> bool {
        // SYNC: slot-taken (pairs with the Release store in `Consumer::pop`).
        self.head = self.memory.control().head.0.load(Ordering::Acquire);
        self.head.wrapping_sub(published) <= u32::MAX / 2
    }
}

impl<M: RingMemory> Consumer<M> {
    /// Returns the consumer's end of a ring. It continues with the counters that an earlier consumer left.
    pub fn new(memory: M) -> Self {
        let head = memory.control().head.0.load(Ordering::Relaxed);
        Self { memory, head, tail: head }
    }

    /// Takes the oldest entry, or returns `None` if the ring is empty. Returns [`Error::Corrupt`] if the producer's
    /// counter claims more entries than the ring has slots.
    #[inline]
    pub fn pop(&mut self) -> Result<Option<Entry>> {
        let slots = self.memory.slots();
        let capacity = slots.len() as u32;
        if self.tail == self.head {
            // SYNC: entry-published (pairs with the Release store in `Producer::push`).
            self.tail = self.memory.control().tail.0.load(Ordering::Acquire);
            let published = self.tail.wrapping_sub(self.head);
            if published == 0 {
                return Ok(None);
            }
            if published > capacity {
                self.tail = self.head;
                return Err(Error::corrupt(format!("a ring of {capacity} slots claims to hold {published} entries")));
            }
        }
        let slot = &slots[(self.head & (capacity - 1)) as usize];
        let mut entry = [0; SLOT_WORDS];
        for (value, word) in entry.iter_mut().zip(&slot.0) {
            *value = word.load(Ordering::Relaxed);
        }
        self.head = self.head.wrapping_add(1);
        // SYNC: slot-taken (pairs with the Acquire load in `Producer::push`).
        self.memory.control().head.0.store(self.head, Ordering::Release);
        Ok(Some(entry))
    }
}

/// Rings on the heap instead of in an arena, for tests, models and benches.
pub mod heap {
    use super::{Consumer, Producer, RingControl, RingMemory, RingSlot};
    use std::sync::Arc;

    /// A ring on the heap.
    #[derive(Clone, Debug)]
    pub struct HeapRing(Arc<(RingControl, Box<[RingSlot]>)>);

    impl HeapRing {
        /// Creates a ring of `slots` slots. Panics if `slots` is not a power of two.
        pub fn new(slots: usize) -> Self {
            assert!(slots.is_power_of_two());
            Self(Arc::new((RingControl::default(), (0..slots).map(|_| RingSlot::default()).collect())))
        }

        /// Returns both ends.
        pub fn split(self) -> (Producer<Self>, Consumer<Self>) {
            (Producer::new(self.clone()), Consumer::new(self))
        }
    }

    impl RingMemory for HeapRing {
        fn control(&self) -> &RingControl {
            &self.0.0
        }

        fn slots(&self) -> &[RingSlot] {
            &self.0.1
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::heap::HeapRing;
    use super::*;

    #[test]
    fn full_empty_and_wrap() {
        let (mut producer, mut consumer) = HeapRing::new(4).split();
        for round in 0..10u64 {
            assert_eq!(consumer.pop().unwrap(), None);
            for i in 0..4 {
                producer.push(&[round * 4 + i; SLOT_WORDS]).unwrap();
            }
            assert_eq!(producer.push(&[0; SLOT_WORDS]), Err(Full));
            for i in 0..4 {
                assert_eq!(consumer.pop().unwrap(), Some([round * 4 + i; SLOT_WORDS]));
            }
        }
    }

    #[test]
    fn counters_wrap_at_the_end_of_u32() {
        let ring = HeapRing::new(2);
        ring.control().tail.0.store(u32::MAX, Ordering::Relaxed);
        ring.control().head.0.store(u32::MAX, Ordering::Relaxed);
        let (mut producer, mut consumer) = ring.split();
        for i in 0..5 {
            producer.push(&[i; SLOT_WORDS]).unwrap();
            assert_eq!(consumer.pop().unwrap(), Some([i; SLOT_WORDS]));
        }
    }

    #[test]
    fn a_counter_out_of_range_is_an_error_not_a_read() {
        let ring = HeapRing::new(2);
        ring.control().tail.0.store(77, Ordering::Relaxed);
        let (_, mut consumer) = ring.split();
        assert!(matches!(consumer.pop(), Err(Error::Corrupt { .. })));
    }
}
