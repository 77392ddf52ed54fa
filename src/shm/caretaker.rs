//! A thread that does work which comes due without a call of the library. It lives only while there is such work.
//!
//! No fork finds it: [`pause`] joins it before, so that a child inherits none of its locks, and Python (from 3.12) does
//! not warn of a fork with threads. It calls no Python code.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::config::CARETAKER_STACK;
use crate::sync::{Ordering, lock};
use crate::sys;

/// Does the work that is due. Returns the time until the next call, or `None` if nothing is left to do.
pub type Work = fn() -> Option<Duration>;

#[derive(Default)]
struct State {
    /// The work, while there is some.
    work: Option<Work>,
    /// There may be other work than at the last call.
    asked: bool,
    thread: Option<JoinHandle<()>>,
    /// A thread that has nothing more to do, not joined yet.
    ended: Option<JoinHandle<()>>,
    /// Forks in progress.
    forks: u32,
}

static STATE: Mutex<State> = Mutex::new(State { work: None, asked: false, thread: None, ended: None, forks: 0 });
static WAKE: Condvar = Condvar::new();
/// True once there was any work. A program that only imports the library forks without a hook of it.
static USED: AtomicBool = AtomicBool::new(false);
/// The fork generation that the state belongs to.
static GENERATION: AtomicU64 = AtomicU64::new(0);

/// Locks the state; `None` in a child that was forked while another thread held the lock.
fn state() -> Option<MutexGuard<'static, State>> {
    let current = sys::fork::generation();
    // SYNC: caretaker-left (pairs with the Release below).
    if GENERATION.load(Ordering::Acquire) != current {
        let mut inherited = STATE.try_lock().ok()?;
        // The threads are the parent's: nothing of them may be touched.
        std::mem::forget(std::mem::take(&mut *inherited));
        // SYNC: caretaker-left (pairs with the Acquire above): a thread that sees it finds a new state.
        GENERATION.store(current, Ordering::Release);
        return Some(inherited);
    }
    Some(lock(&STATE))
}

/// Calls `work` on the thread, now and as often as it asks. Without a thread the work is left to later calls.
pub fn start(work: Work) {
    USED.store(true, Ordering::Relaxed);
    let Some(mut state) = state() else { return };
    state.work = Some(work);
    state.asked = true;
    state.spawn();
    WAKE.notify_all();
}

/// Lets the thread see that its work has changed.
pub fn wake() {
    let Some(mut state) = state() else { return };
    state.asked = true;
    WAKE.notify_all();
}

/// Ends the thread and forgets its work.
pub fn stop() {
    pause();
    if let Some(mut state) = state() {
        state.work = None;
        state.forks = state.forks.saturating_sub(1);
    }
}

/// Ends the thread before a fork. Each call needs a [`resume`].
pub fn pause() {
    let Some(mut state) = state() else { return };
    state.forks += 1;
    let threads = [state.thread.take(), state.ended.take()];
    drop(state);
    WAKE.notify_all();
    for thread in threads.into_iter().flatten() {
        // It has panicked: the pages stay until a later call.
        let _ = thread.join();
    }
}

/// Undoes [`pause`] after the fork. The thread starts with [`tend`].
pub fn resume() {
    if let Some(mut state) = state() {
        state.forks = state.forks.saturating_sub(1);
    }
}

/// Starts the thread again if a fork has ended it with work left.
pub fn tend() {
    if !USED.load(Ordering::Relaxed) {
        return;
    }
    if let Some(mut state) = state() {
        state.spawn();
    }
}

impl State {
    fn spawn(&mut self) {
        let Some(work) = self.work else { return };
        if self.forks > 0 || self.thread.is_some() {
            return;
        }
        if let Some(ended) = self.ended.take() {
            let _ = ended.join();
        }
        let body = move || {
            sys::signal::block_all_in_this_thread();
            sys::thread::set_name("rl_caretaker");
            run(work);
        };
        self.thread = sys::thread::spawn_joinable("rl_caretaker", CARETAKER_STACK, body).ok();
    }
}

/// Runs the thread: works until nothing is left, or until a fork.
fn run(work: Work) {
    let mut state = lock(&STATE);
    loop {
        if state.forks > 0 {
            return;
        }
        state.asked = false;
        drop(state);
        let wait = work();
        state = lock(&STATE);
        if state.asked || state.forks > 0 {
            continue;
        }
        let Some(wait) = wait else {
            state.work = None;
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

    fn count_down() -> Option<Duration> {
        CALLS.fetch_add(1, Ordering::Relaxed);
        let left = LEFT.load(Ordering::Relaxed);
        if left == 0 {
            return None;
        }
        LEFT.store(left - 1, Ordering::Relaxed);
        Some(Duration::from_millis(1))
    }

    fn wait_until(what: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(60);
        while !what() {
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

    /// Other tests fork, which pauses the caretaker of their process.
    #[test]
    fn the_thread_has_a_life_of_its_own() {
        let name = "shm::caretaker::tests::the_thread_lives_while_there_is_work_and_no_fork";
        let mut test = std::process::Command::new(std::env::current_exe().unwrap());
        let output = test.args(["--exact", name, "--ignored"]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
    }

    #[test]
    #[ignore = "run by the_thread_has_a_life_of_its_own, in another process"]
    fn the_thread_lives_while_there_is_work_and_no_fork() {
        // One test: the state is the process's.
        LEFT.store(5, Ordering::Relaxed);
        start(count_down);
        wait_until(|| LEFT.load(Ordering::Relaxed) == 0 && threads() == 0);
        let calls = CALLS.load(Ordering::Relaxed);
        // An ended thread is followed by another one.
        LEFT.store(u32::MAX, Ordering::Relaxed);
        start(count_down);
        start(count_down);
        wait_until(|| CALLS.load(Ordering::Relaxed) > calls + 3);
        assert_eq!(threads(), 1);
        pause();
        assert_eq!(threads(), 0, "before a fork it is joined");
        start(count_down);
        tend();
        assert_eq!(threads(), 0, "and does not start within one");
        pause();
        resume();
        tend();
        assert_eq!(threads(), 0, "another fork is in progress");
        resume();
        assert_eq!(threads(), 0);
        let calls = CALLS.load(Ordering::Relaxed);
        tend();
        wait_until(|| CALLS.load(Ordering::Relaxed) > calls + 3);
        stop();
        tend();
        assert_eq!(threads(), 0, "nothing is left to do");
        // A change ends a long wait.
        start(|| (LEFT.load(Ordering::Relaxed) != 7).then_some(Duration::from_secs(1000)));
        wait_until(|| threads() == 1);
        LEFT.store(7, Ordering::Relaxed);
        wake();
        wait_until(|| threads() == 0);
    }
}
