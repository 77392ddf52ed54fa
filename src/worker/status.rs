//! The worker's writes to its status page.

use crate::config::{FETCH_MEASURED_FROM_NS, FETCH_SAMPLE};
use crate::shm::layout::{INDEX_BYTES, NOT_BEGUN, StatusPage, WorkerState};
use crate::sync::{AtomicU64, Ordering};
use crate::sys;
use crate::wire::{TaskEntry, TaskKind};

impl StatusPage {
    /// Begins a task. Returns the nanoseconds spent in the previous state.
    pub(super) fn begin(&self, task: u64, kind: TaskKind, now: u64) -> u64 {
        // Stored before the state, so that a stall check does not mistake the previous task for this one.
        self.task_since_ns.store(now, Ordering::Relaxed);
        // The message that begins an epoch carries the number of the epoch's first task, which has not begun.
        self.place.store(if kind.begins_epoch() { NOT_BEGUN } else { 0 }, Ordering::Relaxed);
        self.task.store(task, Ordering::Relaxed);
        self.change(WorkerState::Fetch, now)
    }

    /// Stores the index, within its index batch, of the current sample. In a replay, stores nothing and returns false.
    #[inline]
    pub(super) fn at_sample(&self, place: u64) -> bool {
        let is_begun = self.place.load(Ordering::Relaxed) != NOT_BEGUN;
        if is_begun {
            self.place.store(place.saturating_add(1), Ordering::Relaxed);
        }
        is_begun
    }

    /// Enters a state. Returns the nanoseconds spent in the previous one.
    pub(super) fn change(&self, state: WorkerState, now: u64) -> u64 {
        let before = WorkerState::from_u32(self.state.load(Ordering::Relaxed));
        if before == WorkerState::Starting && self.start_cpu_ns.load(Ordering::Relaxed) == 0 {
            self.start_queued_ns.store(sys::clock::queued_ns(), Ordering::Relaxed);
            // SYNC: start-time (pairs with the Acquire in `WorkerTotals::of`).
            self.start_cpu_ns.store(sys::clock::process_cpu_ns(), Ordering::Release);
        }
        let spent = now.saturating_sub(self.since_ns.load(Ordering::Relaxed));
        // Stored before the sum, so that a reader does not count this interval twice.
        self.since_ns.store(now, Ordering::Relaxed);
        let sum = &self.spent_ns[before as usize];
        // SYNC: time-spent (pairs with the Acquire in `WorkerTotals::of`).
        sum.store(sum.load(Ordering::Relaxed).wrapping_add(spent), Ordering::Release);
        // Relaxed, because no reader relies on the state for other data; `Handle::all_left` relies on `Left`, but only
        // after the process has ended.
        self.state.store(state as u32, Ordering::Relaxed);
        spent
    }

    /// Returns true if the CPU time of the next fetch must be measured. If fetches are long on average, every fetch is
    /// measured; otherwise, one in [`FETCH_SAMPLE`].
    pub(super) fn measures_fetch(&self) -> bool {
        let fetched = self.spent_ns[WorkerState::Fetch as usize].load(Ordering::Relaxed);
        let sent = self.sent.load(Ordering::Relaxed);
        sent.is_multiple_of(FETCH_SAMPLE) || fetched >= sent.saturating_mul(FETCH_MEASURED_FROM_NS)
    }

    /// Adds a measured fetch: its CPU time and its wall time, in nanoseconds.
    pub(super) fn add_fetch(&self, cpu: u64, wall: u64) {
        let add = |word: &AtomicU64, more, order| {
            word.store(word.load(Ordering::Relaxed).wrapping_add(more), order);
        };
        // The wall time is stored first: a reader between the two stores sees too little CPU time, never too much.
        add(&self.fetch_measured_ns, wall, Ordering::Relaxed);
        // SYNC: fetch-measured (pairs with the Acquire in `WorkerTotals::of`).
        add(&self.fetch_cpu_ns, cpu, Ordering::Release);
    }

    /// Stores the beginning of an index batch for `rustloader top`. Stores no bytes of a pickled index batch, because
    /// `top` does not unpickle.
    pub(super) fn show_index(&self, entry: &TaskEntry, payload: &[u8]) {
        let payload = if entry.kind == TaskKind::Plain { payload } else { &[] };
        let mut head = [0; INDEX_BYTES];
        let shown = payload.len().min(INDEX_BYTES);
        head[..shown].copy_from_slice(&payload[..shown]);
        for (word, bytes) in self.index.iter().zip(head.as_chunks().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        self.index_len.store(payload.len() as u64, Ordering::Relaxed);
        // Readers compare this number with `task` + 1: the two do not match while the words are being written.
        self.index_task.store(entry.task.wrapping_add(1), Ordering::Release);
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn all_long_fetches_are_measured_and_a_sample_of_short_ones() {
        let page = StatusPage::default();
        let measured = |sent, mean| {
            page.sent.store(sent, Ordering::Relaxed);
            page.spent_ns[WorkerState::Fetch as usize].store(sent * mean, Ordering::Relaxed);
            page.measures_fetch()
        };
        assert!((0..100).all(|sent| measured(sent, FETCH_MEASURED_FROM_NS)));
        let short: Vec<u64> = (0..33).filter(|&sent| measured(sent, FETCH_MEASURED_FROM_NS - 1)).collect();
        assert_eq!(short, [0, 8, 16, 24, 32]);
        assert_eq!(FETCH_SAMPLE, 8);
    }

    #[test]
    fn measured_fetches_add_up() {
        let page = StatusPage::default();
        page.add_fetch(2, 10);
        page.add_fetch(3, 20);
        let both = [&page.fetch_cpu_ns, &page.fetch_measured_ns].map(|word| word.load(Ordering::Relaxed));
        assert_eq!(both, [5, 30]);
        page.reset();
        let both = [&page.fetch_cpu_ns, &page.fetch_measured_ns].map(|word| word.load(Ordering::Relaxed));
        assert_eq!(both, [0, 0]);
    }
}
