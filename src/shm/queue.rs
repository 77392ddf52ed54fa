//! A queue from which any worker may take entries. The main process is the only producer; each worker is a consumer.
//!
//! The entry at `position` lies in slot `position % capacity`. The slot's state is one word:
//!
//! ```text
//! (position + 1) << 18 | holder       holder: 0 waiting, 1 withdrawn, w + 2 held by worker w
//!
//! producer                            worker w
//! read the state: not waiting
//! write the entry                     read the state: waiting
//! state = (position + 1) << 18        read the entry
//!                                     state: waiting -> w + 2, or try the next position
//! ```
//! A worker reads an entry first, and then claims it by a compare-and-swap of the state. If the swap succeeds, the
//! state has not changed in between, so the entry was not overwritten during the read. At any moment the state shows
//! which worker holds an entry, even if that worker was killed.
//!
//! Entries are claimed in the order of their positions, so the entries that still wait are the newest ones. So while
//! fewer than `capacity` entries wait, the slot that the producer needs next holds no waiting entry. The producer may
//! reuse the slot of an entry that a worker holds and has not answered: [`Submitter`] then remembers the holder. A
//! zeroed slot counts as holding an entry older than the first one.

use super::layout::{QueueControl, QueueSlot, SLOT_WORDS};
use super::ring::{Entry, Full};
use crate::error::{Error, Result};
use crate::sync::Ordering;

/// Number of bits of a state that encode the holder: enough for all workers and the two special values.
const HOLDER_BITS: u32 = 18;
/// No worker has claimed the entry.
const WAITING: u64 = 0;
/// The producer has taken the entry back.
const WITHDRAWN: u64 = 1;

/// Returns the state of a slot that holds the entry at `position`.
#[inline]
fn state_of(position: u64, holder: u64) -> u64 {
    position.wrapping_add(1) << HOLDER_BITS | holder
}

/// Encodes a worker as a holder.
#[inline]
fn holder_of(worker: u32) -> u64 {
    u64::from(worker) + 2
}

/// Decodes the holder of a state; `None` if no worker holds the entry.
#[inline]
fn worker_of(state: u64) -> Option<u32> {
    u32::try_from((state & ((1 << HOLDER_BITS) - 1)).checked_sub(2)?).ok()
}

/// Returns true if a slot in this state holds an entry that no worker has claimed.
pub fn is_waiting(state: u64) -> bool {
    state != 0 && state & ((1 << HOLDER_BITS) - 1) == WAITING
}

/// The memory of a queue.
pub trait QueueMemory {
    /// Returns the head and the bell.
    fn control(&self) -> &QueueControl;
    /// Returns the slots. Their count is a power of two and never changes.
    fn slots(&self) -> &[QueueSlot];

    /// Returns the slot of a position.
    #[inline]
    fn slot(&self, position: u64) -> &QueueSlot {
        let slots = self.slots();
        &slots[position as usize & (slots.len() - 1)]
    }
}

/// The producer's end, used by one thread at a time.
#[derive(Debug)]
pub struct Submitter<M> {
    memory: M,
    /// The position of the next entry.
    tail: u64,
    /// For each slot, the position of its entry; `None` once the entry is answered or withdrawn.
    unanswered: Box<[Option<u64>]>,
    /// The positions of unanswered entries whose slots have been reused, with the workers that hold them.
    displaced: Vec<(u64, u32)>,
}

impl<M: QueueMemory> Submitter<M> {
    /// Returns the producer's end of an empty queue.
    pub fn new(memory: M) -> Self {
        let unanswered = vec![None; memory.slots().len()].into();
        Self { memory, tail: 0, unanswered, displaced: Vec::new() }
    }

    /// Returns the memory.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Queues an entry. Returns its position, which is the number of entries queued before it, or [`Full`] if the next
    /// slot holds an entry that no worker has claimed.
    #[inline]
    pub fn push(&mut self, entry: &Entry) -> std::result::Result<u64, Full> {
        let position = self.tail;
        let slot = self.memory.slot(position);
        // SYNC: entry-claimed (pairs with the Release swap in `Claimer::claim`).
        let old = slot.state.load(Ordering::Acquire);
        if is_waiting(old) {
            return Err(Full);
        }
        let place = self.place(position);
        if let Some(last) = self.unanswered[place]
            && let Some(worker) = worker_of(old)
        {
            self.displaced.push((last, worker));
        }
        self.unanswered[place] = Some(position);
        for (word, value) in slot.entry.iter().zip(entry) {
            word.store(*value, Ordering::Relaxed);
        }
        // SYNC: entry-queued (pairs with the Acquire load in `Claimer::claim`).
        slot.state.store(state_of(position, WAITING), Ordering::Release);
        self.tail = position + 1;
        Ok(position)
    }

    /// Takes back and returns the entry at `position` if no worker has claimed it. No worker can claim the entry
    /// afterwards.
    pub fn withdraw(&mut self, position: u64) -> Option<Entry> {
        let place = self.place(position);
        if self.unanswered[place] != Some(position) {
            return None;
        }
        let slot = self.memory.slot(position);
        let (waiting, withdrawn) = (state_of(position, WAITING), state_of(position, WITHDRAWN));
        // This side wrote the entry, so there is nothing to synchronize with.
        slot.state.compare_exchange(waiting, withdrawn, Ordering::Relaxed, Ordering::Relaxed).ok()?;
        self.unanswered[place] = None;
        Some(read(slot))
    }

    /// Records that `worker` has answered an entry. Returns true if that worker held the entry and had not yet answered
    /// it.
    #[inline]
    pub fn answered(&mut self, position: u64, worker: u32) -> bool {
        let place = self.place(position);
        if self.unanswered[place] == Some(position) {
            let held = self.holder(position) == Some(worker);
            if held {
                self.unanswered[place] = None;
            }
            return held;
        }
        let index = self.displaced.iter().position(|it| *it == (position, worker));
        index.map(|index| self.displaced.swap_remove(index)).is_some()
    }

    /// Returns the worker that holds an unanswered entry; `None` if no worker does.
    #[inline]
    pub fn holder(&self, position: u64) -> Option<u32> {
        if self.unanswered[self.place(position)] != Some(position) {
            let displaced = self.displaced.iter().find(|(displaced, _)| *displaced == position);
            return displaced.map(|(_, worker)| *worker);
        }
        // A worker's claim happens before its answer and before its death, so a load after the answer or the death sees
        // the claim. An earlier load may miss it.
        worker_of(self.memory.slot(position).state.load(Ordering::Relaxed))
    }

    /// Returns the position of the oldest entry that a worker holds and has not answered.
    pub fn held_by(&self, worker: u32) -> Option<u64> {
        let displaced = self.displaced.iter().map(|(position, _)| *position);
        let all = self.unanswered.iter().flatten().copied().chain(displaced);
        all.filter(|position| self.holder(*position) == Some(worker)).min()
    }

    /// Returns the position of the oldest entry that waits for a worker.
    pub fn oldest_waiting(&self) -> Option<u64> {
        let all = self.unanswered.iter().flatten().copied();
        let waits =
            |position: &u64| self.memory.slot(*position).state.load(Ordering::Relaxed) == state_of(*position, WAITING);
        all.filter(waits).min()
    }

    #[inline]
    fn place(&self, position: u64) -> usize {
        position as usize & (self.unanswered.len() - 1)
    }
}

/// A worker's end, used by one thread at a time.
#[derive(Debug)]
pub struct Claimer<M> {
    memory: M,
    holder: u64,
}

impl<M: QueueMemory> Claimer<M> {
    /// Returns a worker's end.
    pub fn new(memory: M, worker: u32) -> Self {
        Self { memory, holder: holder_of(worker) }
    }

    /// Returns the memory.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Claims the oldest waiting entry and returns its position and words, or returns `None` if no entry waits. The
    /// worker holds the entry until it has answered. Returns [`Error::Corrupt`] if a slot holds an entry that belongs
    /// in another slot, or if the head has passed an entry that still waits.
    #[inline]
    pub fn claim(&mut self) -> Result<Option<(u64, Entry)>> {
        let control = self.memory.control();
        // The head is only a hint: a stale value costs extra steps, but the states of the slots decide.
        // SYNC: head-moved (pairs with the Release below): a worker that sees a value of the head also sees that no
        // entry before that position waits.
        let mut position = control.head.0.load(Ordering::Acquire);
        loop {
            let slot = self.memory.slot(position);
            // SYNC: entry-queued (pairs with the Release store in `Submitter::push`).
            let seen = slot.state.load(Ordering::Acquire);
            let count = seen >> HOLDER_BITS;
            if count <= position {
                return self.check_passed(position).map(|()| None);
            }
            if count - 1 != position {
                position = self.next_after(position, count - 1)?;
                continue;
            }
            if seen == state_of(position, WAITING) {
                let entry = read(slot);
                let held = state_of(position, self.holder);
                // SYNC: entry-claimed (pairs with the Acquire load in `Submitter::push`): the read comes before the
                // reuse.
                if slot.state.compare_exchange(seen, held, Ordering::Release, Ordering::Relaxed).is_ok() {
                    // SYNC: head-moved (pairs with the Acquire above).
                    control.head.0.fetch_max(position + 1, Ordering::Release);
                    return Ok(Some((position, entry)));
                }
            }
            position += 1;
        }
    }

    /// Returns [`Error::Corrupt`] if an entry before `position` waits: the head is then damaged, and hides that entry
    /// from all workers.
    #[inline]
    fn check_passed(&self, position: u64) -> Result<()> {
        for slot in self.memory.slots() {
            // Relaxed is enough: the worker that moved the head had seen all earlier claims, and head-moved makes them
            // visible here.
            let state = slot.state.load(Ordering::Relaxed);
            if is_waiting(state) && state >> HOLDER_BITS <= position {
                let waiting = (state >> HOLDER_BITS) - 1;
                return Err(Error::corrupt(format!(
                    "the head of a queue has passed entry {waiting}, which no worker has claimed"
                )));
            }
        }
        Ok(())
    }

    /// Returns the position to try next if the slot for `position` holds the entry `newer`. Entries that precede
    /// `newer` by the queue's capacity or more no longer wait, so the search skips them. Returns [`Error::Corrupt`] if
    /// `newer` belongs in another slot.
    #[cold]
    fn next_after(&self, position: u64, newer: u64) -> Result<u64> {
        let capacity = self.memory.slots().len() as u64;
        if !(newer - position).is_multiple_of(capacity) {
            return Err(Error::corrupt(format!(
                "a queue of {capacity} slots has entry {newer} in the slot of entry {position}"
            )));
        }
        Ok(newer - capacity + 1)
    }
}

/// Returns the words of a slot's entry.
#[inline]
fn read(slot: &QueueSlot) -> Entry {
    let mut entry = [0; SLOT_WORDS];
    for (value, word) in entry.iter_mut().zip(&slot.entry) {
        *value = word.load(Ordering::Relaxed);
    }
    entry
}

/// A queue on the heap instead of in an arena, for tests, models and benches.
pub mod heap {
    use super::{Claimer, QueueControl, QueueMemory, QueueSlot, Submitter};
    use std::sync::Arc;

    /// A queue on the heap.
    #[derive(Clone, Debug)]
    pub struct HeapQueue(Arc<(QueueControl, Box<[QueueSlot]>)>);

    impl HeapQueue {
        /// Creates a queue of `slots` slots. Panics if `slots` is not a power of two.
        pub fn new(slots: usize) -> Self {
            assert!(slots.is_power_of_two());
            Self(Arc::new((QueueControl::default(), (0..slots).map(|_| QueueSlot::default()).collect())))
        }

        /// Returns the producer's end.
        pub fn submitter(&self) -> Submitter<Self> {
            Submitter::new(self.clone())
        }

        /// Returns a worker's end.
        pub fn claimer(&self, worker: u32) -> Claimer<Self> {
            Claimer::new(self.clone(), worker)
        }
    }

    impl QueueMemory for HeapQueue {
        fn control(&self) -> &QueueControl {
            &self.0.0
        }

        fn slots(&self) -> &[QueueSlot] {
            &self.0.1
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::heap::HeapQueue;
    use super::*;

    fn entry(position: u64) -> Entry {
        [position * 7; SLOT_WORDS]
    }

    #[test]
    fn entries_are_claimed_once_and_in_order() {
        let queue = HeapQueue::new(4);
        let (mut main, mut workers) = (queue.submitter(), [queue.claimer(0), queue.claimer(65_535)]);
        for round in 0..10 {
            assert_eq!(workers[0].claim().unwrap(), None);
            for position in round * 4..round * 4 + 4 {
                assert_eq!(main.push(&entry(position)), Ok(position));
            }
            assert_eq!(main.push(&entry(0)), Err(Full), "a waiting entry is not overwritten");
            for position in round * 4..round * 4 + 4 {
                let (worker, id) = [(0, 0), (1, 65_535)][position as usize % 2];
                assert_eq!(workers[worker].claim().unwrap(), Some((position, entry(position))));
                assert_eq!(main.holder(position), Some(id));
                assert_eq!(main.held_by(id), Some(position));
                assert!(!main.answered(position, 1 - id.min(1)), "answered by a worker that does not hold it");
                assert!(!main.answered(position + 4, id));
                assert!(main.answered(position, id));
                assert!(!main.answered(position, id), "answered twice");
                assert_eq!((main.held_by(id), main.holder(position)), (None, None));
            }
        }
    }

    #[test]
    fn withdrawn_entries_are_not_claimed_and_claimed_entries_are_not_withdrawn() {
        let queue = HeapQueue::new(4);
        let (mut main, mut worker) = (queue.submitter(), queue.claimer(3));
        (0..4).for_each(|position| assert_eq!(main.push(&entry(position)), Ok(position)));
        assert_eq!(worker.claim().unwrap(), Some((0, entry(0))));
        assert_eq!(main.oldest_waiting(), Some(1));
        assert_eq!(main.withdraw(0), None);
        assert_eq!(main.withdraw(1), Some(entry(1)));
        assert_eq!(main.withdraw(1), None);
        assert_eq!(main.withdraw(3), Some(entry(3)));
        assert_eq!(main.oldest_waiting(), Some(2));
        assert_eq!(worker.claim().unwrap(), Some((2, entry(2))));
        assert_eq!((worker.claim().unwrap(), main.oldest_waiting()), (None, None));
        assert!(!main.answered(1, 3));
        assert!(main.answered(0, 3) && main.answered(2, 3));
        // The slots of withdrawn entries are reused.
        (4..8).for_each(|position| assert_eq!(main.push(&entry(position)), Ok(position)));
        assert_eq!(main.withdraw(3), None);
        (4..8).for_each(|position| assert_eq!(worker.claim().unwrap(), Some((position, entry(position)))));
    }

    #[test]
    fn the_holder_of_an_entry_is_known_after_its_slot_was_reused() {
        let queue = HeapQueue::new(2);
        let (mut main, mut slow, mut quick) = (queue.submitter(), queue.claimer(0), queue.claimer(1));
        main.push(&entry(0)).unwrap();
        assert_eq!(slow.claim().unwrap(), Some((0, entry(0))));
        for position in 1..9 {
            assert_eq!(main.push(&entry(position)), Ok(position));
            assert_eq!(quick.claim().unwrap(), Some((position, entry(position))));
            assert_eq!((main.held_by(0), main.held_by(1)), (Some(0), Some(position)));
            assert!(main.answered(position, 1));
        }
        assert_eq!((main.holder(0), main.withdraw(0)), (Some(0), None));
        assert!(!main.answered(0, 1));
        assert!(main.answered(0, 0) && !main.answered(0, 0));
        assert_eq!((main.held_by(0), main.displaced.len()), (None, 0));
    }

    #[test]
    fn of_several_entries_that_a_worker_holds_the_oldest_comes_first() {
        let queue = HeapQueue::new(2);
        let (mut main, mut worker) = (queue.submitter(), queue.claimer(3));
        // The third entry reuses the slot of the first one.
        for position in 0..3 {
            main.push(&entry(position)).unwrap();
            assert_eq!(worker.claim().unwrap(), Some((position, entry(position))));
            assert_eq!(main.held_by(3), Some(0));
        }
        for position in 0..3 {
            assert_eq!(main.held_by(3), Some(position));
            assert!(main.answered(position, 3));
        }
    }

    #[test]
    fn a_stale_head_only_costs_extra_steps() {
        let queue = HeapQueue::new(4);
        let (mut main, mut worker) = (queue.submitter(), queue.claimer(0));
        for position in 0..103 {
            main.push(&entry(position)).unwrap();
            // A worker that is killed between claiming an entry and moving the head leaves a stale head.
            queue.control().head.0.store(position / 50, Ordering::Relaxed);
            assert_eq!(worker.claim().unwrap(), Some((position, entry(position))));
            assert_eq!(queue.control().head.0.load(Ordering::Relaxed), position + 1);
        }
        queue.control().head.0.store(1, Ordering::Relaxed);
        assert_eq!(worker.claim().unwrap(), None);
    }

    #[test]
    fn a_head_that_has_passed_a_waiting_entry_is_an_error() {
        for head in [1, 2, 3, 4, 6, 1 << 40, u64::MAX] {
            let queue = HeapQueue::new(4);
            let (mut main, mut worker) = (queue.submitter(), queue.claimer(0));
            queue.control().head.0.store(head, Ordering::Relaxed);
            assert_eq!(worker.claim().unwrap(), None, "nothing is hidden yet");
            (0..2).for_each(|position| assert_eq!(main.push(&entry(position)), Ok(position)));
            if head == 1 {
                assert_eq!(worker.claim().unwrap(), Some((1, entry(1))));
            }
            assert!(matches!(worker.claim(), Err(Error::Corrupt { .. })), "{head}");
        }
    }

    #[test]
    fn an_entry_in_the_slot_of_another_is_an_error() {
        let queue = HeapQueue::new(4);
        queue.slots()[0].state.store(state_of(6, WAITING), Ordering::Relaxed);
        assert!(matches!(queue.claimer(0).claim(), Err(Error::Corrupt { .. })));
    }
}
