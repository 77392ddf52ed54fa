//! Counters of an iterator, readable from any thread at any time.
//!
//! A counter has one writer at a time: the thread with exclusive access to the iterator, or the pin thread. An addition
//! is therefore a load and a store. Recording a slow task, ending an iterator and reading take a lock. In a forked
//! child, that lock may be held by a thread that was not copied. So a child only tries to take it, and treats the data
//! as empty if that fails.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use crate::config::{RECENT_WORK, SLOWEST, WAIT_BOUNDS_US};
use crate::shm::arena::{Arena, Usage};
use crate::shm::layout::{COUNTS, MainPage, StatusPage, WorkerState};
use crate::sys;
use crate::wire::Timings;

/// The counters. Times are in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Epochs that have begun.
    Epochs,
    /// Delivered batches.
    Batches,
    /// Bytes of the delivered messages and leaves.
    Bytes,
    /// Leaves that workers copied into the arena.
    Copies,
    /// Bytes of these copies.
    CopiedBytes,
    /// Pickled batches.
    Pickled,
    /// Time in `next`.
    Next,
    /// Time for which `next` waited for batches other than an epoch's first.
    Waited,
    /// Time for which `next` waited for the first batches of epochs.
    First,
    /// Part of `Waited` during which later batches were ready.
    Blocked,
    /// Time in the sampler and in submissions. Measured only in a `next` that follows a long one
    /// ([`LONG_NEXT`](crate::config::LONG_NEXT)).
    Sampler,
    /// Time between two calls of `next` in one epoch.
    Step,
    /// Batches that the pin thread prepared.
    Pinned,
    /// Time that the pin thread spent on these batches.
    Pinning,
}

/// The unit of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Things, or bytes.
    Number,
    /// Nanoseconds.
    Time,
}

impl Count {
    /// Number of counters.
    pub const LEN: usize = COUNTS;

    /// All counters with their names and units, in the order of their numbers.
    pub const ALL: [(Self, &'static str, Unit); Self::LEN] = [
        (Self::Epochs, "epochs", Unit::Number),
        (Self::Batches, "batches", Unit::Number),
        (Self::Bytes, "bytes", Unit::Number),
        (Self::Copies, "copies", Unit::Number),
        (Self::CopiedBytes, "copied_bytes", Unit::Number),
        (Self::Pickled, "pickled", Unit::Number),
        (Self::Next, "next", Unit::Time),
        (Self::Waited, "waited", Unit::Time),
        (Self::First, "first", Unit::Time),
        (Self::Blocked, "blocked", Unit::Time),
        (Self::Sampler, "sampler", Unit::Time),
        (Self::Step, "step", Unit::Time),
        (Self::Pinned, "pinned", Unit::Number),
        (Self::Pinning, "pinning", Unit::Time),
    ];
}

/// Totals of one worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerTotals {
    /// The process ID; 0 before the start.
    pub pid: u32,
    /// True if the process is running.
    pub alive: bool,
    /// Number of batches and errors that the worker has sent.
    pub tasks: u64,
    /// Number of leaves that were sent without a copy, because they were in the arena already.
    pub adopted: u64,
    /// Bytes of these leaves.
    pub adopted_bytes: u64,
    /// Nanoseconds in each state, indexed by the state's number.
    pub spent_ns: [u64; WorkerState::COUNT],
    /// CPU time before the first task, in nanoseconds; 0 until that task.
    pub start_cpu_ns: u64,
    /// Time for which the process waited for a core before the first task, in nanoseconds.
    pub start_queued_ns: u64,
    /// CPU time of the measured fetches, in nanoseconds.
    pub fetch_cpu_ns: u64,
    /// Wall time of these fetches, in nanoseconds.
    pub fetch_measured_ns: u64,
}

impl WorkerTotals {
    /// Reads a status page at the monotonic time `now`, in nanoseconds. The caller passes the pid, because it knows the
    /// pid of a new process before the page shows it.
    pub fn of(page: &StatusPage, (pid, alive): (u32, bool), now: u64) -> Self {
        // Read the sums before `since_ns`: if the state changes between the two reads, an interval is omitted, but none
        // is counted twice.
        // SYNC: time-spent (pairs with the Release in `StatusPage::change`).
        let mut spent_ns = std::array::from_fn(|state| page.spent_ns[state].load(Ordering::Acquire));
        let state = WorkerState::from_u32(page.state.load(Ordering::Relaxed));
        let since = page.since_ns.load(Ordering::Relaxed);
        if alive && since != 0 {
            let sum: &mut u64 = &mut spent_ns[state as usize];
            *sum = sum.saturating_add(now.saturating_sub(since));
        }
        Self {
            pid,
            alive,
            tasks: page.sent.load(Ordering::Relaxed),
            adopted: page.adopted.load(Ordering::Relaxed),
            adopted_bytes: page.adopted_bytes.load(Ordering::Relaxed),
            spent_ns,
            // SYNC: start-time (pairs with the Release in `StatusPage::change`).
            start_cpu_ns: page.start_cpu_ns.load(Ordering::Acquire),
            start_queued_ns: page.start_queued_ns.load(Ordering::Relaxed),
            // SYNC: fetch-measured (pairs with the Release in `StatusPage::add_fetch`).
            fetch_cpu_ns: page.fetch_cpu_ns.load(Ordering::Acquire),
            fetch_measured_ns: page.fetch_measured_ns.load(Ordering::Relaxed),
        }
    }

    /// Combines each counter with that of `other`. The process and its start stay those of `self`.
    fn with(&self, other: &Self, op: fn(u64, u64) -> u64) -> Self {
        Self {
            tasks: op(self.tasks, other.tasks),
            adopted: op(self.adopted, other.adopted),
            adopted_bytes: op(self.adopted_bytes, other.adopted_bytes),
            spent_ns: std::array::from_fn(|state| op(self.spent_ns[state], other.spent_ns[state])),
            fetch_cpu_ns: op(self.fetch_cpu_ns, other.fetch_cpu_ns),
            fetch_measured_ns: op(self.fetch_measured_ns, other.fetch_measured_ns),
            ..*self
        }
    }

    /// Adds the totals of a later process in the same slot, or of a later iterator's worker with the same ID.
    fn add(&mut self, later: &Self) {
        *self = self.with(later, u64::wrapping_add);
        self.start_cpu_ns = self.start_cpu_ns.wrapping_add(later.start_cpu_ns);
        self.start_queued_ns = self.start_queued_ns.wrapping_add(later.start_queued_ns);
        if later.pid != 0 {
            (self.pid, self.alive) = (later.pid, later.alive);
        }
    }
}

/// One of the slowest tasks, or of those that blocked later ones for the longest time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlowTask {
    /// The worker.
    pub worker: u32,
    /// Durations of the task's parts.
    pub timings: Timings,
    /// Microseconds for which `next` waited for this task while later batches were ready.
    pub blocked_us: u64,
    /// The task's index batch as a string.
    pub index: String,
}

/// A histogram of waits. Each wait is counted in the bucket of the smallest of the [`WAIT_BOUNDS_US`] that it does not
/// exceed. The last bucket counts waits that are longer than all bounds.
pub type Waits = [u64; WAIT_BOUNDS_US.len() + 1];

/// A function that returns the value by which a list of tasks is sorted, in descending order.
type SortKey = fn(&SlowTask) -> u64;

const WORK: SortKey = |task| task.timings.total_us();
const BLOCKED: SortKey = |task| task.blocked_us;

/// Inserts a task into a sorted list, and drops the last task if the list is then too long. Returns the value that
/// another task must exceed to enter the list.
fn insert(list: &mut Vec<SlowTask>, task: SlowTask, key: SortKey) -> u64 {
    let place = list.partition_point(|other| key(other) >= key(&task));
    list.insert(place, task);
    list.truncate(SLOWEST);
    list.get(SLOWEST - 1).map_or(0, key)
}

/// Merges `more` into a sorted list, which stays sorted and bounded.
fn merge(list: &mut Vec<SlowTask>, more: &[SlowTask], key: SortKey) {
    list.extend_from_slice(more);
    list.sort_by_key(|task| std::cmp::Reverse(key(task)));
    list.truncate(SLOWEST);
}

/// The counters and the workers' totals.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// The counters, indexed by the number of the [`Count`].
    pub counts: [u64; Count::LEN],
    /// The workers' totals, indexed by worker ID.
    pub workers: Vec<WorkerTotals>,
}

impl Sums {
    /// Adds later sums.
    fn add(&mut self, later: &Self) {
        for (sum, more) in self.counts.iter_mut().zip(later.counts) {
            *sum = sum.wrapping_add(more);
        }
        if self.workers.len() < later.workers.len() {
            self.workers.resize(later.workers.len(), WorkerTotals::default());
        }
        for (sum, more) in self.workers.iter_mut().zip(&later.workers) {
            sum.add(more);
        }
    }

    /// Subtracts earlier sums, which may have fewer workers.
    fn since(&self, earlier: &Self) -> Self {
        let counts = std::array::from_fn(|count| self.counts[count].saturating_sub(earlier.counts[count]));
        let before = earlier.workers.iter().copied().chain(std::iter::repeat(WorkerTotals::default()));
        let workers = self.workers.iter().zip(before);
        Self { counts, workers: workers.map(|(now, before)| now.with(&before, u64::saturating_sub)).collect() }
    }

    fn batches(&self) -> u64 {
        self.counts[Count::Batches as usize]
    }
}

/// Returns the number of batches after which the sums are marked again, after a mark at `batches`.
fn next_mark(batches: u64) -> u64 {
    batches + batches / 4 + 1
}

/// A snapshot of all counters.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// The counters and the workers' totals.
    pub sums: Sums,
    /// The sums after earlier batches, in order. One of them is near the half of all batches.
    pub marks: Vec<Sums>,
    /// The waits of all calls of `next` except the first call of each epoch.
    pub waits: Waits,
    /// The slowest tasks, in descending order of their work.
    pub slowest: Vec<SlowTask>,
    /// The tasks that blocked later ones for the longest time, in descending order of that time.
    pub blocking: Vec<SlowTask>,
    /// Microseconds of work on each of the recent batches, the latest one last.
    pub recent_us: Vec<u32>,
    /// Memory of the arenas in use.
    pub usage: Usage,
    /// The largest number of bytes that an arena's pages have occupied.
    pub high_water: u64,
    /// Number of running pin threads.
    pub pin_threads: u32,
    /// Number of entries in the completion rings.
    pub ready: u64,
}

impl Totals {
    /// Adds the totals of a later iterator.
    pub fn add(&mut self, later: &Self) {
        let start = Sums::default();
        for later in [&start].into_iter().chain(&later.marks) {
            let mut mark = self.sums.clone();
            mark.add(later);
            self.marks.push(mark);
        }
        self.thin();
        self.sums.add(&later.sums);
        for (sum, more) in self.waits.iter_mut().zip(later.waits) {
            *sum = sum.wrapping_add(more);
        }
        merge(&mut self.slowest, &later.slowest, WORK);
        merge(&mut self.blocking, &later.blocking, BLOCKED);
        self.recent_us.extend_from_slice(&later.recent_us);
        self.recent_us.drain(..self.recent_us.len().saturating_sub(RECENT_WORK));
        self.usage = self.usage + later.usage;
        self.high_water = self.high_water.max(later.high_water);
        self.pin_threads += later.pin_threads;
        self.ready += later.ready;
    }

    /// Removes marks that cannot be needed: far before the half of the batches, or close to another one.
    fn thin(&mut self) {
        let batches = self.marks.last().map_or(0, Sums::batches);
        let past = self.marks.partition_point(|mark| mark.batches() * 2 <= batches);
        self.marks.drain(..past.saturating_sub(1));
        self.marks.dedup_by(|later, mark| later.batches() < next_mark(mark.batches()));
    }

    /// Returns the mark that is nearest to the half of all batches.
    fn half(&self) -> Option<&Sums> {
        self.marks.iter().min_by_key(|mark| self.sums.batches().abs_diff(2 * mark.batches()))
    }

    /// Returns the totals with the sums after about half of the batches.
    pub fn first_half(&self) -> Option<Self> {
        let mut sums = self.half()?.clone();
        // Without the workers that had not started.
        sums.workers.resize(self.sums.workers.len(), WorkerTotals::default());
        Some(Self { sums, ..self.clone() })
    }

    /// Returns the totals with the sums since those of `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        Self { sums: self.sums.since(&earlier.sums), ..self.clone() }
    }

    /// Adds the workers and the memory of an arena in use. `process` returns a worker's pid, and whether its process is
    /// running.
    pub fn add_arena(&mut self, arena: &Arena, process: impl Fn(u32) -> (u32, bool)) {
        let now = sys::clock::monotonic_ns();
        let totals = |worker| WorkerTotals::of(&arena.control(worker).status, process(worker), now);
        let workers = (0..arena.geometry().workers).map(totals).collect();
        self.sums.add(&Sums { workers, ..Sums::default() });
        let ready = |worker| u64::from(arena.control(worker).results.waiting());
        self.ready += (0..arena.geometry().workers).map(ready).sum::<u64>();
        let usage = arena.usage();
        self.high_water = self.high_water.max(usage.high_water);
        self.usage = self.usage + usage;
    }
}

/// The counters of one iterator, or of all iterators of a loader.
#[derive(Debug)]
pub struct Meter {
    /// The fork generation of the process that created this meter.
    generation: u64,
    counts: [AtomicU64; Count::LEN],
    waits: [AtomicU64; WAIT_BOUNDS_US.len() + 1],
    /// Microseconds of work above which a task enters the list of the slowest ones.
    slow_from: AtomicU64,
    /// Microseconds above which a task enters the list of those that blocked later ones for the longest time.
    blocking_from: AtomicU64,
    /// Microseconds of work on recent batches. Batch `n` is at `n % RECENT_WORK`.
    recent_us: [AtomicU32; RECENT_WORK],
    /// Number of batches recorded in `recent_us` so far.
    noted: AtomicU64,
    /// Number of batches after which the sums are marked next.
    next_mark: AtomicU64,
    /// Totals of ended workers and iterators, the lists of tasks, and the marks. For its counters and waits, `counts` and
    /// `waits` are used instead.
    kept: Mutex<Totals>,
}

impl Default for Meter {
    fn default() -> Self {
        Self {
            generation: sys::fork::generation(),
            counts: Default::default(),
            waits: Default::default(),
            slow_from: AtomicU64::default(),
            blocking_from: AtomicU64::default(),
            recent_us: [const { AtomicU32::new(0) }; RECENT_WORK],
            noted: AtomicU64::default(),
            next_mark: AtomicU64::default(),
            kept: Mutex::default(),
        }
    }
}

impl Meter {
    /// Adds to a counter. Only the counter's writer may call this.
    #[inline]
    pub fn add(&self, count: Count, more: u64) {
        let word = &self.counts[count as usize];
        word.store(word.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
    }

    /// Adds a time to a counter. Only the counter's writer may call this.
    #[inline]
    pub fn add_time(&self, count: Count, time: Duration) {
        self.add(count, time.as_nanos() as u64);
    }

    /// Adds the wait of one `next` to the histogram. Only the counters' writer may call this.
    #[inline]
    pub fn note_wait(&self, time: Duration) {
        let us = time.as_micros() as u64;
        // Most calls do not wait.
        let bucket = if us <= WAIT_BOUNDS_US[0] { 0 } else { WAIT_BOUNDS_US.partition_point(|&bound| bound < us) };
        let word = &self.waits[bucket];
        word.store(word.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Counts a fetch of an iterator without workers, for which the loop waits. `step` is the time since the epoch's
    /// last fetch, or `None` for its first. Only the counters' writer may call this.
    pub fn note_fetch(&self, step: Option<Duration>, fetch: Duration, has_batch: bool) {
        if let Some(step) = step {
            self.add_time(Count::Step, step);
            self.add_time(Count::Waited, fetch);
            self.note_wait(fetch);
        } else {
            self.add(Count::Epochs, 1);
            self.add_time(Count::First, fetch);
        }
        self.add_time(Count::Next, fetch);
        self.add(Count::Batches, u64::from(has_batch));
    }

    /// Returns the value of a counter.
    #[inline]
    pub fn get(&self, count: Count) -> u64 {
        self.counts[count as usize].load(Ordering::Relaxed)
    }

    /// Copies the counters to a page that other processes read.
    #[inline]
    pub fn show(&self, page: &MainPage) {
        for (shown, count) in page.counts.iter().zip(&self.counts) {
            shown.store(count.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Marks the sums, if a mark is due. Call it when no time of a delivered batch is missing.
    #[inline]
    pub fn mark_if_due(&self, arena: &Arena) {
        if self.get(Count::Batches) >= self.next_mark.load(Ordering::Relaxed) {
            let now = sys::clock::monotonic_ns();
            let totals = |worker| WorkerTotals::of(&arena.control(worker).status, (0, true), now);
            self.mark((0..arena.geometry().workers).map(totals).collect());
        }
    }

    #[cold]
    fn mark(&self, workers: Vec<WorkerTotals>) {
        self.next_mark.store(next_mark(self.get(Count::Batches)), Ordering::Relaxed);
        let Some(mut kept) = self.kept() else { return };
        let mut mark = kept.sums.clone();
        mark.add(&Sums { counts: self.counts(), workers });
        kept.marks.push(mark);
        kept.thin();
    }

    fn counts(&self) -> [u64; Count::LEN] {
        std::array::from_fn(|n| self.counts[n].load(Ordering::Relaxed))
    }

    /// Locks the totals. Returns `None` in a child that was forked while a thread held the lock.
    fn kept(&self) -> Option<MutexGuard<'_, Totals>> {
        if self.generation == sys::fork::generation() {
            return Some(self.kept.lock().unwrap_or_else(PoisonError::into_inner));
        }
        match self.kept.try_lock() {
            Ok(kept) => Some(kept),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Records the work on a batch, for which `next` waited `blocked_us` microseconds while later batches were ready.
    /// Returns true if the batch belongs in a list; the caller then calls [`Meter::note_slow`]. Only the counters'
    /// writer may call this.
    #[inline]
    pub fn note_work(&self, timings: &Timings, blocked_us: u64) -> bool {
        let (noted, work) = (self.noted.load(Ordering::Relaxed), timings.total_us());
        let word = &self.recent_us[noted as usize % RECENT_WORK];
        word.store(u32::try_from(work).unwrap_or(u32::MAX), Ordering::Relaxed);
        self.noted.store(noted + 1, Ordering::Relaxed);
        self.is_slow(work) || self.is_blocking(blocked_us)
    }

    fn is_slow(&self, work_us: u64) -> bool {
        work_us > self.slow_from.load(Ordering::Relaxed)
    }

    fn is_blocking(&self, blocked_us: u64) -> bool {
        blocked_us > self.blocking_from.load(Ordering::Relaxed)
    }

    /// Adds a task to the list of the slowest ones, to the list of those that blocked later ones for the longest time,
    /// or to both, if it belongs there.
    pub fn note_slow(&self, task: SlowTask) {
        let Some(mut kept) = self.kept() else { return };
        if self.is_blocking(BLOCKED(&task)) {
            let from = insert(&mut kept.blocking, task.clone(), BLOCKED);
            self.blocking_from.store(from, Ordering::Relaxed);
        }
        if self.is_slow(WORK(&task)) {
            self.slow_from.store(insert(&mut kept.slowest, task, WORK), Ordering::Relaxed);
        }
    }

    /// Returns the work on recent batches, the latest one last. A batch that is recorded during the call may replace
    /// the oldest one.
    fn recent_us(&self) -> Vec<u32> {
        let noted = self.noted.load(Ordering::Relaxed);
        let first = noted.saturating_sub(RECENT_WORK as u64);
        (first..noted).map(|n| self.recent_us[n as usize % RECENT_WORK].load(Ordering::Relaxed)).collect()
    }

    /// Keeps the totals of an arena's workers. Call it after the workers have ended, and before another iterator uses
    /// the arena.
    pub fn keep(&self, arena: &Arena, pid: impl Fn(u32) -> u32) {
        let Some(mut kept) = self.kept() else { return };
        kept.add_arena(arena, |worker| (pid(worker), false));
        (kept.usage, kept.ready) = (Usage::default(), 0);
    }

    /// Keeps the totals of a worker process that died. Call it before the next process uses the status page.
    pub fn keep_worker(&self, arena: &Arena, worker: u32, pid: u32) {
        let Some(mut kept) = self.kept() else { return };
        let mut workers = vec![WorkerTotals::default(); worker as usize];
        workers.push(WorkerTotals::of(&arena.control(worker).status, (pid, false), 0));
        kept.sums.add(&Sums { workers, ..Sums::default() });
    }

    /// Adds the totals of an ended iterator. A forked child that cannot take the lock adds only the counters and waits.
    pub fn absorb(&self, ended: &Totals) {
        let counts = self.counts.iter().zip(ended.sums.counts);
        for (word, more) in counts.chain(self.waits.iter().zip(ended.waits)) {
            word.store(word.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
        }
        let Some(mut kept) = self.kept() else { return };
        kept.add(&Totals { usage: Usage::default(), pin_threads: 0, ready: 0, ..ended.clone() });
        kept.sums.workers.iter_mut().for_each(|worker| worker.alive = false);
    }

    /// Returns the totals, without those of the workers and the memory of the current arena. A forked child that cannot
    /// take the lock gets only the counters, the waits and the recent work.
    pub fn totals(&self) -> Totals {
        let mut totals = self.kept().map(|kept| kept.clone()).unwrap_or_default();
        totals.sums.counts = self.counts();
        totals.waits = std::array::from_fn(|n| self.waits[n].load(Ordering::Relaxed));
        totals.recent_us.extend(self.recent_us());
        totals
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::children::Child;

    fn task(us: u32) -> SlowTask {
        SlowTask {
            worker: 0,
            timings: Timings { fetch_us: us, collate_us: 1, pack_us: 1 },
            blocked_us: 0,
            index: us.to_string(),
        }
    }

    /// Records a task as a delivery does.
    fn deliver(meter: &Meter, task: SlowTask) {
        if meter.note_work(&task.timings, task.blocked_us) {
            meter.note_slow(task);
        }
    }

    fn indices(totals: &Totals) -> Vec<&str> {
        totals.slowest.iter().map(|task| task.index.as_str()).collect()
    }

    #[test]
    fn each_counter_is_listed_at_its_number() {
        for (number, (count, ..)) in Count::ALL.iter().enumerate() {
            assert_eq!(*count as usize, number);
        }
    }

    #[test]
    fn the_slowest_tasks_are_kept() {
        let meter = Meter::default();
        for us in [5, 90, 10, 70, 20, 60, 30, 50, 40, 80, 15] {
            deliver(&meter, task(us));
        }
        let totals = meter.totals();
        assert_eq!(indices(&totals), ["90", "80", "70", "60", "50", "40", "30", "20"]);
        assert!(totals.blocking.is_empty(), "none of them blocked others");
        assert!(!meter.note_work(&task(20).timings, 0) && meter.note_work(&task(21).timings, 0));
        assert_eq!(
            totals.recent_us,
            [5, 90, 10, 70, 20, 60, 30, 50, 40, 80, 15].map(|us| us + 2),
            "fetch, collate and pack"
        );
    }

    #[test]
    fn the_tasks_that_blocked_others_the_longest_are_kept() {
        let meter = Meter::default();
        (0..8).for_each(|_| deliver(&meter, task(1000)));
        for blocked_us in [5, 90, 10, 70, 20, 60, 30, 50, 40, 80, 15] {
            deliver(&meter, SlowTask { blocked_us, ..task(blocked_us as u32) });
        }
        let totals = meter.totals();
        let waits: Vec<u64> = totals.blocking.iter().map(|task| task.blocked_us).collect();
        assert_eq!(waits, [90, 80, 70, 60, 50, 40, 30, 20]);
        assert_eq!(totals.blocking[0].index, "90");
        assert_eq!(indices(&totals), ["1000"; 8], "they are not among the slowest");
        assert!(!meter.note_work(&task(1).timings, 20) && meter.note_work(&task(1).timings, 21));
    }

    #[test]
    fn the_work_on_the_last_batches_is_kept() {
        let (first, second, all) = (Meter::default(), Meter::default(), Meter::default());
        let note = |meter: &Meter, works: std::ops::Range<u32>| {
            for fetch_us in works {
                meter.note_work(&Timings { fetch_us, ..Timings::default() }, 0);
            }
        };
        note(&first, 0..300);
        assert_eq!(first.totals().recent_us, Vec::from_iter(44..300));
        note(&second, 300..400);
        assert_eq!(second.totals().recent_us, Vec::from_iter(300..400));
        // The batches of a later iterator come last.
        all.absorb(&first.totals());
        all.absorb(&second.totals());
        assert_eq!(all.totals().recent_us, Vec::from_iter(144..400));
        let mut together = first.totals();
        together.add(&second.totals());
        assert_eq!(together.recent_us, Vec::from_iter(144..400));
        let long = Timings { fetch_us: u32::MAX, collate_us: 1, pack_us: 0 };
        second.note_work(&long, 0);
        assert_eq!(second.totals().recent_us.last(), Some(&u32::MAX));
    }

    #[test]
    fn a_mark_is_near_the_half_of_the_batches() {
        let run = |meter: &Meter, batches: u64| {
            for _ in 0..batches {
                meter.add(Count::Batches, 1);
                if meter.get(Count::Batches) >= meter.next_mark.load(Ordering::Relaxed) {
                    meter.mark(vec![WorkerTotals { tasks: meter.get(Count::Batches), ..WorkerTotals::default() }]);
                }
            }
        };
        let check = |totals: &Totals| {
            let (batches, half) = (totals.sums.batches(), totals.half().unwrap());
            assert!(half.batches().abs_diff(batches / 2) <= batches / 8, "{} of {batches}", half.batches());
            assert!(totals.marks.len() <= 8, "{} marks", totals.marks.len());
            // Each worker has finished as many tasks as there were batches.
            assert_eq!(half.workers[0].tasks, half.batches());
        };
        let ended = |meter: &Meter| {
            let mut totals = meter.totals();
            let workers = vec![WorkerTotals { tasks: totals.sums.batches(), ..WorkerTotals::default() }];
            totals.sums.workers = workers;
            totals
        };
        let meter = Meter::default();
        assert!(meter.totals().half().is_none());
        run(&meter, 19);
        for _ in 0..2000 {
            run(&meter, 1);
            check(&meter.totals());
        }
        // Epochs of any length, each with its own iterator.
        for length in [1, 3, 10, 100] {
            let all = Meter::default();
            for epoch in 1..400 {
                let meter = Meter::default();
                run(&meter, length);
                all.absorb(&ended(&meter));
                if epoch * length > 20 && epoch > 7 {
                    check(&all.totals());
                    let mut together = all.totals();
                    together.add(&ended(&meter));
                    check(&together);
                }
            }
        }
    }

    #[test]
    fn waits_are_counted_by_their_length() {
        let (one, all) = (Meter::default(), Meter::default());
        for us in [0, 100, 101, 250, 60_000_000, 60_000_001, u64::MAX / 2] {
            one.note_wait(Duration::from_micros(us));
        }
        all.absorb(&one.totals());
        all.note_wait(Duration::ZERO);
        let mut together = one.totals();
        together.add(&all.totals());
        let expected = |first, last| {
            let mut waits = [0; 19];
            (waits[0], waits[1], waits[17], waits[18]) = (first, last, last / 2, last);
            waits
        };
        assert_eq!(all.totals().waits, expected(3, 2));
        assert_eq!(together.waits, expected(5, 4));
    }

    #[test]
    fn a_child_does_not_wait_for_a_lock_that_a_thread_of_its_parent_holds() {
        let (meter, ended) = (Meter::default(), Meter::default());
        ended.add(Count::Batches, 3);
        ended.note_slow(task(5));
        let totals = ended.totals();
        let held = meter.kept();
        let child = Child::fork(|| {
            meter.absorb(&totals);
            meter.note_slow(task(7));
            let now = meter.totals();
            ended.absorb(&totals);
            let free = ended.totals();
            now.sums.batches() == 3 && now.slowest.is_empty() && indices(&free) == ["5", "5"]
        });
        assert_eq!(child.wait(), 0);
        drop(held);
        assert!(meter.totals().slowest.is_empty());
    }

    #[test]
    fn all_totals_of_an_ended_iterator_are_absorbed() {
        let (first, second, all) = (Meter::default(), Meter::default(), Meter::default());
        for (meter, batches, us) in [(&first, 3, 10), (&second, 4, 20)] {
            meter.add(Count::Batches, batches);
            meter.add_time(Count::Waited, Duration::from_micros(u64::from(us)));
            meter.note_slow(SlowTask { blocked_us: u64::from(us), ..task(us) });
        }
        let worker = WorkerTotals {
            pid: 7,
            alive: true,
            tasks: 2,
            adopted: 7,
            adopted_bytes: 8,
            spent_ns: [1; WorkerState::COUNT],
            start_cpu_ns: 3,
            start_queued_ns: 4,
            fetch_cpu_ns: 5,
            fetch_measured_ns: 6,
        };
        let mut ended = first.totals();
        (ended.sums.workers, ended.high_water, ended.ready) = (vec![worker], 9, 3);
        all.absorb(&ended);
        let mut ended = second.totals();
        (ended.sums.workers, ended.high_water) = (vec![WorkerTotals { pid: 8, ..worker }, worker], 5);
        all.absorb(&ended);
        let totals = all.totals();
        assert_eq!(totals.sums.batches(), 7);
        assert_eq!(totals.sums.counts[Count::Waited as usize], 30_000);
        assert_eq!((totals.high_water, totals.ready), (9, 0), "an ended iterator has no results");
        assert_eq!(indices(&totals), ["20", "10"]);
        assert_eq!(totals.blocking, totals.slowest);
        let both = WorkerTotals {
            pid: 8,
            alive: false,
            tasks: 4,
            adopted: 14,
            adopted_bytes: 16,
            spent_ns: [2; WorkerState::COUNT],
            start_cpu_ns: 6,
            start_queued_ns: 8,
            fetch_cpu_ns: 10,
            fetch_measured_ns: 12,
        };
        assert_eq!(totals.sums.workers, [both, WorkerTotals { alive: false, ..worker }]);
    }
}
