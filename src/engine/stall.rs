//! Detection of workers that are stuck in their start or at one batch, and their stack dumps. `overdue` kills some of them.
//!
//! While the main process waits for results it checks the status pages a few times per second, without a thread or any cost
//! per batch. Python's faulthandler dumps the stack: it runs in a signal handler without the GIL, and writes to a memfd that
//! the main process reads through /proc.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use super::Engine;
use super::handle::Handle;
use super::overdue::Overdue;
use super::process::Process;
use crate::config::{STACK_CHECK, STACK_SETTLED, STACK_SHOWN, STACK_SIGNAL, STALL_CHECK};
use crate::id::{TaskId, WorkerId};
use crate::shm::layout::{StackFile, WorkerState};
use crate::sync::{AtomicU64, Ordering};
use crate::sys;

/// Where a worker is stuck.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Before its first batch of an epoch.
    Start,
    /// At a batch.
    Item,
}

/// A stuck worker.
#[derive(Clone, Copy, Debug)]
pub struct Stall {
    /// The worker.
    pub worker: u32,
    /// Its process id.
    pub pid: i32,
    /// Where it is stuck.
    pub phase: Phase,
    /// The state that it reports.
    pub state: WorkerState,
    /// Its current task, or the next one.
    pub task: Option<TaskId>,
    /// How long it has been stuck.
    pub time: Duration,
    /// Limit of the wait for its stack; `None` for no stack dump.
    pub patience: Option<Duration>,
    /// The limit of [`Engine::kill_stalls`], if the worker has exceeded it: [`Engine::kill`] it.
    pub exceeds: Option<Duration>,
}

/// What a worker that is waited for shows of itself.
pub(super) struct Shown {
    pub(super) process: Arc<Process>,
    /// Its first unanswered task.
    pub(super) oldest: Option<TaskId>,
    pub(super) state: WorkerState,
    /// Its current task, or its last one.
    pub(super) task: TaskId,
    /// Tasks that it has answered.
    pub(super) answers: u64,
    /// Time at which its state began.
    pub(super) since: Duration,
    /// Time at which it took its task; in a replay, at which it began the present batch.
    pub(super) task_since: Duration,
}

impl Shown {
    /// Whether the first unanswered task, or the message that begins an epoch, waits for the worker to take it.
    pub(super) fn is_waited_for(&self) -> bool {
        match self.state {
            WorkerState::Idle => true,
            // It has published the previous batch, and not taken the next one.
            WorkerState::Publish => self.oldest.is_some_and(|oldest| self.task < oldest),
            _ => false,
        }
    }

    /// Whether the pin thread holds the worker's answer.
    pub(super) fn is_answered(&self) -> bool {
        self.state == WorkerState::Idle
            && self.answers > 0
            && self.oldest.is_some_and(|oldest| self.task >= oldest)
    }
}

/// One worker's state at the last check.
#[derive(Clone, Copy, Debug, Default)]
struct WatchedWorker {
    /// The oldest task.
    task: Option<TaskId>,
    /// Time of the first check with that task.
    seen: Duration,
    /// The last report: phase, task, and whether the task still waited for the worker.
    reported: Option<(Phase, Option<TaskId>, bool)>,
}

#[derive(Debug)]
pub(super) struct Stalls {
    /// Time in a phase after which a worker is stuck; `None` for never.
    limits: [Option<Duration>; 2],
    /// See [`Stall::patience`].
    pub(super) patience: Option<Duration>,
    /// Time of the last check.
    looked: Duration,
    watched: Box<[WatchedWorker]>,
    /// The workers that are to be killed.
    pub(super) overdue: Overdue,
}

impl Stalls {
    pub(super) fn new(workers: u32) -> Self {
        let watched = vec![WatchedWorker::default(); workers as usize].into();
        let overdue = Overdue::new(workers);
        Self { limits: [None; 2], patience: None, looked: Duration::ZERO, watched, overdue }
    }

    /// Resets a worker's state for its next process.
    pub(super) fn forget(&mut self, worker: u32) {
        self.watched[worker as usize] = WatchedWorker::default();
        self.overdue.forget(worker);
    }
}

impl<T, B: Send + 'static, E> Engine<T, B, E> {
    /// Sets the limits of the phases (`None`: never stuck), and the [`Stall::patience`].
    pub fn name_stalls(&mut self, limits: [Option<Duration>; 2], patience: Option<Duration>) {
        (self.stalls.limits, self.stalls.patience) = (limits, patience);
    }

    /// A stuck worker that has not been reported. Call after each [`Engine::after_wait`] until there is none.
    pub fn stalled(&mut self) -> Option<Stall> {
        let now = self.looked;
        if let Some(stall) = self.overdue(now) {
            return Some(stall);
        }
        // The waiting event may be the result.
        if now.saturating_sub(self.stalls.looked) < STALL_CHECK || self.has_news() {
            return None;
        }
        let workers = 0..self.arena().geometry().workers;
        let found = workers.into_iter().find_map(|worker| self.stall_of(worker, now));
        if found.is_none() {
            self.stalls.looked = now;
        }
        found
    }

    /// What a worker shows; `None` if nothing is waited for that it has to do.
    pub(super) fn shown_by(&self, worker: u32) -> Option<Shown> {
        let oldest = self.oldest_task_of(worker).map(|(task, _)| task);
        if oldest.is_none() && !self.scheduler.is_waited_for(WorkerId(worker)) {
            return None;
        }
        let process = self.handle.process(worker)?;
        let page = &self.handle.arena.control(worker).status;
        let time = |word: &AtomicU64| Duration::from_nanos(word.load(Ordering::Relaxed));
        Some(Shown {
            process,
            oldest,
            state: WorkerState::from_u32(page.state.load(Ordering::Relaxed)),
            task: TaskId(page.task.load(Ordering::Relaxed)),
            answers: page.tasks_done.load(Ordering::Relaxed),
            since: time(&page.since_ns),
            task_since: time(&page.task_since_ns),
        })
    }

    fn stall_of(&mut self, worker: u32, now: Duration) -> Option<Stall> {
        let shown = self.shown_by(worker)?;
        let Shown { process, oldest, state, task, .. } = &shown;
        let (oldest, waits) = (*oldest, shown.is_waited_for());
        let watched = &mut self.stalls.watched[worker as usize];
        if watched.task != oldest || watched.seen.is_zero() {
            (watched.task, watched.seen) = (oldest, now);
        }
        let (phase, task, since) = match *state {
            WorkerState::Left => return None,
            WorkerState::Starting if shown.answers == 0 => (Phase::Start, oldest, process.started),
            WorkerState::Starting => (Phase::Start, oldest, shown.since),
            _ if shown.is_answered() => return None,
            _ if waits => (Phase::Item, oldest, watched.seen),
            _ => (Phase::Item, Some(*task), shown.task_since),
        };
        // At most the age of the process, because the page may be damaged.
        let time = now.saturating_sub(since.max(process.started));
        let limit = self.stalls.limits[phase as usize]?;
        // A task that waited for its worker, and one that the worker is stuck at later, are two reports.
        if time < limit || watched.reported == Some((phase, task, waits)) || process.has_exited() {
            return None;
        }
        watched.reported = Some((phase, task, waits));
        let (pid, patience) = (process.pid, self.stalls.patience);
        Some(Stall { worker, pid, phase, state: *state, task, time, patience, exceeds: None })
    }
}

impl Handle {
    /// The Python stacks of a stuck worker's threads, or why they are unavailable. Waits: call without the GIL.
    pub fn stack_of(&self, stall: &Stall) -> std::result::Result<String, String> {
        let worker = stall.worker;
        let patience = stall.patience.ok_or("RUSTLOADER_STALL_STACK_SECONDS is 0")?;
        let process = self.process(worker).ok_or("it was not started")?;
        if process.link.is_some() {
            return Err("it runs on another machine".into());
        }
        let page = &self.arena.control(worker).status;
        // SYNC: stack-file
        let fd = match StackFile::from_u32(page.stack.load(Ordering::Acquire)) {
            StackFile::Descriptor(fd) => fd,
            StackFile::NotYet => {
                return Err("it has not come to the loader's code yet, and may still be importing".into());
            }
            StackFile::Refused => {
                return Err("it could not get a file to write it to, or a signal handler".into());
            }
            StackFile::SignalTaken => return Err(format!("{} of its own", handler())),
        };
        let place = (page.stack_device.load(Ordering::Relaxed), page.stack_inode.load(Ordering::Relaxed));
        // Before the signal: faulthandler writes to the descriptor's number, whichever file that is now.
        let file = sys::proc_fd::open(process.pid, fd, place);
        let file = file.map_err(|error| format!("its file for it cannot be read: {error}"))?;
        ask(&process, file.as_fd(), patience)
    }
}

fn handler() -> String {
    format!("it has a handler for signal {} (SIGRTMIN+{STACK_SIGNAL})", sys::signal::stack_signal())
}

/// Sends the signal and waits for the answer.
fn ask(
    process: &Process,
    file: std::os::fd::BorrowedFd<'_>,
    patience: Duration,
) -> std::result::Result<String, String> {
    if !process.descends {
        return Err("it is not a child of the main process, which sends it no signals".into());
    }
    let signal = sys::signal::stack_signal();
    // Without a handler the signal would end the process.
    if !sys::signal::catches(process.pid, signal) {
        return Err(format!("it has taken away the handler for signal {signal} (SIGRTMIN+{STACK_SIGNAL})"));
    }
    let start = sys::proc_fd::len(file);
    process.signal(signal);
    let deadline = sys::clock::monotonic() + patience;
    let (mut len, mut unchanged) = (start, 0);
    // On a busy machine the handler may be preempted. While it runs its signal is blocked.
    let whole = |unchanged| unchanged >= STACK_SETTLED && !sys::signal::blocks(process.pid, signal);
    while !whole(unchanged) && sys::clock::monotonic() < deadline {
        std::thread::sleep(STACK_CHECK);
        let now = sys::proc_fd::len(file);
        unchanged = if now == len && now > start { unchanged + 1 } else { 0 };
        len = now;
    }
    if len > start {
        return Ok(String::from_utf8_lossy(&sys::proc_fd::read(file, start, STACK_SHOWN)).into_owned());
    }
    let ways = format!("it is stopped, the kernel keeps it, or {}", handler());
    Err(format!("it did not answer within {} s: {ways} of its own", patience.as_secs_f64()))
}
