//! Workers that are stuck: in their start, or at one batch, for longer than anybody should wait in silence.
//!
//! They are looked for where the main process waits for results in any case, a few times a second, by what they say on
//! their status pages: no thread, and nothing to be done for a batch. What the worker's code is at is told by Python's
//! faulthandler, which runs in a signal's handler and so needs no GIL: the worker has it write into a memfd, and this
//! side reads that through /proc.

use std::os::fd::AsFd;
use std::time::Duration;

use super::Engine;
use super::handle::Handle;
use super::process::Process;
use crate::config::{STACK_CHECK, STACK_SETTLED, STACK_SHOWN, STACK_SIGNAL, STALL_CHECK};
use crate::id::{TaskId, WorkerId};
use crate::shm::layout::{StackFile, WorkerState};
use crate::sync::Ordering;
use crate::sys;

/// Where a worker is stuck.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Before its first batch of an epoch.
    Start,
    /// At a batch.
    Item,
}

/// A worker that is stuck.
#[derive(Clone, Copy, Debug)]
pub struct Stall {
    /// The worker.
    pub worker: u32,
    /// Its process.
    pub pid: i32,
    /// Where it is stuck.
    pub phase: Phase,
    /// What it says that it does.
    pub state: WorkerState,
    /// The task that it is at, or that waits for it.
    pub task: Option<TaskId>,
    /// For how long.
    pub time: Duration,
    /// For so long its stack is worth waiting for; `None`: it is not asked for.
    pub patience: Option<Duration>,
}

/// What is known of one worker.
#[derive(Clone, Copy, Debug, Default)]
struct Watched {
    /// Its oldest task when it was last looked at.
    task: Option<TaskId>,
    /// When that was first seen to be its oldest.
    seen: Duration,
    /// What was told last, and whether the batch still waited for the worker then.
    told: Option<(Phase, Option<TaskId>, bool)>,
}

/// What is known of all workers.
#[derive(Debug)]
pub(super) struct Stalls {
    /// After so long in a phase a worker is stuck; `None`: never.
    limits: [Option<Duration>; 2],
    /// For so long a stack is waited for; `None`: none is asked for.
    patience: Option<Duration>,
    /// When they were last looked at.
    looked: Duration,
    watched: Box<[Watched]>,
}

impl Stalls {
    pub(super) fn new(workers: u32) -> Self {
        let watched = vec![Watched::default(); workers as usize].into();
        Self { limits: [None; 2], patience: None, looked: Duration::ZERO, watched }
    }

    /// Forgets a worker's process: another one takes its place.
    pub(super) fn forget(&mut self, worker: u32) {
        self.watched[worker as usize] = Watched::default();
    }
}

impl<T, B: Send + 'static, E> Engine<T, B, E> {
    /// Has workers named that are in their start, or at one batch, for longer than `limits`; `None`: never. For so long
    /// as `patience` their stacks are waited for; `None`: they are not asked for.
    pub fn name_stalls(&mut self, limits: [Option<Duration>; 2], patience: Option<Duration>) {
        (self.stalls.limits, self.stalls.patience) = (limits, patience);
    }

    /// A worker that is stuck and has not been named for it. To be asked after each [`Engine::after_wait`], until there is none.
    pub fn stalled(&mut self) -> Option<Stall> {
        let now = self.looked;
        // What has come and was not taken in yet may be the very result.
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

    fn stall_of(&mut self, worker: u32, now: Duration) -> Option<Stall> {
        if !self.scheduler.is_waited_for(WorkerId(worker)) {
            return None;
        }
        let oldest = self.scheduler.oldest_task_of(WorkerId(worker)).map(|(task, _)| task);
        let watched = &mut self.stalls.watched[worker as usize];
        if watched.task != oldest || watched.seen.is_zero() {
            (watched.task, watched.seen) = (oldest, now);
        }
        let process = self.handle.process(worker)?;
        let page = &self.handle.arena.control(worker).status;
        let state = WorkerState::from_u32(page.state.load(Ordering::Relaxed));
        let (task, answers) =
            (TaskId(page.task.load(Ordering::Relaxed)), page.tasks_done.load(Ordering::Relaxed));
        let nanos = Duration::from_nanos;
        let waits = match state {
            WorkerState::Idle => true,
            // It has published the batch before, and not come back for the next one.
            WorkerState::Publish => oldest.is_some_and(|oldest| task < oldest),
            _ => false,
        };
        let (phase, task, since) = match state {
            WorkerState::Left => return None,
            WorkerState::Starting if answers == 0 => (Phase::Start, oldest, process.started),
            WorkerState::Starting => (Phase::Start, oldest, nanos(page.since_ns.load(Ordering::Relaxed))),
            // It has answered, and the pin thread has the answer.
            WorkerState::Idle if answers > 0 && oldest.is_some_and(|oldest| task >= oldest) => return None,
            _ if waits => (Phase::Item, oldest, watched.seen),
            _ => (Phase::Item, Some(task), nanos(page.task_since_ns.load(Ordering::Relaxed))),
        };
        // Whatever a broken worker writes there.
        let time = now.saturating_sub(since.max(process.started));
        let limit = self.stalls.limits[phase as usize]?;
        // That a batch has waited for its worker says nothing of what keeps the worker at it later.
        if time < limit || watched.told == Some((phase, task, waits)) || process.has_exited() {
            return None;
        }
        watched.told = Some((phase, task, waits));
        Some(Stall { worker, pid: process.pid, phase, state, task, time, patience: self.stalls.patience })
    }
}

impl Handle {
    /// What a stuck worker's threads are at, in Python's words; or why that cannot be had. Waits, for [`Stall::patience`]
    /// at the most: to be called without the GIL.
    pub fn stack_of(&self, stall: &Stall) -> std::result::Result<String, String> {
        let worker = stall.worker;
        let patience = stall.patience.ok_or("RUSTLOADER_STALL_STACK_SECONDS is 0")?;
        let process = self.process(worker).ok_or("it was not started")?;
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
        // Before the signal is sent: faulthandler writes to the number, whatever file that is by now.
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
    // On a busy machine the handler may have to wait in the middle of its work. While it runs its signal is blocked.
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
