//! The worker's writes to its status page.

use crate::shm::layout::{INDEX_BYTES, StatusPage, WorkerState};
use crate::sync::Ordering;
use crate::sys;
use crate::wire::{TaskEntry, TaskKind};

impl StatusPage {
    /// Begins a task.
    pub(super) fn begin(&self, task: u64, now: u64) {
        // Before the state: a stall check must not mistake the previous task for this one.
        self.task_since_ns.store(now, Ordering::Relaxed);
        self.task.store(task, Ordering::Relaxed);
        self.change(WorkerState::Fetch, now);
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
        // Before the sum: a reader must not count this interval twice.
        self.since_ns.store(now, Ordering::Relaxed);
        let sum = &self.spent_ns[before as usize];
        // SYNC: time-spent (pairs with the Acquire in `WorkerTotals::of`).
        sum.store(sum.load(Ordering::Relaxed).wrapping_add(spent), Ordering::Release);
        // For reports. `Left` counts only after the end of the process (`Handle::all_left`).
        self.state.store(state as u32, Ordering::Relaxed);
        spent
    }

    /// Shows the beginning of an index batch, for `rustloader top`, which opens no pickles.
    pub(super) fn show_index(&self, entry: &TaskEntry, payload: &[u8]) {
        let payload = if entry.kind == TaskKind::Plain { payload } else { &[] };
        let mut head = [0; INDEX_BYTES];
        let shown = payload.len().min(INDEX_BYTES);
        head[..shown].copy_from_slice(&payload[..shown]);
        for (word, bytes) in self.index.iter().zip(head.as_chunks().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        self.index_len.store(payload.len() as u64, Ordering::Relaxed);
        // Readers compare it to `task`: the two differ while the words are written.
        self.index_task.store(entry.task.wrapping_add(1), Ordering::Release);
    }
}
