//! What a worker writes to its status page.

use crate::shm::layout::{INDEX_BYTES, StatusPage, WorkerState};
use crate::sync::Ordering;
use crate::sys;
use crate::wire::{TaskEntry, TaskKind};

impl StatusPage {
    /// Notes at `now` that a task is taken up, and that the worker is in the dataset from then on.
    pub(super) fn begin(&self, task: u64, now: u64) {
        // Before the state: a check for stuck workers must not take the task before for this one.
        self.task_since_ns.store(now, Ordering::Relaxed);
        self.task.store(task, Ordering::Relaxed);
        self.change(WorkerState::Fetch, now);
    }

    /// Notes a state that begins at `now`. Returns the nanoseconds in the state before.
    pub(super) fn change(&self, state: WorkerState, now: u64) -> u64 {
        let before = WorkerState::from_u32(self.state.load(Ordering::Relaxed));
        if before == WorkerState::Starting && self.start_cpu_ns.load(Ordering::Relaxed) == 0 {
            self.start_queued_ns.store(sys::clock::queued_ns(), Ordering::Relaxed);
            // SYNC: start-time (pairs with the Acquire in `WorkerTotals::of`).
            self.start_cpu_ns.store(sys::clock::process_cpu_ns(), Ordering::Release);
        }
        let spent = now.saturating_sub(self.since_ns.load(Ordering::Relaxed));
        // Before the sum: a reader that finds this stretch in the sum must not find its begin as well, and count it twice.
        self.since_ns.store(now, Ordering::Relaxed);
        let sum = &self.spent_ns[before as usize];
        // SYNC: time-spent (pairs with the Acquire in `WorkerTotals::of`).
        sum.store(sum.load(Ordering::Relaxed).wrapping_add(spent), Ordering::Release);
        // Read for reports; that the worker has left counts only once its process has ended (`Handle::all_left`).
        self.state.store(state as u32, Ordering::Relaxed);
        spent
    }

    /// Shows the beginning of an index batch, for `rustloader top`. A pickle is not for others to open.
    pub(super) fn show_index(&self, entry: &TaskEntry, payload: &[u8]) {
        let payload = if entry.kind == TaskKind::Plain { payload } else { &[] };
        let mut head = [0; INDEX_BYTES];
        let shown = payload.len().min(INDEX_BYTES);
        head[..shown].copy_from_slice(&payload[..shown]);
        for (word, bytes) in self.index.iter().zip(head.as_chunks().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        self.index_len.store(payload.len() as u64, Ordering::Relaxed);
        // Read together with `task`: the two differ while the words are written.
        self.index_task.store(entry.task.wrapping_add(1), Ordering::Release);
    }
}
