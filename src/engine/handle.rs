//! The part of an engine that any thread may use without exclusive access: stop flags and worker slots.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use super::answers::{Answers, Snapshot};
use super::completions::Incoming;
use super::links::Links;
use super::page;
use super::pin_control::PinControl;
use super::process::Process;
use super::status::Status;
use crate::config::{EXIT_CHECK, WAIT_SLICE};
use crate::error::{Error, Result};
use crate::metrics::{Meter, Totals};
use crate::shm::arena::{Arena, Usage};
use crate::shm::layout::WorkerState;
use crate::sync::{Ordering, lock};
use crate::sys;
use crate::trace::{Kind, Source};

/// The doorbell's token in a poll set; [`Handle::started`] makes the tokens of the workers.
pub(super) const DOORBELL: u64 = u64::MAX;

/// A worker's slot, whose process may be replaced.
#[derive(Debug, Default)]
struct WorkerSlot {
    /// Number of processes that were started in this slot.
    generation: u32,
    /// The current process; `None` before the start of each generation.
    liveness: Option<Arc<Process>>,
}

/// Returns the token of a worker's pidfd in a poll set. The generation distinguishes events of earlier processes.
fn token(worker: u32, generation: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(worker)
}

/// The shared part of an engine.
#[derive(Debug)]
pub struct Handle {
    /// The arena.
    pub arena: Arc<Arena>,
    /// Rung by workers, and to stop the iterator.
    pub doorbell: Arc<sys::event::EventFd>,
    /// Locked only briefly. Never locked in a forked child, where another thread may have held the lock.
    slots: Box<[Mutex<WorkerSlot>]>,
    pinning: OnceLock<Arc<PinControl>>,
    /// The iterator's counters.
    pub meter: Arc<Meter>,
    closing: AtomicBool,
    exiting: AtomicBool,
    /// The workers' last status, once another iterator may use the arena. Locked while the arena is used without
    /// exclusive access. The bindings hold the GIL then, so that Python never forks with the lock held; a child checks
    /// [`Handle::is_ours`] nevertheless.
    last: Mutex<Option<Box<[Status]>>>,
    answers: Mutex<Answers>,
    /// Set with the first worker on another machine: then all workers are on other machines.
    links: OnceLock<Links>,
    /// The source of this iterator's events in a trace.
    pub trace: Arc<Source>,
}

impl Handle {
    /// Creates a handle without workers.
    pub fn new(arena: Arc<Arena>) -> Result<Self> {
        let workers = arena.geometry().workers;
        let slots = (0..workers).map(|_| Mutex::default()).collect();
        Ok(Self {
            trace: Arc::new(Source::new(arena.clone())),
            arena,
            doorbell: Arc::new(sys::event::EventFd::new()?),
            slots,
            pinning: OnceLock::new(),
            meter: Arc::default(),
            closing: AtomicBool::new(false),
            exiting: AtomicBool::new(false),
            last: Mutex::new(None),
            answers: Mutex::new(Answers::new(workers)),
            links: OnceLock::new(),
        })
    }

    /// Registers a worker's new process. Returns the process and the token of its pidfd. Fails with [`Error::Usage`]
    /// for an invalid pid, an unknown worker, or a slot in use.
    pub fn started(&self, worker: u32, pid: i32) -> Result<(Arc<Process>, u64)> {
        if pid <= 0 || pid == std::process::id() as i32 {
            return Err(Error::usage(format!("worker {worker} has pid {pid}, which is not a separate process")));
        }
        self.register(worker, || Ok(Process::open(pid)))
    }

    /// Registers a worker on another machine by the connected socket. `pid` is its process on that machine.
    pub(super) fn attached(&self, worker: u32, socket: OwnedFd, pid: i32) -> Result<(Arc<Process>, u64)> {
        self.register(worker, || {
            let links = self.links.get_or_init(|| Links::new(self.arena.geometry().workers));
            let link = links.start(&self.arena, worker, socket, &self.doorbell)?;
            Ok(Process::remote(pid, link))
        })
    }

    /// Fills an empty slot.
    fn register(&self, worker: u32, open: impl FnOnce() -> Result<Process>) -> Result<(Arc<Process>, u64)> {
        let mut slot = self.slot(worker)?;
        if slot.liveness.is_some() {
            return Err(Error::usage(format!("worker {worker} was started twice")));
        }
        let process = Arc::new(open()?);
        self.trace.mark(Kind::Started, worker, process.pid as u64, u64::from(slot.generation));
        slot.generation += 1;
        slot.liveness = Some(process.clone());
        Ok((process, token(worker, slot.generation)))
    }

    /// Empties a slot whose process has ended. Fails with [`Error::Usage`] if there is no such process.
    pub(super) fn vacate(&self, worker: u32) -> Result<()> {
        let mut slot = self.slot(worker)?;
        match slot.liveness.take_if(|process| process.has_exited()) {
            Some(_) => Ok(()),
            None => Err(Error::usage(format!("worker {worker} has no process that has ended"))),
        }
    }

    /// Returns the token of a worker's current process.
    pub(super) fn token_of(&self, worker: u32) -> u64 {
        token(worker, self.generation(worker))
    }

    /// Returns true if a worker's process has ended, or ends within `limit`.
    pub(super) fn exits_within(&self, worker: u32, limit: Duration) -> bool {
        let Some(process) = self.process(worker) else { return true };
        let deadline = sys::clock::monotonic() + limit;
        loop {
            if process.has_exited() {
                return true;
            }
            if sys::clock::monotonic() >= deadline {
                return false;
            }
            std::thread::sleep(EXIT_CHECK);
        }
    }

    /// Returns the number of processes that were started as this worker.
    pub(super) fn generation(&self, worker: u32) -> u32 {
        self.slot(worker).map_or(0, |slot| slot.generation)
    }

    fn slot(&self, worker: u32) -> Result<MutexGuard<'_, WorkerSlot>> {
        self.check_ours()?;
        let slot = self.slots.get(worker as usize);
        let slot = slot.ok_or_else(|| Error::usage(format!("no worker {worker}")))?;
        Ok(lock(slot))
    }

    /// Returns the current process of a worker. `None` before its start, and in a forked child.
    pub fn process(&self, worker: u32) -> Option<Arc<Process>> {
        self.slot(worker).ok()?.liveness.clone()
    }

    /// Returns the worker and process of a token; `None` if that is not the current process.
    pub(super) fn named_by(&self, named: u64) -> Option<(u32, Arc<Process>)> {
        let worker = named as u32;
        let slot = self.slot(worker).ok()?;
        let process = slot.liveness.clone()?;
        (token(worker, slot.generation) == named).then_some((worker, process))
    }

    /// Creates the control of the pin thread.
    pub(super) fn new_pin_control(&self) -> Result<Arc<PinControl>> {
        let control = Arc::new(PinControl::new()?);
        let placed = self.pinning.set(control.clone());
        placed.map_err(|_| Error::usage("an iterator has only one pin thread"))?;
        Ok(control)
    }

    /// Returns the control of the pin thread, if there is one.
    pub fn pinning(&self) -> Option<&PinControl> {
        self.pinning.get().map(Arc::as_ref)
    }

    /// Asks the pin thread to end, if there is one. If the doorbell fails, the thread sees the request within a slice.
    pub fn stop_pinning(&self) {
        if let Some(control) = self.pinning() {
            control.stop();
            let _ = self.doorbell.ring();
        }
    }

    /// Returns true in the process that created the iterator.
    pub fn is_ours(&self) -> bool {
        self.arena.is_ours()
    }

    /// Returns [`Error::Child`] in a forked child.
    pub fn check_ours(&self) -> Result<()> {
        let what = "this DataLoader iterator belongs to the process that this one was forked from; make a new one";
        if self.is_ours() { Ok(()) } else { Err(Error::Child { what }) }
    }

    /// Returns true once [`Handle::close`] has been called.
    pub fn closing(&self) -> bool {
        // SYNC: closing (pairs with the Release in `close`).
        self.closing.load(Ordering::Acquire)
    }

    /// Notes that the interpreter exits: threads that wait in `next` park until the process ends.
    pub fn exit(&self) {
        // SYNC: exiting (pairs with the Acquire in `exiting`).
        self.exiting.store(true, Ordering::Release);
    }

    /// Returns true once the interpreter exits.
    pub fn exiting(&self) -> bool {
        // SYNC: exiting (pairs with the Release in `exit`).
        self.exiting.load(Ordering::Acquire)
    }

    /// Wakes a worker if it sleeps. With a shared queue, wakes all workers that sleep.
    pub fn wake(&self, worker: u32) -> Result<()> {
        self.ring(worker, u32::MAX)
    }

    /// Wakes one of the workers that sleep, for a task in the shared queue.
    pub fn wake_one(&self) -> Result<()> {
        self.ring(0, 1)
    }

    #[inline]
    fn ring(&self, worker: u32, limit: u32) -> Result<()> {
        if let Some(links) = self.links.get() {
            match limit {
                1 => links.ring_any(),
                _ if self.arena.geometry().shared_queue => links.wake(),
                _ => links.ring(worker),
            }
            return Ok(());
        }
        let sleeper = self.arena.sleeper_of(worker);
        if sleeper.must_ring() {
            sys::futex::wake(&sleeper.bell, limit)?;
        }
        Ok(())
    }

    /// Receives the small results that have arrived from a worker on another machine; see `Link::receive_now`.
    pub(super) fn receive_now(&self, worker: u32) {
        if let Some(links) = self.links.get() {
            links.receive_now(worker);
        }
    }

    /// Makes the connections' threads receive the results of workers on other machines.
    pub(super) fn on_duty(&self) {
        if let Some(links) = self.links.get() {
            links.on_duty();
        }
    }

    /// Stops all workers and wakes every thread in `next`; idempotent. Takes only the lock `last`, which other threads
    /// hold only while they copy the workers' counters. If a wake fails, the sleeper sees the stop within its slice.
    pub fn close(&self) {
        // SYNC: closing (pairs with the Acquire in `closing`).
        self.closing.store(true, Ordering::Release);
        self.stop_workers();
        if let Some(control) = self.pinning() {
            let _ = control.pickup.ring();
        }
        let _ = self.doorbell.ring();
    }

    fn last(&self) -> MutexGuard<'_, Option<Box<[Status]>>> {
        lock(&self.last)
    }

    fn stop_workers(&self) {
        let last = self.last();
        if last.is_some() {
            return;
        }
        // Relaxed, because it orders no other data; a sleeping worker sees it after the bell (SYNC: bell-rung).
        self.arena.header().stop.0.store(1, Ordering::Relaxed);
        for worker in 0..self.arena.geometry().workers {
            let sleeper = self.arena.sleeper_of(worker);
            sleeper.ring_always();
            let _ = sys::futex::wake(&sleeper.bell, u32::MAX);
        }
        if let Some(links) = self.links.get() {
            links.wake();
        }
    }

    /// Detaches the handle from the arena after the workers have ended: another iterator may use the arena, and `close`
    /// must not stop the workers of that iterator.
    pub fn detach_from_arena(&self) {
        let mut last = self.last();
        if last.is_none() {
            self.trace.end();
            let now = sys::clock::monotonic_ns();
            let page = |worker| &self.arena.control(worker).status;
            *last = Some((0..self.arena.geometry().workers).map(|it| Status::of(page(it), now)).collect());
            self.meter.keep(&self.arena, |worker| self.process(worker).map_or(0, |it| it.pid as u32));
            page::close(&self.arena);
        }
    }

    /// Returns true once this iterator no longer uses the arena.
    pub fn has_ended(&self) -> bool {
        !self.is_ours() || self.last().is_some()
    }

    /// Returns the iterator's current totals. In a forked child these are the totals at the fork, without the workers.
    pub fn totals(&self) -> Totals {
        if !self.is_ours() {
            return self.meter.totals();
        }
        let last = self.last();
        let mut totals = self.meter.totals();
        if last.is_none() {
            let now = |worker| self.process(worker).map_or((0, false), |it| (it.pid as u32, !it.has_exited()));
            totals.add_arena(&self.arena, now);
        }
        totals.pin_threads = u32::from(self.pinning().is_some_and(PinControl::is_alive));
        totals
    }

    fn running(&self) -> impl Iterator<Item = (u32, Arc<Process>)> {
        let all = 0..self.arena.geometry().workers;
        let processes = all.filter_map(|worker| Some((worker, self.process(worker)?)));
        processes.filter(|(_, process)| !process.has_exited())
    }

    /// Returns the number of running workers.
    pub fn alive(&self) -> usize {
        self.running().count()
    }

    /// Waits until all workers have ended, but at most for `limit` and for one slice. Returns true if all have ended.
    pub fn wait_gone(&self, limit: Duration) -> Result<bool> {
        let deadline = sys::clock::monotonic() + limit.min(WAIT_SLICE);
        loop {
            let Some((worker, process)) = self.running().next() else { return Ok(true) };
            let now = sys::clock::monotonic();
            if now >= deadline {
                return Ok(false);
            }
            // Another file may have taken the pidfd's number, and always be readable.
            let intact = process.pidfd.as_ref().is_none_or(sys::pidfd::PidFd::is_intact);
            let Some(end) = process.end_fd().filter(|_| intact) else {
                std::thread::sleep(EXIT_CHECK.min(deadline - now));
                continue;
            };
            let mut set = sys::poll::PollSet::new();
            set.add(end.as_raw_fd(), u64::from(worker))?;
            match set.wait(Some(deadline - now), &mut Vec::new()) {
                Ok(sys::poll::WaitOutcome::Interrupted) => return Ok(self.alive() == 0),
                Ok(_) => {}
                // The descriptor was closed.
                Err(_) => std::thread::sleep(EXIT_CHECK.min(deadline - now)),
            }
        }
    }

    /// Sends a signal to each running worker that descends from this process.
    pub fn signal_all(&self, signal: i32) {
        self.running().for_each(|(_, process)| process.signal(signal));
    }

    /// Returns true if every worker left on its own and none was replaced, so that the arena has no damage and no lost
    /// blocks.
    pub fn all_left(&self) -> bool {
        (0..self.arena.geometry().workers).all(|worker| {
            let Ok(slot) = self.slot(worker) else { return false };
            // The kernel orders the end of the process after all of its stores.
            let state = || self.arena.control(worker).status.state.load(Ordering::Relaxed);
            let ended = slot.liveness.as_ref().is_some_and(|process| process.has_exited());
            slot.generation == 1 && ended && state() == WorkerState::Left as u32
        })
    }

    /// Locks and returns the answers. The lock is held only briefly: no Python code runs meanwhile, and nothing waits.
    /// The bindings hold the GIL then, so that Python never forks with the lock held; a child checks
    /// [`Handle::is_ours`] first.
    pub fn answers(&self) -> MutexGuard<'_, Answers> {
        lock(&self.answers)
    }

    /// Returns the newest snapshot of this epoch that a worker made after at most `answers` of its answers. `None`
    /// before the first one, and after the end of the iterator.
    pub fn snapshot(&self, worker: u32, answers: u64) -> Result<Option<Snapshot>> {
        self.check_ours()?;
        self.answers().snapshot(worker, answers)
    }

    /// Keeps a snapshot that has arrived.
    pub(super) fn keep(&self, incoming: Incoming) {
        self.answers().keep(&self.arena, incoming);
    }

    /// Returns a worker's status, or `None` for an unknown worker. After the end of the iterator this is the last
    /// status, because another iterator may use the arena. Fails with [`Error::Child`] in a forked child.
    pub fn status(&self, worker: u32) -> Result<Option<Status>> {
        self.check_ours()?;
        let last = self.last();
        if let Some(last) = &*last {
            return Ok(last.get(worker as usize).copied());
        }
        let page = || &self.arena.control(worker).status;
        let there = worker < self.arena.geometry().workers;
        Ok(there.then(|| Status::of(page(), sys::clock::monotonic_ns())))
    }

    /// Returns the memory in use in the arena. It is zero after the end of the iterator and in a forked child.
    pub fn usage(&self) -> Usage {
        if !self.is_ours() {
            return Usage::default();
        }
        let last = self.last();
        if last.is_some() { Usage::default() } else { self.arena.usage() }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::shm::alloc::Allocator;
    use crate::shm::block::CONSUMER;

    #[test]
    fn this_process_and_invalid_pids_are_not_workers() {
        let handle = Handle::new(Arena::create_sized(1 << 30, 1, 4).unwrap()).unwrap();
        for pid in [std::process::id() as i32, 0, -1, i32::MIN] {
            assert!(matches!(handle.started(0, pid), Err(Error::Usage { .. })), "{pid}");
        }
        assert!(handle.process(0).is_none());
        handle.signal_all(libc::SIGKILL);
    }

    #[test]
    fn a_slot_takes_one_process_after_the_other() {
        let handle = Handle::new(Arena::create_sized(1 << 30, 2, 4).unwrap()).unwrap();
        let spawn = || Command::new("sleep").arg("1000").spawn().unwrap();
        let refused = |result: Result<()>| assert!(matches!(result, Err(Error::Usage { .. })), "{result:?}");
        refused(handle.vacate(0));
        refused(handle.started(2, i32::MAX).map(drop));
        let mut tokens = Vec::new();
        for generation in 1..4 {
            let mut child = spawn();
            let (process, token) = handle.started(0, child.id() as i32).unwrap();
            assert!(!tokens.contains(&token));
            tokens.push(token);
            refused(handle.started(0, child.id() as i32).map(drop));
            refused(handle.vacate(0));
            let named: Vec<_> = tokens.iter().map(|token| handle.named_by(*token)).collect();
            assert!(named[..generation - 1].iter().all(Option::is_none));
            assert!(matches!(&named[generation - 1], Some((0, named)) if named.pid == process.pid));
            child.kill().unwrap();
            child.wait().unwrap();
            handle.vacate(0).unwrap();
            assert!(handle.process(0).is_none() && process.has_exited());
        }
        assert!(handle.process(1).is_none());
    }

    #[test]
    fn the_arena_of_a_worker_that_was_replaced_is_not_used_again() {
        let arena = Arena::create_sized(1 << 30, 1, 4).unwrap();
        let handle = Handle::new(arena.clone()).unwrap();
        for first in [true, false] {
            assert!(!handle.all_left());
            let mut child = Command::new("true").spawn().unwrap();
            handle.started(0, child.id() as i32).unwrap();
            child.wait().unwrap();
            arena.control(0).status.state.store(WorkerState::Left as u32, Ordering::Relaxed);
            assert_eq!(handle.all_left(), first);
            handle.vacate(0).unwrap();
        }
    }

    #[test]
    fn a_file_with_the_number_of_a_pidfd_does_not_make_the_wait_for_its_process_spin() {
        let handle = Handle::new(Arena::create_sized(1 << 30, 1, 4).unwrap()).unwrap();
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        handle.started(0, child.id() as i32).unwrap();
        let number = handle.process(0).unwrap().pidfd.as_ref().unwrap().as_fd().as_raw_fd();
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        // SAFETY: dup2 takes plain numbers; it replaces the pidfd.
        assert!(unsafe { libc::dup2(file.as_raw_fd(), number) } != -1);
        let before = cpu_time();
        assert!(!handle.wait_gone(WAIT_SLICE).unwrap());
        assert!(cpu_time() - before < WAIT_SLICE / 4, "it spins");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(handle.wait_gone(WAIT_SLICE).unwrap());
    }

    /// Returns the CPU time of this thread.
    fn cpu_time() -> Duration {
        // SAFETY: a timespec of zeroes is a valid one, for the kernel to fill.
        let mut time: libc::timespec = unsafe { std::mem::zeroed() };
        // SAFETY: `time` is a local struct.
        unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }

    #[test]
    fn after_the_end_the_arena_of_the_next_iterator_is_not_read() {
        let arena = Arena::create_sized(1 << 30, 2, 4).unwrap();
        let handle = Handle::new(arena.clone()).unwrap();
        let mut allocator = Allocator::new(arena.clone(), 0);
        allocator.allocate(20_000, CONSUMER).unwrap();
        let page = &arena.control(1).status;
        page.state.store(WorkerState::Left as u32, Ordering::Relaxed);
        page.tasks_done.store(7, Ordering::Relaxed);
        assert!(handle.usage().held >= 20_000);
        assert_eq!(handle.status(1).unwrap().unwrap().tasks_done, 7);
        handle.detach_from_arena();
        page.state.store(WorkerState::Fetch as u32, Ordering::Relaxed);
        page.tasks_done.store(99, Ordering::Relaxed);
        let last = handle.status(1).unwrap().unwrap();
        assert_eq!((last.names().0, last.tasks_done), (WorkerState::Left.name(), 7));
        assert_eq!(handle.status(1).unwrap().unwrap(), last, "its times no longer change");
        assert_eq!(handle.status(2).unwrap(), None);
        assert_eq!(handle.usage(), Usage::default());
        assert!(arena.usage().held >= 20_000);
    }
}
