//! What may be reached from any thread at any time, without the turn: the flags that stop an iterator, and its
//! workers' processes.

use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::pin::Control;
use crate::error::{Error, Result};
use crate::shm::arena::Arena;
use crate::shm::layout::WorkerState;
use crate::sync::Ordering;
use crate::sys;
use crate::sys::pidfd::ExitStatus;

/// The longest wait in one go: a signal that came just before it, or that another thread took, is seen after it.
pub const SLICE: Duration = Duration::from_millis(250);

/// A worker's process.
#[derive(Debug)]
pub struct Process {
    /// Process id.
    pub pid: i32,
    /// Reports its end; `None` where the system refuses pidfds.
    pub pidfd: Option<sys::pidfd::PidFd>,
    /// Start time by /proc, which tells it from a later process of the same number.
    start_time: u64,
}

impl Process {
    fn open(pid: i32) -> Self {
        let start_time = sys::pidfd::start_time(pid).unwrap_or(0);
        Self { pid, pidfd: sys::pidfd::PidFd::open(pid).ok(), start_time }
    }

    /// Whether it has ended, reaped or not.
    pub fn has_exited(&self) -> bool {
        match &self.pidfd {
            Some(pidfd) => pidfd.has_exited().unwrap_or_else(|_| self.has_exited_by_number()),
            None => self.has_exited_by_number(),
        }
    }

    fn has_exited_by_number(&self) -> bool {
        sys::pidfd::has_exited(self.pid, self.start_time)
    }

    /// How it ended, where that can be told.
    pub fn status(&self) -> Option<ExitStatus> {
        match &self.pidfd {
            Some(pidfd) => pidfd.status(),
            None => sys::pidfd::child_status(self.pid),
        }
    }

    fn signal(&self, signal: i32) {
        if self.has_exited() {
            return;
        }
        // A process that has just ended is no error here.
        let sent = self.pidfd.as_ref().is_some_and(|pidfd| pidfd.send_signal(signal).is_ok());
        if !sent {
            let _ = sys::signal::kill(self.pid, signal);
        }
    }
}

/// The part of an iterator that stops it.
#[derive(Debug)]
pub struct Hands {
    /// The arena.
    pub arena: Arc<Arena>,
    /// Rung by workers, and by whoever stops the iterator.
    pub doorbell: sys::event::EventFd,
    processes: Box<[OnceLock<Process>]>,
    /// The pin thread's, where there is one.
    pinning: OnceLock<Arc<Control>>,
    closing: AtomicBool,
    exiting: AtomicBool,
}

impl Hands {
    /// Hands without workers yet.
    pub fn new(arena: Arc<Arena>) -> Result<Self> {
        let workers = arena.geometry().workers;
        let processes = (0..workers).map(|_| OnceLock::new()).collect();
        Ok(Self {
            arena,
            doorbell: sys::event::EventFd::new()?,
            processes,
            pinning: OnceLock::new(),
            closing: AtomicBool::new(false),
            exiting: AtomicBool::new(false),
        })
    }

    /// Notes the process of a worker that has just been started.
    pub fn started(&self, worker: u32, pid: i32) -> Result<()> {
        let place = self.processes.get(worker as usize);
        let place = place.ok_or_else(|| Error::usage(format!("no worker {worker}")))?;
        place.set(Process::open(pid)).map_err(|_| Error::usage(format!("worker {worker} was started twice")))
    }

    /// The process of a worker, if it has been started.
    pub fn process(&self, worker: u32) -> Option<&Process> {
        self.processes.get(worker as usize)?.get()
    }

    /// The control of the pin thread that is about to be started.
    pub(super) fn control_of_pinning(&self) -> Result<Arc<Control>> {
        let control = Arc::new(Control::new()?);
        let placed = self.pinning.set(control.clone());
        placed.map_err(|_| Error::usage("an iterator has one pin thread"))?;
        Ok(control)
    }

    /// The pin thread's control, where there is such a thread.
    pub fn pinning(&self) -> Option<&Control> {
        self.pinning.get().map(Arc::as_ref)
    }

    /// Tells the pin thread to end, where there is one.
    pub fn stop_pinning(&self) -> Result<()> {
        let Some(control) = self.pinning() else { return Ok(()) };
        control.stop();
        self.doorbell.ring()
    }

    /// True in the process that made the iterator.
    pub fn is_ours(&self) -> bool {
        self.arena.is_ours()
    }

    /// An error in a forked child.
    pub fn check_ours(&self) -> Result<()> {
        let what =
            "this DataLoader iterator belongs to the process that this one was forked from; make a new one";
        if self.is_ours() { Ok(()) } else { Err(Error::Child { what }) }
    }

    /// True once somebody has begun to stop the iterator.
    pub fn closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// The interpreter exits: what waits in `next` on other threads is to go on waiting until the process ends.
    pub fn exit(&self) {
        self.exiting.store(true, Ordering::Release);
    }

    /// Whether the interpreter exits.
    pub fn exiting(&self) -> bool {
        self.exiting.load(Ordering::Acquire)
    }

    /// Wakes one worker if it sleeps.
    pub fn wake(&self, worker: u32) -> Result<()> {
        let sleeper = &self.arena.control(worker).sleeper.0;
        if sleeper.must_ring() {
            sys::futex::wake(&sleeper.bell, 1)?;
        }
        Ok(())
    }

    /// Tells every worker to leave and wakes whoever waits in `next`. Never blocks; may be called again. Whoever is not woken,
    /// because the system refuses that, looks within its slice.
    pub fn close(&self) {
        self.closing.store(true, Ordering::Release);
        self.arena.header().stop.0.store(1, Ordering::Release);
        for worker in 0..self.arena.geometry().workers {
            let sleeper = &self.arena.control(worker).sleeper.0;
            sleeper.ring_always();
            let _ = sys::futex::wake(&sleeper.bell, u32::MAX);
        }
        if let Some(control) = self.pinning() {
            let _ = control.pickup.ring();
        }
        let _ = self.doorbell.ring();
    }

    fn running(&self) -> impl Iterator<Item = (u32, &Process)> {
        let all = self.processes.iter().enumerate();
        all.filter_map(|(worker, place)| Some((worker as u32, place.get()?))).filter(|(_, p)| !p.has_exited())
    }

    /// Number of workers that have not ended.
    pub fn alive(&self) -> usize {
        self.running().count()
    }

    /// Waits until all workers have ended, for at most `limit` and at most one slice; says whether they have.
    pub fn wait_gone(&self, limit: Duration) -> Result<bool> {
        let deadline = sys::clock::monotonic() + limit.min(SLICE);
        loop {
            let Some((worker, process)) = self.running().next() else { return Ok(true) };
            let now = sys::clock::monotonic();
            if now >= deadline {
                return Ok(false);
            }
            let Some(pidfd) = &process.pidfd else {
                std::thread::sleep(Duration::from_millis(2).min(deadline - now));
                continue;
            };
            let mut set = sys::poll::PollSet::new();
            set.add(pidfd.as_fd().as_raw_fd(), u64::from(worker))?;
            match set.wait(Some(deadline - now), &mut Vec::new()) {
                Ok(sys::poll::WaitOutcome::Interrupted) => return Ok(self.alive() == 0),
                Ok(_) => {}
                // Somebody has closed the descriptor.
                Err(_) => std::thread::sleep(Duration::from_millis(2).min(deadline - now)),
            }
        }
    }

    /// Sends a signal to each worker that has not ended.
    pub fn signal_all(&self, signal: i32) {
        self.running().for_each(|(_, process)| process.signal(signal));
    }

    /// Whether every worker left by its own will, so that the arena is as it should be.
    pub fn all_left(&self) -> bool {
        (0..self.arena.geometry().workers).all(|worker| {
            let state = self.arena.control(worker).status.state.load(Ordering::Acquire);
            self.process(worker).is_some_and(Process::has_exited) && state == WorkerState::Left as u32
        })
    }
}
