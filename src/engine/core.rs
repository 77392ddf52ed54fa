//! The engine of one iterator.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::completions::{self, Arrival};
use super::delivery::{self, Delivery};
use super::handle::Handle;
use super::inbox::Inbox;
use super::liveness::Liveness;
use super::outbox::Outbox;
use super::process::Process;
use super::times::Times;
use super::types::{Progress, Step};
use super::{page, pin};
use crate::error::{Error, Result};
use crate::id::{TaskId, WorkerId};
use crate::metrics::Count;
use crate::scheduler::{Action, Death, Dispatch, Event, Placement, Scheduler, Settings};
use crate::shm::arena::Arena;
use crate::shm::layout::{Needs, PINNING, REMOTE};
use crate::shm::pool;
use crate::trace::{Kind, MAIN};
use crate::wire::TaskKind;

/// One iterator's engine. `T` is the type of the caller's tag on a task. `B` is the type of a batch that was prepared
/// before its delivery, either by the pin thread or because its result was tied. `E` is the type of the sampler's
/// errors.
#[derive(Debug)]
pub struct Engine<T, B: Send + 'static = (), E = ()> {
    pub(super) handle: Arc<Handle>,
    pub(super) scheduler: Scheduler<T, Arrival<B>>,
    pub(super) delivery: Delivery<T, B, E>,
    pub(super) outbox: Outbox,
    pub(super) inbox: Inbox<B>,
    pub(super) liveness: Liveness,
    pub(super) times: Times,
    /// True if each worker begins an epoch with a snapshot.
    pub(super) snapshots: bool,
    pub(super) finished: bool,
}

impl<T, B: Send + 'static, E> Engine<T, B, E> {
    /// Creates an engine without workers, over an arena from the pool. With `snapshots`, each worker begins an epoch
    /// with a snapshot.
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

    /// Creates an engine without workers or snapshots, over a given arena.
    pub fn over(arena: Arc<Arena>, settings: Settings) -> Result<Self> {
        if arena.geometry().shared_queue != (settings.dispatch == Dispatch::SharedQueue) {
            return Err(Error::usage("an arena must have a shared queue if and only if the dispatch uses one"));
        }
        let handle = Arc::new(Handle::new(arena.clone())?);
        page::open(&arena, &settings);
        Ok(Self {
            inbox: Inbox::new(handle.clone())?,
            outbox: Outbox::new(handle.clone()),
            liveness: Liveness::new(handle.clone(), settings.restarts),
            times: Times::new(arena, handle.meter.clone(), handle.trace.clone()),
            handle,
            delivery: Delivery::new(settings.fills()),
            scheduler: Scheduler::new(settings)?,
            snapshots: false,
            finished: false,
        })
    }

    /// Returns the part of the engine that any thread may use without exclusive access.
    pub fn handle(&self) -> &Arc<Handle> {
        &self.handle
    }

    /// Returns the arena.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.handle.arena
    }

    /// Publishes the loader's name in the arena, for `rustloader top`.
    pub fn show_name(&self, name: &str) {
        self.handle.arena.header().main.set_name(name);
    }

    /// Returns the limit on outstanding tasks.
    pub fn max_tasks(&self) -> usize {
        self.scheduler.max_tasks()
    }

    /// Makes the round-robin cycle of this epoch begin with `worker`; see [`Scheduler::begin_with`]. Call it before the
    /// epoch's first task is submitted.
    pub fn begin_with(&mut self, worker: u32) -> Result<()> {
        self.mark_epoch();
        self.scheduler.begin_with(WorkerId(worker))
    }

    /// Records the start of the epoch in the trace.
    pub(super) fn mark_epoch(&self) {
        let (task, epoch) = (self.scheduler.first_task().0, self.handle.meter.get(Count::Epochs));
        self.handle.trace.mark(Kind::Epoch, MAIN, task, epoch);
    }

    /// Returns true if another index batch must be submitted at the start of an epoch, after the sampler has been asked
    /// for `asked` index batches.
    pub fn primes(&self, asked: usize) -> bool {
        self.scheduler.primes(asked)
    }

    /// Reports to the scheduler that the sampler has ended.
    pub fn sampler_ended(&mut self) -> Result<()> {
        self.event(Event::SamplerEnded)
    }

    /// Starts the pin thread, which runs `around`; `around` must call [`pin::Body::run`]. Call it after all workers
    /// have started.
    pub fn start_pinning<P: pin::Prepare<Ready = B>>(
        &mut self,
        prepare: P,
        around: impl FnOnce(pin::Body<P>) -> std::result::Result<(), String> + Send + 'static,
    ) -> Result<()> {
        let results = if self.snapshots { 2 * self.max_tasks() } else { self.max_tasks() };
        self.inbox.start_pinning(prepare, results, self.liveness.restarts(), around)?;
        self.times.show_option(PINNING);
        Ok(())
    }

    /// Returns the progress of the epoch.
    pub fn progress(&self) -> Progress {
        let scheduler = &self.scheduler;
        let first = scheduler.first_task().0;
        let holder = |task| self.outbox.queue().and_then(|queue| queue.holder(task));
        let undelivered: Vec<(u64, Option<u32>)> = scheduler
            .undelivered()
            .into_iter()
            .map(|(task, worker)| (task.0 - first, worker.map(|worker| worker.0).or_else(|| holder(task))))
            .collect();
        let load = |worker| match self.outbox.queue() {
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

    /// Returns, for each worker, whether it takes tasks in this epoch.
    pub fn active(&self) -> Vec<bool> {
        (0..self.arena().geometry().workers).map(|worker| self.scheduler.is_active(WorkerId(worker))).collect()
    }

    /// Returns a worker's oldest unanswered task, with its tag. With a shared queue, this is the oldest task that the
    /// worker holds; if there is none, the oldest that was bound to it after a death; otherwise, the oldest that waits
    /// in the queue.
    pub fn oldest_task_of(&self, worker: u32) -> Option<(TaskId, &T)> {
        let Some(queue) = self.outbox.queue() else { return self.scheduler.oldest_task_of(WorkerId(worker)) };
        let tagged = |task| self.scheduler.tag_of(task).map(|tag| (task, tag));
        let bound = || self.scheduler.oldest_task_of(WorkerId(worker));
        let held = queue.held_by(worker).and_then(tagged);
        held.or_else(bound).or_else(|| queue.oldest_waiting().and_then(tagged))
    }

    /// Returns the tag of `task`, which `worker` is processing, or `None` if the task has been answered. It need not be
    /// the worker's oldest unanswered task, because the pin thread may still hold results of older ones.
    pub fn tag_at(&self, worker: u32, task: TaskId) -> Option<&T> {
        let bound = || self.scheduler.tasks_of(WorkerId(worker)).find(|(bound, _)| *bound == task);
        self.scheduler.tag_of(task).or_else(|| bound().map(|(_, tag)| tag))
    }

    /// Registers the process of a newly started worker. If it replaces a process that has died, the unanswered tasks of
    /// that process are sent again.
    pub fn started(&mut self, worker: u32, pid: i32) -> Result<()> {
        let (process, token) = self.handle.started(worker, pid)?;
        self.registered(worker, &process, token)
    }

    /// Registers a newly started worker on another machine, which is connected through `socket`. `pid` is the ID of its
    /// process on that machine. Otherwise like [`Engine::started`].
    pub fn attached(&mut self, worker: u32, socket: OwnedFd, pid: i32) -> Result<()> {
        let (process, token) = self.handle.attached(worker, socket, pid)?;
        self.times.show_option(REMOTE);
        self.registered(worker, &process, token)
    }

    fn registered(&mut self, worker: u32, process: &Process, token: u64) -> Result<()> {
        let is_vacant = self.scheduler.is_vacant(WorkerId(worker));
        // The call does not fail if a replacement process cannot be added to the poll set: the loader then checks at
        // intervals whether the process has ended.
        self.inbox.watch(worker, process, token, is_vacant)?;
        if is_vacant { self.replaced(worker) } else { Ok(()) }
    }

    /// Submits an encoded index batch: sends it to the worker that the scheduler picks, or puts it into the shared
    /// queue. If the worker is being replaced, [`Engine::resend`] sends the task later. If no worker can take the task,
    /// drops the tag, as torch does, and returns `None`. Does not wait for memory; see
    /// [`retry_while_reserved`](crate::shm::alloc::retry_while_reserved).
    pub fn submit(&mut self, tag: T, kind: TaskKind, payload: &[u8]) -> Result<Option<TaskId>> {
        // A sampler or a signal handler may have forked during `next`.
        self.handle.check_ours()?;
        if self.finished {
            return Err(Error::usage("an iterator that has ended takes no tasks"));
        }
        // Allocate the block first: nothing may fail after the scheduler has counted the task.
        let mut entry = self.outbox.entry(kind, payload)?;
        let Ok((task, placement)) = self.scheduler.submit(tag) else {
            self.outbox.release_payload(&entry);
            return Ok(None);
        };
        entry.task = task.0;
        let pushed = match placement {
            Placement::Worker(worker) => self.outbox.push(worker.0, &entry),
            Placement::Queue => self.outbox.push_shared(&entry),
            Placement::Later => {
                self.outbox.release_payload(&entry);
                Ok(())
            }
        };
        self.sticky(pushed)?;
        Ok(Some(task))
    }

    /// Begins another epoch of persistent workers, and sends them `message`. Afterwards, call [`Engine::step`] until
    /// [`Engine::resuming`] returns false. A worker that has not yet answered the previous reset gets `message` once it
    /// has.
    pub fn reset(&mut self, message: &[u8]) -> Result<()> {
        self.times.tick();
        let rewinds = self.scheduler.is_early();
        self.event(Event::EpochReset)?;
        self.handle.answers().begin_epoch();
        self.liveness.begin_epoch();
        let first_task = self.scheduler.first_task().0;
        self.outbox.begin_epoch(first_task, message, rewinds);
        self.times.show_epoch(first_task);
        let result = self.perform_actions();
        self.sticky(result)
    }

    /// Returns the state of `next`, to which the caller reports events.
    #[inline]
    pub fn delivery(&mut self) -> &mut Delivery<T, B, E> {
        &mut self.delivery
    }

    /// Returns the death that [`Engine::step`] reports as [`Step::Dead`], now or later.
    pub fn death(&self) -> Option<Death> {
        self.scheduler.death()
    }

    /// Returns true until all workers have answered [`Engine::reset`].
    pub fn resuming(&self) -> bool {
        self.scheduler.resuming()
    }

    #[inline]
    pub(super) fn event(&mut self, event: Event<Arrival<B>>) -> Result<()> {
        self.scheduler.on_event(self.times.now(), event)
    }

    /// Processes new events, and returns the step that [`Delivery::answer`] chooses.
    pub fn step(&mut self) -> Result<Step<T, B, E>> {
        self.handle.check_ours()?;
        // Once the iterator is closed, its rings may belong to another iterator.
        let closed = self.handle.closing();
        // A staged result is delivered first, and no event can change it.
        if !closed && !self.scheduler.is_staged() && !self.delivery.is_broken() {
            self.process_events()?;
        }
        let scheduler = &mut self.scheduler;
        let step = self.delivery.answer(closed, |may_ask| scheduler.next(may_ask))?;
        if let Step::Deliver { incoming, .. } = &step {
            let ordinal = incoming.entry.task - self.scheduler.first_task().0;
            self.handle.answers().positions.answered(ordinal, incoming.worker, incoming.is_batch());
            self.times.delivers(incoming.entry.task);
        }
        if matches!(step, Step::Wait(_)) && self.delivery.begins_to_wait() {
            self.event(Event::WaitBegan)?;
            return Ok(Step::Wait(self.scheduler.deadline()));
        }
        Ok(step)
    }

    /// Processes new events. Errors found in shared memory are not returned here, but by [`Delivery::answer`].
    #[inline]
    pub(super) fn process_events(&mut self) -> Result<()> {
        self.times.tick_if_stale();
        let polled = self.inbox.poll_if_due(self.times.now())?;
        let result = if polled { self.handle_ready() } else { Ok(()) };
        let result = result.and_then(|()| self.take_in());
        if self.sticky(result).is_ok() && !self.delivery.is_tied() {
            self.event(Event::Time)?;
        }
        Ok(())
    }

    /// Returns `result`. An error is also stored, so that every later [`Engine::step`] returns it, because the state of
    /// the shared memory is unknown after an error.
    pub(super) fn sticky<R>(&mut self, result: Result<R>) -> Result<R> {
        result.inspect_err(|error| self.delivery.on_event(delivery::Event::Broken(error.clone())))
    }

    #[inline]
    pub(super) fn perform_actions(&mut self) -> Result<()> {
        while let Some(action) = self.scheduler.poll() {
            match action {
                Action::Retire(worker) => self.outbox.control(worker.0, TaskKind::Leave, &[])?,
                Action::Resume(worker) => self.outbox.resume(worker.0)?,
                Action::Withdraw(task) => {
                    if self.outbox.withdraw(task)? {
                        self.event(Event::Withdrawn(task))?;
                    }
                }
                Action::Discard { result: Some(Arrival { incoming, ready: None }), .. } => {
                    completions::discard(&self.handle.arena, &incoming);
                }
                // Either the worker's dataset ended before the task, or the task belongs to an earlier epoch. (After
                // the end of the iterator, outstanding tasks are discarded as well.)
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
}
