//! The counters of a worker's status page as frames carry them, and the status page that the main process keeps for a
//! worker on another machine.

use crate::shm::layout::{StatusPage, WorkerState};
use crate::sync::{AtomicU64, Ordering};

/// Number of counters.
pub const COUNTERS: usize = WorkerState::COUNT + 7;

/// Returns the counters in the order in which [`store`] writes them. The readers of a status page rely on this order.
fn counters(page: &StatusPage) -> [&AtomicU64; COUNTERS] {
    let StatusPage { spent_ns, tasks_done, sent, largest, start_queued_ns, start_cpu_ns, .. } = page;
    let [starting, idle, fetch, collate, pack, publish, left] = spent_ns;
    let (fetch_wall, fetch_cpu) = (&page.fetch_measured_ns, &page.fetch_cpu_ns);
    [
        starting,
        idle,
        fetch,
        collate,
        pack,
        publish,
        left,
        tasks_done,
        sent,
        largest,
        start_queued_ns,
        start_cpu_ns,
        fetch_wall,
        fetch_cpu,
    ]
}

/// Returns the counters of a page.
pub fn read(page: &StatusPage) -> [u64; COUNTERS] {
    counters(page).map(|word| word.load(Ordering::Relaxed))
}

/// Stores received counters in a page.
pub fn store(page: &StatusPage, values: &[u64; COUNTERS]) {
    for (word, value) in counters(page).into_iter().zip(values) {
        word.store(*value, Ordering::Release);
    }
}

/// Stores a state that the worker entered at `now`, and the task that it has begun, if any.
pub fn enter(page: &StatusPage, state: WorkerState, task: Option<u64>, now: u64) {
    if let Some(task) = task {
        // Store the task before the state, so that a stall check does not mistake the previous task for this one.
        page.task_since_ns.store(now, Ordering::Relaxed);
        page.place.store(0, Ordering::Relaxed);
        page.task.store(task, Ordering::Relaxed);
    }
    page.since_ns.store(now, Ordering::Relaxed);
    page.state.store(state as u32, Ordering::Relaxed);
}
