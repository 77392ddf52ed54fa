//! The engine: performs the scheduler's actions, and reports events to it.
//!
//! Without pinning the engine has no thread in the main process: `next` drains the completion rings, and waits on the doorbell
//! and the workers' pidfds in one call. With pinning a thread owns the consumer's ends ([`Completions`]) and passes prepared
//! batches to `next` (`pin.rs`).

mod answers;
pub mod completions;
pub mod delivery;
pub mod gate;
pub mod handle;
mod intake;
mod links;
pub mod overdue;
mod page;
pub mod pin;
pub mod position;
mod process;
mod queue;
mod restart;
mod shutdown;
pub mod snapshots;
pub mod stall;
mod status;
mod types;
mod wait;
mod watch;

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

pub use self::answers::Answers;
pub use self::completions::Incoming;
use self::completions::{Arrival, Completions};
use self::delivery::Delivery;
pub use self::handle::Handle;
use self::intake::Intake;
use self::process::Process;
use self::queue::SharedQueue;
use self::restart::Remains;
pub use self::shutdown::Ending;
use self::stall::Stalls;
pub use self::status::Status;
pub use self::types::{DeathReport, Progress, Step};
use self::watch::Watch;
use crate::config::SMALL_MESSAGE;
use crate::error::{Error, Result};
use crate::id::{TaskId, WorkerId};
use crate::scheduler::{Action, Death, Dispatch, Event, Placement, Scheduler, Settings};
use crate::shm::alloc::Allocator;
use crate::shm::arena::{Arena, ArenaRing};
use crate::shm::block::CONSUMER;
use crate::shm::layout::{Needs, PINNING, REMOTE};
use crate::shm::pool;
use crate::shm::ring::Producer;
use crate::sys;
use crate::wire::{self, TaskEntry, TaskKind};

/// The doorbell's token in the poll set; those of the workers are made by [`Handle::started`].
const DOORBELL: u64 = u64::MAX;

/// One iterator's engine. `T` is the caller's tag of a task, `B` a batch prepared before its delivery (by the pin thread, or
/// because it was tied), `E` an error of the sampler.
#[derive(Debug)]
pub struct Engine<T, B: Send + 'static = (), E = ()> {
    handle: Arc<Handle>,
    scheduler: Scheduler<T, Arrival<B>>,
    delivery: Delivery<T, B, E>,
    /// The workers' rings: tasks, or only control messages if there is a queue.
    tasks: Vec<Producer<ArenaRing>>,
    /// The queue that the workers share, if they do.
    queue: Option<SharedQueue>,
    /// `None` only while it changes, and in a forked child.
    intake: Option<Intake<B>>,
    /// The main process's region, for index batches.
    allocator: Allocator,
    poll: sys::poll::PollSet,
    /// Tokens that the last poll returned.
    ready: Vec<u64>,
    /// Workers without a pidfd, checked in each slice.
    unwatched: Vec<u32>,
    /// The doorbell cannot be polled: results are checked in each slice.
    deaf: bool,
    /// The time of the last clock read, one per step.
    now: Duration,
    watch: Watch,
    /// Time of the last check for dead workers.
    looked: Duration,
    stalls: Stalls,
    /// Payload of the message that begins the epoch in the workers.
    epoch: Vec<u8>,
    /// Each worker begins an epoch with a snapshot.
    snapshots: bool,
    /// Workers that die may be replaced.
    restarts: bool,
    /// Results of this epoch of each worker, if `restarts`.
    answered: Box<[u64]>,
    /// What is known of the vacant workers' last processes.
    remains: BTreeMap<u32, Remains>,
    finished: bool,
}

impl<T, B: Send + 'static, E> Engine<T, B, E> {
    /// An engine over an arena from the pool, without workers yet. `snapshots`: they send snapshots, too.
    pub fn new(settings: Settings, snapshots: bool) -> Result<Self> {
        let outstanding = settings.max_tasks();
        let limit = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let shared_queue = settings.dispatch == Dispatch::SharedQueue;
        let (workers, outstanding) = (limit(settings.workers), limit(outstanding));
        let arena = pool::take(Needs { workers, outstanding, shared_queue, snapshots })?;
        let mut engine = Self::over(arena, settings)?;
        engine.snapshots = snapshots;
        Ok(engine)
    }

    /// An engine over a given arena.
    pub fn over(arena: Arc<Arena>, settings: Settings) -> Result<Self> {
        if arena.geometry().shared_queue != (settings.dispatch == Dispatch::SharedQueue) {
            return Err(Error::usage("a shared queue needs an arena with one, and no other dispatch does"));
        }
        let handle = Arc::new(Handle::new(arena.clone())?);
        let workers = arena.geometry().workers;
        page::open(&arena, &settings);
        let restarts = settings.restarts;
        let mut poll = sys::poll::PollSet::new();
        poll.add(handle.doorbell.as_fd().as_raw_fd(), DOORBELL)?;
        Ok(Self {
            queue: SharedQueue::of(&handle),
            handle,
            delivery: Delivery::new(settings.fills()),
            scheduler: Scheduler::new(settings)?,
            tasks: (0..workers).map(|worker| Producer::new(arena.task_ring(worker))).collect(),
            intake: Some(Intake::Rings(Completions::new(&arena))),
            allocator: Allocator::new(arena.clone(), arena.geometry().main_region()),
            poll,
            ready: Vec::new(),
            unwatched: Vec::new(),
            deaf: false,
            now: Duration::ZERO,
            watch: Watch::default(),
            looked: Duration::ZERO,
            stalls: Stalls::new(workers),
            epoch: Vec::new(),
            snapshots: false,
            restarts,
            answered: vec![0; workers as usize].into(),
            remains: BTreeMap::new(),
            finished: false,
        })
    }

    /// The part that needs no exclusive access.
    pub fn handle(&self) -> &Arc<Handle> {
        &self.handle
    }

    /// The arena.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.handle.arena
    }

    /// Limit of outstanding tasks.
    pub fn max_tasks(&self) -> usize {
        self.scheduler.max_tasks()
    }

    /// Lets the cycle of this epoch begin with a worker, before the epoch's first task: [`Scheduler::begin_with`].
    pub fn begin_with(&mut self, worker: u32) -> Result<()> {
        self.scheduler.begin_with(WorkerId(worker))
    }

    /// Whether the start of an epoch submits one more index after it has asked the sampler for `asked`.
    pub fn primes(&self, asked: usize) -> bool {
        self.scheduler.primes(asked)
    }

    /// Reports that the sampler has ended.
    pub fn sampler_ended(&mut self) -> Result<()> {
        self.event(Event::SamplerEnded)
    }

    /// Starts the pin thread, after all workers. `around` runs the thread's body.
    pub fn start_pinning<P: pin::Prepare<Ready = B>>(
        &mut self,
        prepare: P,
        around: impl FnOnce(pin::Body<P>) -> std::result::Result<(), String> + Send + 'static,
    ) -> Result<()> {
        let Some(Intake::Rings(completions)) =
            self.intake.take_if(|intake| matches!(intake, Intake::Rings(_)))
        else {
            return Err(Error::usage("a second pin thread"));
        };
        let results = if self.snapshots { 2 * self.max_tasks() } else { self.max_tasks() };
        let link = pin::start(prepare, &self.handle, completions, results, self.restarts, around)?;
        // Before any failure: the thread owns the rings now.
        let link = match self.intake.insert(Intake::Thread(link)) {
            Intake::Thread(link) => link,
            Intake::Rings(_) => unreachable!("it has just been inserted"),
        };
        self.poll.remove(DOORBELL)?;
        self.poll.add(link.control.pickup.as_fd().as_raw_fd(), DOORBELL)?;
        self.show_option(PINNING);
        Ok(())
    }

    /// The progress of the epoch.
    pub fn progress(&self) -> Progress {
        let scheduler = &self.scheduler;
        let first = scheduler.first_task().0;
        let holder = |task| self.queue.as_ref().and_then(|queue| queue.holder(task));
        let undelivered: Vec<(u64, Option<u32>)> = scheduler
            .undelivered()
            .into_iter()
            .map(|(task, worker)| (task.0 - first, worker.map(|worker| worker.0).or_else(|| holder(task))))
            .collect();
        let load = |worker| match &self.queue {
            Some(_) => undelivered.iter().filter(|(_, by)| *by == Some(worker)).count(),
            None => scheduler.load_of(WorkerId(worker)),
        };
        Progress {
            sent: scheduler.dispatched(),
            outstanding: scheduler.outstanding(),
            loads: (0..self.arena().geometry().workers).map(load).collect(),
            undelivered,
        }
    }

    /// Whether each worker takes tasks in this epoch.
    pub fn active(&self) -> Vec<bool> {
        (0..self.arena().geometry().workers)
            .map(|worker| self.scheduler.is_active(WorkerId(worker)))
            .collect()
    }

    /// A worker's first unanswered task. Of a shared queue, the oldest task that it holds, or else the oldest that waits.
    pub fn oldest_task_of(&self, worker: u32) -> Option<(TaskId, &T)> {
        let Some(queue) = &self.queue else { return self.scheduler.oldest_task_of(WorkerId(worker)) };
        let tagged = |task| self.scheduler.tag_of(task).map(|tag| (task, tag));
        let bound = || self.scheduler.oldest_task_of(WorkerId(worker));
        let held = queue.held_by(worker).and_then(tagged);
        held.or_else(bound).or_else(|| queue.oldest_waiting().and_then(tagged))
    }

    /// The tag of an unanswered task that a worker is at. It may have answered older ones, which the pin thread holds.
    pub fn tag_at(&self, worker: u32, task: TaskId) -> Option<&T> {
        let bound = || self.scheduler.tasks_of(WorkerId(worker)).find(|(bound, _)| *bound == task);
        self.scheduler.tag_of(task).or_else(|| bound().map(|(_, tag)| tag))
    }

    /// Registers a newly started worker. If it takes the place of one that has died, its tasks are sent again.
    pub fn started(&mut self, worker: u32, pid: i32) -> Result<()> {
        let (process, token) = self.handle.started(worker, pid)?;
        self.registered(worker, &process, token)
    }

    /// Registers a worker on another machine by the connection to it, where `pid` is its process there; otherwise as
    /// [`Engine::started`].
    pub fn attached(&mut self, worker: u32, socket: OwnedFd, pid: i32) -> Result<()> {
        let (process, token) = self.handle.attached(worker, socket, pid)?;
        self.show_option(REMOTE);
        self.registered(worker, &process, token)
    }

    fn registered(&mut self, worker: u32, process: &Process, token: u64) -> Result<()> {
        let is_vacant = self.scheduler.is_vacant(WorkerId(worker));
        match process.end_fd() {
            Some(end) => match self.poll.add(end.as_raw_fd(), token) {
                // The loader goes on, and finds the process's end without the poll set.
                Err(_) if is_vacant => self.unwatched.push(worker),
                added => added?,
            },
            None => self.unwatched.push(worker),
        }
        if is_vacant { self.replaced(worker) } else { Ok(()) }
    }

    /// Sends an encoded index batch to the next worker. `None` if no worker takes tasks: drops the tag, as torch does. Does not
    /// wait for memory, see [`settle`](crate::shm::alloc::settle).
    pub fn submit(&mut self, tag: T, kind: TaskKind, payload: &[u8]) -> Result<Option<TaskId>> {
        // A sampler or a signal handler may have forked during `next`.
        self.handle.check_ours()?;
        if self.finished {
            return Err(Error::usage("an iterator that has ended takes no tasks"));
        }
        // The block first: nothing may fail after the scheduler has counted the task.
        let mut entry = self.entry(kind, payload)?;
        let Ok((task, placement)) = self.scheduler.submit(tag) else {
            self.release_payload(&entry);
            return Ok(None);
        };
        entry.task = task.0;
        let pushed = match placement {
            Placement::Worker(worker) => self.push(worker.0, &entry),
            Placement::Queue => self.push_shared(&entry),
            Placement::Later => {
                self.release_payload(&entry);
                Ok(())
            }
        };
        self.sticky(pushed)?;
        Ok(Some(task))
    }

    /// Releases the payload of an entry that is not sent.
    fn release_payload(&self, entry: &TaskEntry) {
        if let Some(block) = entry.block {
            self.arena().release(self.allocator.region(), block, CONSUMER);
        }
    }

    fn push_shared(&mut self, entry: &TaskEntry) -> Result<()> {
        match &mut self.queue {
            Some(queue) => queue.push(entry)?,
            None => unreachable!("the scheduler and the arena have a shared queue, or neither"),
        }
        self.handle.wake_one()
    }

    /// An entry with its payload, inline or in a block. Does not wait for memory.
    fn entry(&mut self, kind: TaskKind, payload: &[u8]) -> Result<TaskEntry> {
        if let Some(entry) = TaskEntry::inline(0, kind, payload) {
            return Ok(entry);
        }
        let len = payload.len() as u64;
        if len <= SMALL_MESSAGE {
            self.allocator.trust(SMALL_MESSAGE);
        }
        let block = self.allocator.allocate(len, CONSUMER)?;
        let memory = self.arena().block_memory(self.allocator.region(), block, len)?;
        // SAFETY: the block has `len` bytes and belongs to this process until it is published.
        unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), memory.as_ptr(), payload.len()) };
        Ok(TaskEntry::in_block(0, kind, block, len))
    }

    fn push(&mut self, worker: u32, entry: &TaskEntry) -> Result<()> {
        let pushed = self.tasks[worker as usize].push(&entry.to_words());
        pushed.map_err(|_| Error::corrupt("a submission ring is full although it has room for all tasks"))?;
        self.handle.wake(worker)
    }

    /// Begins another epoch of persistent workers, which get `message`. Call [`Engine::step`] until [`Engine::resuming`] is
    /// false. A worker that has not answered the last reset gets this message after its answer.
    pub fn reset(&mut self, message: &[u8]) -> Result<()> {
        self.tick();
        self.event(Event::EpochReset)?;
        self.handle.answers().begin_epoch();
        self.answered.fill(0);
        self.epoch = wire::epoch_payload(self.scheduler.first_task().0, message);
        self.show_epoch();
        let result = self.effects();
        self.sticky(result)
    }

    /// The state of `next`, which takes the caller's events.
    #[inline]
    pub fn delivery(&mut self) -> &mut Delivery<T, B, E> {
        &mut self.delivery
    }

    /// The death that [`Engine::step`] raises, now or later.
    pub fn death(&self) -> Option<Death> {
        self.scheduler.death()
    }

    /// Whether workers have not answered [`Engine::reset`] yet.
    pub fn resuming(&self) -> bool {
        self.scheduler.resuming()
    }

    #[inline]
    fn event(&mut self, event: Event<Arrival<B>>) -> Result<()> {
        self.scheduler.on_event(self.now, event)
    }

    #[inline]
    fn tick(&mut self) {
        self.now = sys::clock::monotonic();
    }

    /// Processes new events, and returns the next step: [`Delivery::answer`].
    pub fn step(&mut self) -> Result<Step<T, B, E>> {
        self.handle.check_ours()?;
        // After the end the rings may belong to another iterator.
        let closed = self.handle.closing();
        // No event changes a staged result.
        if !closed && !self.scheduler.is_staged() && !self.delivery.is_broken() {
            self.look()?;
        }
        let scheduler = &mut self.scheduler;
        let step = self.delivery.answer(closed, |may_ask| scheduler.next(may_ask))?;
        if let Step::Deliver { incoming, .. } = &step {
            let ordinal = incoming.entry.task - self.scheduler.first_task().0;
            self.handle.answers().positions.answered(ordinal, incoming.worker, incoming.is_batch());
        }
        if matches!(step, Step::Wait(_)) && self.delivery.begins_to_wait() {
            self.event(Event::WaitBegan)?;
            return Ok(Step::Wait(self.scheduler.deadline()));
        }
        Ok(step)
    }

    /// Processes new events. [`Delivery::answer`] returns errors found here.
    #[inline]
    fn look(&mut self) -> Result<()> {
        if !self.watch.take_fresh() {
            self.tick();
        }
        let looked = self.look_for_deaths()?;
        let result = if looked { self.take_notice() } else { Ok(()) };
        let result = result.and_then(|()| self.take_in());
        if self.sticky(result).is_ok() && !self.delivery.is_tied() {
            self.event(Event::Time)?;
        }
        Ok(())
    }

    /// Makes every later call return the error, because the state is unknown after it.
    fn sticky<R>(&mut self, result: Result<R>) -> Result<R> {
        result.inspect_err(|error| self.delivery.on_event(delivery::Event::Broken(error.clone())))
    }

    #[inline]
    fn effects(&mut self) -> Result<()> {
        while let Some(action) = self.scheduler.poll() {
            match action {
                Action::Retire(worker) => self.control(worker.0, TaskKind::Leave, &[])?,
                Action::Resume(worker) => {
                    let payload = std::mem::take(&mut self.epoch);
                    let sent = self.control(worker.0, TaskKind::Resume, &payload);
                    self.epoch = payload;
                    sent?;
                }
                Action::Withdraw(task) => self.withdraw(task)?,
                Action::Discard { result: Some(Arrival { incoming, ready: None }), .. } => {
                    completions::discard(&self.handle.arena, &incoming);
                }
                // An exhausted worker leaves it out, or it is a task of an earlier epoch. The end discards what is outstanding.
                Action::Discard { task, result: None, .. } if !self.finished => {
                    if let Some(ordinal) = task.0.checked_sub(self.scheduler.first_task().0) {
                        self.handle.answers().positions.left_out(ordinal);
                    }
                }
                Action::Discard { .. } => {}
            }
        }
        Ok(())
    }

    fn control(&mut self, worker: u32, kind: TaskKind, payload: &[u8]) -> Result<()> {
        let entry = self.entry(kind, payload)?;
        self.push(worker, &entry)
    }
}
