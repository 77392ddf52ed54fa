//! The part of an engine that any thread may use without exclusive access, including the stop flags and worker slots.

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

/// The doorbell's token in a poll set. [`token`] makes the tokens of the workers.
pub(super) const DOORBELL: u64 = u64::MAX;

/// A worker's slot, whose process may be replaced.
#[derive(Debug, Default)]
struct WorkerSlot {
    /// Number of processes that have been started in this slot.
    generation: u32,
    /// The current process; `None` before the start of the first process and of each replacement.
    process: Option<Arc<Process>>,
}

/// Returns the token of a worker's pidfd in a poll set. It includes the generation, so that an event of an earlier
/// process in the slot is recognized as stale.
fn token(worker: u32, generation: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(worker)
}

/// The shared part of an engine.
#[derive(Debug)]
pub struct Handle {
    /// The arena.
    pub arena: Arc<Arena>,
    /// The doorbell, which workers ring when they publish results, and which [`Handle::close`] rings.
    pub doorbell: Arc<sys::event::EventFd>,
    /// The worker slots. A lock is held only briefly. It is never taken in a forked child, because another thread may
    /// have held it at the fork.
    slots: Box<[Mutex<WorkerSlot>]>,
    pinning: OnceLock<Arc<PinControl>>,
    /// The iterator's counters.
    pub meter: Arc<Meter>,
    closing: AtomicBool,
    exiting: AtomicBool,
    /// The workers' final status; `Some` once another iterator may use the arena. The lock is held while the arena is
    /// used without exclusive access. The bindings hold the GIL meanwhile, so that Python never forks while the lock is
    /// held; a child checks [`Handle::is_ours`] anyway.
    last: Mutex<Option<Box<[Status]>>>,
    answers: Mutex<Answers>,
    /// The connections to workers. Set when the first worker on another machine is registered; then all workers are on
    /// other machines.
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

    /// Registers a worker's new process. Returns the process and its token for the poll set. Fails with
    /// [`Error::Usage`] for an invalid pid, an unknown worker, or a slot in use.
    pub fn started(&self, worker: u32, pid: i32) -> Result<(Arc<Process>, u64)> {
        if pid <= 0 || pid == std::process::id() as i32 {
            return Err(Error::usage(format!("worker {worker} has pid {pid}, which is not a separate process")));
        }
        self.register(worker, || Ok(Process::open(pid)))
    }

    /// Registers a worker on another machine, which is connected through `socket`. `pid` is the ID of its process on
    /// that machine.
    pub(super) fn attached(&self, worker: u32, socket: OwnedFd, pid: i32) -> Result<(Arc<Process>, u64)> {
        self.register(worker, || {
            let links = self.links.get_or_init(|| Links::new(self.arena.geometry().workers));
            let link = links.start(&self.arena, worker, socket, &self.doorbell)?;
            Ok(Process::remote(pid, link))
        })
    }

    /// Fills a worker's empty slot with the process that `open` returns. Fails with [`Error::Usage`] if the slot is in
    /// use.
    fn register(&self, worker: u32, open: impl FnOnce() -> Result<Process>) -> Result<(Arc<Process>, u64)> {
        let mut slot = self.slot(worker)?;
        if slot.process.is_some() {
            return Err(Error::usage(format!("worker {worker} was started twice")));
        }
        let process = Arc::new(open()?);
        self.trace.mark(Kind::Started, worker, process.pid as u64, u64::from(slot.generation));
        slot.generation += 1;
        slot.process = Some(process.clone());
        Ok((process, token(worker, slot.generation)))
    }

    /// Empties a worker's slot. Fails with [`Error::Usage`] if it is empty or if its process has not ended.
    pub(super) fn vacate(&self, worker: u32) -> Result<()> {
        let mut slot = self.slot(worker)?;
        match slot.process.take_if(|process| process.has_exited()) {
            Some(_) => Ok(()),
            None => Err(Error::usage(format!("worker {worker} has no process that has ended"))),
        }
    }

    /// Returns the token of a worker's current process.
    pub(super) fn token_of(&self, worker: u32) -> u64 {
        token(worker, self.generation(worker))
    }

    /// Waits until a worker's process has ended, for at most `limit`. Returns true if it has ended.
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

    /// Returns the number of processes that have been started in a worker's slot.
    pub(super) fn generation(&self, worker: u32) -> u32 {
        self.slot(worker).map_or(0, |slot| slot.generation)
    }

    fn slot(&self, worker: u32) -> Result<MutexGuard<'_, WorkerSlot>> {
        self.check_ours()?;
        let slot = self.slots.get(worker as usize);
        let slot = slot.ok_or_else(|| Error::usage(format!("no worker {worker}")))?;
        Ok(lock(slot))
    }

    /// Returns a worker's current process. Returns `None` before its start, and in a forked child.
    pub fn process(&self, worker: u32) -> Option<Arc<Process>> {
        self.slot(worker).ok()?.process.clone()
    }

    /// Returns the worker and the process that a token names. Returns `None` if that process is no longer current.
    pub(super) fn named_by(&self, named: u64) -> Option<(u32, Arc<Process>)> {
        let worker = named as u32;
        let slot = self.slot(worker).ok()?;
        let process = slot.process.clone()?;
        (token(worker, slot.generation) == named).then_some((worker, process))
    }

    /// Creates the [`PinControl`]. Fails with [`Error::Usage`] if there already is one.
    pub(super) fn new_pin_control(&self) -> Result<Arc<PinControl>> {
        let control = Arc::new(PinControl::new()?);
        let placed = self.pinning.set(control.clone());
        placed.map_err(|_| Error::usage("the iterator already has a pin thread"))?;
        Ok(control)
    }

    /// Returns the [`PinControl`], if there is a pin thread.
    pub fn pinning(&self) -> Option<&PinControl> {
        self.pinning.get().map(Arc::as_ref)
    }

    /// Asks the pin thread to end, if there is one. If ringing the doorbell fails, the thread sees the request after at
    /// most [`WAIT_SLICE`].
    pub fn stop_pinning(&self) {
        if let Some(control) = self.pinning() {
            control.stop();
            let _ = self.doorbell.ring();
        }
    }

    /// Returns true in the process that created the iterator, and false in its forked children.
    pub fn is_ours(&self) -> bool {
        self.arena.is_ours()
    }

    /// Fails with [`Error::Child`] in a forked child.
    pub fn check_ours(&self) -> Result<()> {
        let what = "this DataLoader iterator belongs to the process that this one was forked from; make a new one";
        if self.is_ours() { Ok(()) } else { Err(Error::Child { what }) }
    }

    /// Returns true once [`Handle::close`] has been called.
    pub fn closing(&self) -> bool {
        // SYNC: closing (pairs with the Release in `close`).
        self.closing.load(Ordering::Acquire)
    }

    /// Records that the interpreter is exiting. Threads that wait in `next` then park until the process ends.
    pub fn exit(&self) {
        // SYNC: exiting (pairs with the Acquire in `exiting`).
        self.exiting.store(true, Ordering::Release);
    }

    /// Returns true once [`Handle::exit`] has been called.
    pub fn exiting(&self) -> bool {
        // SYNC: exiting (pairs with the Release in `exit`).
        self.exiting.load(Ordering::Acquire)
    }

    /// Wakes a worker if it sleeps. With a shared queue, wakes all sleeping workers.
    pub fn wake(&self, worker: u32) -> Result<()> {
        self.ring(worker, u32::MAX)
    }

    /// Wakes one of the sleeping workers, if there are any, for a task in the shared queue.
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

    /// Receives, in the calling thread, small results that have arrived from a worker on another machine; see
    /// `Link::receive_now`. Does nothing for other workers.
    pub(super) fn receive_now(&self, worker: u32) {
        if let Some(links) = self.links.get() {
            links.receive_now(worker);
        }
    }

    /// Makes the connections' threads resume receiving results from workers on other machines.
    pub(super) fn on_duty(&self) {
        if let Some(links) = self.links.get() {
            links.on_duty();
        }
    }

    /// Asks all workers to exit and wakes every thread in `next`. Idempotent. Takes only locks that other threads hold
    /// briefly: that of `last` and, for workers on other machines, those of the links. If a wake-up fails, the sleeper
    /// sees the request after its current slice.
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
        // Relaxed, because the flag orders no other data. A sleeping worker sees it after the bell (SYNC: bell-rung).
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

    /// Detaches the handle from the arena after storing the workers' final status and totals. Call it after the workers
    /// have ended. Another iterator may then use the arena; `close` does not stop that iterator's workers.
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

    /// Returns true once the handle is detached from the arena, and in a forked child.
    pub fn has_ended(&self) -> bool {
        !self.is_ours() || self.last().is_some()
    }

    /// Returns the iterator's current totals. In a forked child, returns the totals at the fork, without those of
    /// running workers.
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

    /// Waits until all workers have ended, for at most `limit` and at most one [`WAIT_SLICE`]. Returns true if all have
    /// ended.
    pub fn wait_gone(&self, limit: Duration) -> Result<bool> {
        let deadline = sys::clock::monotonic() + limit.min(WAIT_SLICE);
        loop {
            let Some((worker, process)) = self.running().next() else { return Ok(true) };
            let now = sys::clock::monotonic();
            if now >= deadline {
                return Ok(false);
            }
            // If the pidfd was closed, its number may now belong to a file that is always readable.
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

    /// Sends a signal to each running worker that descends from this process. Workers on other machines are killed.
    pub fn signal_all(&self, signal: i32) {
        self.running().for_each(|(_, process)| process.signal(signal));
    }

    /// Returns true if every worker exited cleanly and none was replaced. Then the arena is undamaged and has no lost
    /// blocks.
    pub fn all_left(&self) -> bool {
        (0..self.arena.geometry().workers).all(|worker| {
            let Ok(slot) = self.slot(worker) else { return false };
            // The kernel orders the end of the process after all of its stores.
            let state = || self.arena.control(worker).status.state.load(Ordering::Relaxed);
            let ended = slot.process.as_ref().is_some_and(|process| process.has_exited());
            slot.generation == 1 && ended && state() == WorkerState::Left as u32
        })
    }

    /// Locks and returns the answers. Hold the lock only briefly, without running Python code or waiting. The bindings
    /// hold the GIL meanwhile, so that Python never forks while the lock is held; a child must check
    /// [`Handle::is_ours`] first.
    pub fn answers(&self) -> MutexGuard<'_, Answers> {
        lock(&self.answers)
    }

    /// Returns the newest snapshot that a worker made in this epoch after at most `answers` of its answers. Returns
    /// `None` before the first snapshot, and after the end of the iterator. Fails with [`Error::Child`] in a forked
    /// child.
    pub fn snapshot(&self, worker: u32, answers: u64) -> Result<Option<Snapshot>> {
        self.check_ours()?;
        self.answers().snapshot(worker, answers)
    }

    /// Keeps a snapshot that has arrived.
    pub(super) fn keep(&self, incoming: Incoming) {
        self.answers().keep(&self.arena, incoming);
    }

    /// Returns a worker's status, or `None` for an unknown worker. After the end of the iterator, returns the final
    /// status, because another iterator may use the arena. Fails with [`Error::Child`] in a forked child.
    pub fn status(&self, worker: u32) -> Result<Option<Status>> {
        self.check_ours()?;
        let last = self.last();
        if let Some(last) = &*last {
            return Ok(last.get(worker as usize).copied());
        }
        let page = || &self.arena.control(worker).status;
        let exists = worker < self.arena.geometry().workers;
        Ok(exists.then(|| Status::of(page(), sys::clock::monotonic_ns())))
    }

    /// Returns the memory in use in the arena. All values are zero after the end of the iterator and in a forked child.
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
    fn a_slot_takes_one_process_after_another() {
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
    fn a_wait_does_not_spin_if_another_file_has_the_number_of_a_pidfd() {
        let handle = Handle::new(Arena::create_sized(1 << 30, 1, 4).unwrap()).unwrap();
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        handle.started(0, child.id() as i32).unwrap();
        let number = handle.process(0).unwrap().pidfd.as_ref().unwrap().as_fd().as_raw_fd();
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        // SAFETY: dup2 takes plain integers. The call replaces the pidfd.
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
        // SAFETY: an all-zero timespec is valid; the kernel fills it.
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
