//! A background thread for work that falls due between the program's calls into the library. The thread exists only
//! while there is such work. There is at most one function for each [`Duty`].
//!
//! [`pause`] joins the thread before each fork, so that a child inherits none of the thread's locks, and so that Python
//! 3.12 and later do not warn about a fork in a multi-threaded process. The thread calls no Python code.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::config::CARETAKER_STACK;
use crate::sync::{Ordering, lock};
use crate::sys;

/// A function that does the work that is due. It returns the time after which it must be called again, or `None` if
/// there is no more work. It may also be called earlier.
pub type Work = Arc<dyn Fn() -> Option<Duration> + Send + Sync>;

/// The purpose of a [`Work`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duty {
    /// To retire the pooled arenas that nobody has used for some time.
    Pages,
    /// To write the events of a trace.
    Trace,
}

#[derive(Default)]
struct State {
    /// The work of each duty; `None` if there is none.
    works: [Option<Work>; 2],
    /// True if there may be new work since the last calls of `works`.
    work_changed: bool,
    thread: Option<JoinHandle<()>>,
    /// A thread that has finished but is not joined yet.
    ended: Option<JoinHandle<()>>,
    /// Number of forks in progress: calls of [`pause`] that have not been undone.
    forks: u32,
}

static STATE: Mutex<State> =
    Mutex::new(State { works: [None, None], work_changed: false, thread: None, ended: None, forks: 0 });
static WAKE: Condvar = Condvar::new();
/// True after the first [`start`]. Until then [`restart`] does nothing, so that a fork costs nothing in a program that
/// only imports the library.
static USED: AtomicBool = AtomicBool::new(false);
/// The fork generation of the process to which the state belongs.
static GENERATION: AtomicU64 = AtomicU64::new(0);

/// Locks the state. Returns `None` in a child that was forked while another thread held the lock.
fn state() -> Option<MutexGuard<'static, State>> {
    let current = sys::fork::generation();
    // SYNC: caretaker-left (pairs with the Release below).
    if GENERATION.load(Ordering::Acquire) != current {
        let mut inherited = STATE.try_lock().ok()?;
        // The thread handles belong to the parent: a child must neither join nor drop them.
        std::mem::forget(std::mem::take(&mut *inherited));
        // SYNC: caretaker-left (pairs with the Acquire above): a thread that sees the new generation sees the new
        // state.
        GENERATION.store(current, Ordering::Release);
        return Some(inherited);
    }
    Some(lock(&STATE))
}

/// Makes the thread call `work` now, and again whenever the duration that `work` returned has passed. Replaces the
/// earlier work of this duty. If the thread cannot be started, the next call of `start` or [`restart`] tries again.
pub fn start(duty: Duty, work: Work) {
    USED.store(true, Ordering::Relaxed);
    let Some(mut state) = state() else { return };
    state.works[duty as usize] = Some(work);
    state.work_changed = true;
    state.spawn();
    WAKE.notify_all();
}

/// Makes the thread call all work functions at once, because there may be new work.
pub fn wake() {
    let Some(mut state) = state() else { return };
    state.work_changed = true;
    WAKE.notify_all();
}

/// Drops the work of a duty. When this function returns, the work is not in progress.
pub fn stop(duty: Duty) {
    pause();
    if let Some(mut state) = state() {
        state.works[duty as usize] = None;
        state.forks = state.forks.saturating_sub(1);
        state.spawn();
    }
}

/// Stops and joins the thread before a fork. Each call must be followed by a [`resume`].
pub fn pause() {
    let Some(mut state) = state() else { return };
    state.forks += 1;
    let threads = [state.thread.take(), state.ended.take()];
    drop(state);
    WAKE.notify_all();
    for thread in threads.into_iter().flatten() {
        // An error means that the thread has panicked; idle pages then stay until a later call releases them.
        let _ = thread.join();
    }
}

/// Undoes a [`pause`] after the fork. Does not start the thread: call [`restart`] afterwards.
pub fn resume() {
    if let Some(mut state) = state() {
        state.forks = state.forks.saturating_sub(1);
    }
}

/// Starts the thread if there is work but no thread, as is the case after a fork.
pub fn restart() {
    if !USED.load(Ordering::Relaxed) {
        return;
    }
    if let Some(mut state) = state() {
        state.spawn();
    }
}

impl State {
    fn spawn(&mut self) {
        if self.forks > 0 || self.thread.is_some() || self.works.iter().all(Option::is_none) {
            return;
        }
        if let Some(ended) = self.ended.take() {
            let _ = ended.join();
        }
        let body = move || {
            sys::signal::block_all_in_this_thread();
            sys::thread::set_name("rl_caretaker");
            run();
        };
        self.thread = sys::thread::spawn_joinable("rl_caretaker", CARETAKER_STACK, body).ok();
    }
}

/// The body of the thread: calls each work when it is due, until there is no more work or a fork is about to happen.
fn run() {
    let mut state = lock(&STATE);
    loop {
        if state.forks > 0 {
            return;
        }
        state.work_changed = false;
        let works = state.works.clone();
        drop(state);
        let waits = works.map(|work| work.and_then(|work| work()));
        state = lock(&STATE);
        if state.work_changed || state.forks > 0 {
            continue;
        }
        for (work, wait) in state.works.iter_mut().zip(waits) {
            work.take_if(|_| wait.is_none());
        }
        let Some(wait) = waits.into_iter().flatten().min() else {
            state.ended = state.thread.take();
            return;
        };
        state = WAKE.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;
    use std::time::Instant;

    use super::*;

    static LEFT: AtomicU32 = AtomicU32::new(0);
    static CALLS: AtomicU32 = AtomicU32::new(0);
    static IS_BUSY: AtomicBool = AtomicBool::new(false);

    fn count_down() -> Option<Duration> {
        CALLS.fetch_add(1, Ordering::Relaxed);
        let left = LEFT.load(Ordering::Relaxed);
        if left == 0 {
            return None;
        }
        LEFT.store(left - 1, Ordering::Relaxed);
        Some(Duration::from_millis(1))
    }

    fn slow() -> Option<Duration> {
        IS_BUSY.store(true, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(200));
        IS_BUSY.store(false, Ordering::Relaxed);
        Some(Duration::from_secs(1000))
    }

    fn wait_until(condition: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(60);
        while !condition() {
            assert!(Instant::now() < end);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn threads() -> usize {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm"));
        tasks
            .filter(|task| task.path().exists())
            .filter_map(|it| name(it).ok())
            .filter(|it| it.trim() == "rl_caretaker")
            .count()
    }

    /// Runs the next test in another process, because the forks of other tests would pause the caretaker.
    #[test]
    fn the_thread_is_tested_in_another_process() {
        let name = "shm::caretaker::tests::the_thread_lives_while_there_is_work_and_no_fork";
        let mut test = std::process::Command::new(std::env::current_exe().unwrap());
        let output = test.args(["--exact", name, "--ignored"]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
    }

    #[test]
    #[ignore = "run by the_thread_is_tested_in_another_process"]
    fn the_thread_lives_while_there_is_work_and_no_fork() {
        // This is a single test because the state is global to the process.
        LEFT.store(5, Ordering::Relaxed);
        start(Duty::Pages, Arc::new(count_down));
        wait_until(|| LEFT.load(Ordering::Relaxed) == 0 && threads() == 0);
        let calls = CALLS.load(Ordering::Relaxed);
        // A new thread starts after one has ended.
        LEFT.store(u32::MAX, Ordering::Relaxed);
        start(Duty::Pages, Arc::new(count_down));
        start(Duty::Pages, Arc::new(count_down));
        wait_until(|| CALLS.load(Ordering::Relaxed) > calls + 3);
        assert_eq!(threads(), 1);
        pause();
        // The kernel may list a joined thread for another moment.
        wait_until(|| threads() == 0);
        start(Duty::Pages, Arc::new(count_down));
        restart();
        assert_eq!(threads(), 0, "it does not start during a fork");
        pause();
        resume();
        restart();
        assert_eq!(threads(), 0, "another fork is in progress");
        resume();
        assert_eq!(threads(), 0);
        let calls = CALLS.load(Ordering::Relaxed);
        restart();
        wait_until(|| CALLS.load(Ordering::Relaxed) > calls + 3);
        // The works of two duties end independently.
        static WRITES: AtomicU32 = AtomicU32::new(0);
        let write = || {
            WRITES.fetch_add(1, Ordering::Relaxed);
            Some(Duration::from_millis(1))
        };
        start(Duty::Trace, Arc::new(write));
        stop(Duty::Pages);
        let (calls, writes) = (CALLS.load(Ordering::Relaxed), WRITES.load(Ordering::Relaxed));
        wait_until(|| WRITES.load(Ordering::Relaxed) > writes + 3);
        assert_eq!(CALLS.load(Ordering::Relaxed), calls);
        stop(Duty::Trace);
        wait_until(|| threads() == 0);
        restart();
        assert_eq!(threads(), 0, "there is no more work");
        // `pause` waits for a call that is in progress.
        start(Duty::Pages, Arc::new(slow));
        wait_until(|| IS_BUSY.load(Ordering::Relaxed));
        pause();
        assert!(!IS_BUSY.load(Ordering::Relaxed), "it is joined before a fork");
        resume();
        stop(Duty::Pages);
        wait_until(|| threads() == 0);
        // A call of `wake` ends a long wait.
        start(Duty::Pages, Arc::new(|| (LEFT.load(Ordering::Relaxed) != 7).then_some(Duration::from_secs(1000))));
        wait_until(|| threads() == 1);
        LEFT.store(7, Ordering::Relaxed);
        wake();
        wait_until(|| threads() == 0);
    }
}
