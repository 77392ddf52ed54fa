//! The engine: turns the scheduler's actions into effects, and what happens outside into its events.
//!
//! Without pinning no thread of its own runs in the main process: whoever calls `next` drains the completion rings, and
//! when nothing is there waits on the doorbell, the workers' pidfds and the time left, all in one call. The
//! consumer's ends ([`Completions`]) are a value of their own, so that a pin thread can own them instead.

pub mod completions;
pub mod hands;

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use self::completions::Completions;
pub use self::completions::Incoming;
pub use self::hands::{Hands, SLICE};
use crate::error::{Error, Result};
use crate::id::{TaskId, WorkerId};
use crate::scheduler::{Action, Event, Scheduler, Settings, Step as Decision};
use crate::shm::alloc::Allocator;
use crate::shm::arena::{Arena, ArenaRing};
use crate::shm::block::CONSUMER;
use crate::shm::pool;
use crate::shm::ring::Producer;
use crate::sync::Ordering;
use crate::sys;
use crate::sys::poll::WaitOutcome;
use crate::wire::{ResultKind, TaskEntry, TaskKind};

/// The doorbell's token in the poll set; the workers' are their numbers.
const DOORBELL: u64 = u64::MAX;

/// So often a `next` that never waits looks for ended workers.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// For so long a waiting `next` lets others run before it goes to sleep.
const YIELD_FOR: Duration = Duration::from_micros(20);

/// Bytes of an index batch that is sent whatever the machine's headroom is.
const SMALL_INDEX: u64 = 64 << 10;

/// What `next` has to do now.
#[derive(Debug)]
pub enum Step<T, O = ()> {
    /// Hand out a batch, or raise the error that stands in its place.
    Deliver {
        /// The task's tag.
        tag: T,
        /// The result.
        incoming: Incoming,
    },
    /// The same with a result that was opened when it came.
    DeliverOpened {
        /// The task's tag.
        tag: T,
        /// What [`Engine::opened`] was given.
        opened: O,
    },
    /// Open a result that has just come ([`ResultKind::Tied`]), and give it to [`Engine::opened`].
    Open(Incoming),
    /// Submit one more index, and ask again.
    Submit,
    /// Raise the death of a worker.
    Dead {
        /// The worker.
        worker: u32,
        /// The first task that was lost with it.
        lost: Option<TaskId>,
    },
    /// The epoch is at its end.
    End,
    /// The timeout has expired; nothing is lost.
    TimedOut,
    /// Nothing yet: wait, until this time at the most.
    Wait(Option<Duration>),
    /// Somebody has shut the iterator down.
    Closed,
}

/// A result that waits for its turn.
#[derive(Debug)]
enum Arrived<O> {
    /// As it came.
    Closed(Incoming),
    /// Opened on receipt.
    Opened(O),
}

/// Where an epoch stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Tasks sent.
    pub sent: u64,
    /// Tasks without a result.
    pub outstanding: usize,
    /// Tasks not delivered, by worker.
    pub loads: Vec<usize>,
    /// The number in the epoch and the worker of each task that was not delivered, in the order of their numbers.
    pub undelivered: Vec<(u64, u32)>,
}

/// One iterator's engine. `T` is what the caller keeps of each task until its result is delivered, `O` what it makes of a
/// result that has to be opened on receipt.
#[derive(Debug)]
pub struct Engine<T, O = ()> {
    hands: Arc<Hands>,
    scheduler: Scheduler<T, Arrived<O>>,
    /// A result that the caller is to open before any other is taken.
    tied: Option<Incoming>,
    tasks: Vec<Producer<ArenaRing>>,
    completions: Completions,
    /// The main process's region, which index batches travel in.
    allocator: Allocator,
    poll: sys::poll::PollSet,
    ready: Vec<u64>,
    /// Workers without a pidfd: looked at in each slice.
    unwatched: Vec<u32>,
    /// A worker has written nonsense: the iterator cannot go on, and says so at each call.
    broken: Option<Error>,
    /// When ended workers were last looked for.
    looked: Duration,
    /// The clock of the timeout runs for this `next`.
    waiting: bool,
    finished: bool,
}

impl<T, O> Engine<T, O> {
    /// An engine over an arena from the pool, without workers yet.
    pub fn new(settings: Settings) -> Result<Self> {
        let outstanding = settings.prefetch_factor.saturating_mul(settings.workers);
        let limit = |value: usize| u32::try_from(value).map_err(|_| Error::usage(format!("{value} tasks")));
        let arena = pool::take(limit(settings.workers)?, limit(outstanding)?)?;
        Self::over(arena, settings)
    }

    /// An engine over a given arena.
    pub fn over(arena: Arc<Arena>, settings: Settings) -> Result<Self> {
        let hands = Arc::new(Hands::new(arena.clone())?);
        let workers = arena.geometry().workers;
        let mut poll = sys::poll::PollSet::new();
        poll.add(hands.doorbell.as_fd().as_raw_fd(), DOORBELL)?;
        Ok(Self {
            hands,
            scheduler: Scheduler::new(settings)?,
            tied: None,
            tasks: (0..workers).map(|worker| Producer::new(arena.task_ring(worker))).collect(),
            completions: Completions::new(&arena),
            allocator: Allocator::new(arena.clone(), arena.geometry().main_region()),
            poll,
            ready: Vec::new(),
            unwatched: Vec::new(),
            broken: None,
            looked: Duration::ZERO,
            waiting: false,
            finished: false,
        })
    }

    /// What may be used without the turn.
    pub fn hands(&self) -> &Arc<Hands> {
        &self.hands
    }

    /// The arena.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.hands.arena
    }

    /// Tasks that may be outstanding, and so the number of submissions that begin an epoch.
    pub fn max_tasks(&self) -> usize {
        self.scheduler.max_tasks()
    }

    /// Where the epoch stands.
    pub fn progress(&self) -> Progress {
        let scheduler = &self.scheduler;
        let first = scheduler.first_task().0;
        Progress {
            sent: scheduler.dispatched(),
            outstanding: scheduler.outstanding(),
            loads: (0..self.arena().geometry().workers)
                .map(|worker| scheduler.load_of(WorkerId(worker)))
                .collect(),
            undelivered: scheduler
                .undelivered()
                .into_iter()
                .map(|(task, worker)| (task.0 - first, worker.0))
                .collect(),
        }
    }

    /// Whether each worker takes tasks in this epoch.
    pub fn active(&self) -> Vec<bool> {
        (0..self.arena().geometry().workers)
            .map(|worker| self.scheduler.is_active(WorkerId(worker)))
            .collect()
    }

    /// The first task that a worker has not answered.
    pub fn oldest_task_of(&self, worker: u32) -> Option<(TaskId, &T)> {
        self.scheduler.oldest_task_of(WorkerId(worker))
    }

    /// Takes note of a worker that has just been started.
    pub fn started(&mut self, worker: u32, pid: i32) -> Result<()> {
        self.hands.started(worker, pid)?;
        match self.hands.process(worker).and_then(|process| process.pidfd.as_ref()) {
            Some(pidfd) => self.poll.add(pidfd.as_fd().as_raw_fd(), u64::from(worker))?,
            None => self.unwatched.push(worker),
        }
        Ok(())
    }

    /// Sends an index batch, encoded, to the worker whose turn it is. `None`: no worker takes tasks any more, and the
    /// tag is dropped, as in torch.
    pub fn submit(&mut self, tag: T, kind: TaskKind, payload: &[u8]) -> Result<Option<TaskId>> {
        // A sampler, or a signal handler, may have forked in the midst of `next`.
        self.hands.check_ours()?;
        // The block first: after the scheduler has counted the task nothing may fail any more.
        let mut entry = match TaskEntry::inline(0, kind, payload) {
            Some(entry) => entry,
            None => {
                let len = payload.len() as u64;
                if len <= SMALL_INDEX {
                    self.allocator.trust(SMALL_INDEX);
                }
                let block = self.allocator.allocate(len, CONSUMER)?;
                let memory = self.arena().block_memory(self.allocator.region(), block, len)?;
                // SAFETY: the block has `len` bytes and is ours until it is published.
                unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), memory.as_ptr(), payload.len()) };
                TaskEntry::in_block(0, kind, block, len)
            }
        };
        let Ok((task, worker)) = self.scheduler.submit(tag) else {
            if let Some(block) = entry.block {
                self.arena().release(self.allocator.region(), block, CONSUMER);
            }
            return Ok(None);
        };
        entry.task = task.0;
        let pushed = self.push(worker.0, &entry);
        self.sticky(pushed)?;
        Ok(Some(task))
    }

    fn push(&mut self, worker: u32, entry: &TaskEntry) -> Result<()> {
        let pushed = self.tasks[worker as usize].push(&entry.to_words());
        pushed.map_err(|_| Error::usage("a submission ring is full although it has room for all tasks"))?;
        self.hands.wake(worker)
    }

    /// A new epoch of persistent workers. Ask [`Engine::step`] until [`Engine::resuming`] is false.
    pub fn reset(&mut self) -> Result<()> {
        self.event(Event::EpochReset)?;
        let result = self.effects();
        self.sticky(result)
    }

    /// Whether workers have still to answer to [`Engine::reset`].
    pub fn resuming(&self) -> bool {
        self.scheduler.resuming()
    }

    fn event(&mut self, event: Event<Arrived<O>>) -> Result<()> {
        self.scheduler.on_event(sys::clock::monotonic(), event)
    }

    /// Looks what has come, and says what to do now.
    pub fn step(&mut self) -> Result<Step<T, O>> {
        self.hands.check_ours()?;
        if self.hands.closing() {
            return Ok(Step::Closed);
        }
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        let looked = self.look_for_deaths()?;
        let result = if looked { self.take_notice() } else { Ok(()) };
        let result = result.and_then(|()| self.take_in());
        self.sticky(result)?;
        if let Some(incoming) = self.tied {
            return Ok(Step::Open(incoming));
        }
        self.event(Event::Time)?;
        let step = match self.scheduler.next() {
            Decision::Deliver { tag, result, .. } | Decision::Raise { tag, result, .. } => match result {
                Arrived::Closed(incoming) => Step::Deliver { tag, incoming },
                Arrived::Opened(opened) => Step::DeliverOpened { tag, opened },
            },
            Decision::Submit => Step::Submit,
            Decision::Dead(death) => Step::Dead { worker: death.worker.0, lost: death.lost },
            Decision::End => Step::End,
            Decision::TimedOut => Step::TimedOut,
            Decision::Shutdown => Step::Closed,
            Decision::Wait { deadline } if self.waiting => return Ok(Step::Wait(deadline)),
            Decision::Wait { .. } => {
                self.waiting = true;
                self.event(Event::WaitBegan)?;
                return Ok(Step::Wait(self.scheduler.deadline()));
            }
        };
        self.waiting = false;
        Ok(step)
    }

    /// An error after which the state of things is not known: from now on each call answers it.
    fn sticky<R>(&mut self, result: Result<R>) -> Result<R> {
        result.inspect_err(|error| self.broken = Some(error.clone()))
    }

    /// Looks for ended workers now and then also when results come so fast that nobody ever waits; says whether it did.
    fn look_for_deaths(&mut self) -> Result<bool> {
        let now = sys::clock::monotonic();
        if now - self.looked < LOOK_EVERY {
            return Ok(false);
        }
        self.looked = now;
        self.ready.clear();
        self.poll.wait(Some(Duration::ZERO), &mut self.ready)?;
        Ok(true)
    }

    /// The caller gives up waiting without an answer: the clock of the timeout starts anew at the next call.
    pub fn interrupted(&mut self) {
        self.waiting = false;
    }

    /// Drains the marked rings into the scheduler and carries out what it wants. It stops at a result that is tied to its
    /// worker: that the worker may leave stands behind it in the same ring.
    fn take_in(&mut self) -> Result<()> {
        while self.tied.is_none()
            && let Some((_, incoming)) = self.completions.next(&self.hands.arena)?
        {
            if incoming.entry.kind == ResultKind::Tied {
                self.tied = Some(incoming);
            } else {
                self.completed(&incoming, Arrived::Closed(incoming))?;
            }
        }
        self.effects()
    }

    /// Takes what the caller has made of the result of [`Step::Open`].
    pub fn opened(&mut self, opened: O) -> Result<()> {
        let incoming = self.tied.take().ok_or_else(|| Error::usage("no result was to be opened"))?;
        let result = self.completed(&incoming, Arrived::Opened(opened)).and_then(|()| self.effects());
        self.sticky(result)
    }

    fn completed(&mut self, incoming: &Incoming, result: Arrived<O>) -> Result<()> {
        let (worker, task) = (WorkerId(incoming.worker), TaskId(incoming.entry.task));
        self.event(match incoming.entry.kind {
            ResultKind::Plain | ResultKind::Pickle | ResultKind::Tied => {
                Event::Completed { worker, task, result }
            }
            ResultKind::Error => Event::Failed { worker, task, result },
            ResultKind::Exhausted => Event::Exhausted { worker, task },
            ResultKind::Resumed => Event::Resumed { worker },
        })
    }

    fn effects(&mut self) -> Result<()> {
        while let Some(action) = self.scheduler.poll() {
            match action {
                Action::Retire { worker } => self.control(worker.0, TaskKind::Leave)?,
                Action::Resume { worker } => self.control(worker.0, TaskKind::Resume)?,
                Action::Discard { result: Some(Arrived::Closed(incoming)), .. } => {
                    self.completions.discard(&self.hands.arena, &incoming);
                }
                Action::Discard { .. } => {}
            }
        }
        Ok(())
    }

    fn control(&mut self, worker: u32, kind: TaskKind) -> Result<()> {
        match TaskEntry::inline(0, kind, &[]) {
            Some(entry) => self.push(worker, &entry),
            None => Ok(()),
        }
    }

    /// Waits for something to happen: a result, a death, a signal, somebody who shuts the iterator down; at most until
    /// `deadline` and at most one slice. To be called without the GIL.
    pub fn wait(&mut self, deadline: Option<Duration>) -> Result<()> {
        self.ready.clear();
        let start = sys::clock::monotonic();
        loop {
            sys::clock::yield_now();
            if self.completions.marked(&self.hands.arena) {
                return Ok(());
            }
            if sys::clock::monotonic() - start > YIELD_FOR {
                break;
            }
        }
        let sleeper = &self.hands.arena.header().doorbell.0;
        sleeper.announce();
        if self.completions.marked(&self.hands.arena) || self.hands.closing() {
            sleeper.awake();
            return Ok(());
        }
        let limit = deadline.map_or(SLICE, |deadline| deadline.saturating_sub(start).min(SLICE));
        let limit = if self.unwatched.is_empty() { limit } else { limit.min(Duration::from_millis(20)) };
        let outcome = self.poll.wait(Some(limit), &mut self.ready);
        sleeper.awake();
        match outcome? {
            WaitOutcome::Interrupted | WaitOutcome::TimedOut => pool::trim(),
            WaitOutcome::Ready => {}
        }
        Ok(())
    }

    /// What the last wait has found: the doorbell's count is taken, ended workers are reported to the scheduler.
    /// To be called after signals have been looked for: a worker that left because of the user's Ctrl-C is no news.
    pub fn after_wait(&mut self) -> Result<()> {
        self.looked = sys::clock::monotonic();
        let result = self.take_notice();
        self.sticky(result)
    }

    fn take_notice(&mut self) -> Result<()> {
        let ready = std::mem::take(&mut self.ready);
        for &token in &ready {
            if token == DOORBELL {
                self.hands.doorbell.drain()?;
            } else {
                self.poll.remove(token)?;
                self.ended(token as u32)?;
            }
        }
        self.ready = ready;
        let ended = |worker: &mut u32| self.hands.process(*worker).is_some_and(hands::Process::has_exited);
        let gone: Vec<u32> = self.unwatched.extract_if(.., ended).collect();
        gone.into_iter().try_for_each(|worker| self.ended(worker))
    }

    /// A worker's process has ended: what it had published counts, then the scheduler decides what its end means.
    fn ended(&mut self, worker: u32) -> Result<()> {
        if let Some(incoming) = self.tied.take_if(|tied| tied.worker == worker) {
            self.completed(&incoming, Arrived::Closed(incoming))?;
        }
        while let Some(incoming) = self.completions.pop(worker)? {
            self.completed(&incoming, Arrived::Closed(incoming))?;
        }
        self.event(Event::WorkerDied { worker: WorkerId(worker) })?;
        self.effects()
    }

    /// Ends the engine after its workers have ended, and gives back what nobody will read. What is left to do with the arena
    /// ([`Ending::carry_out`]) takes its time and needs nothing of the engine.
    pub fn finish(&mut self) -> Ending {
        if std::mem::replace(&mut self.finished, true) || !self.hands.is_ours() {
            return Ending::Nothing;
        }
        let arena = self.arena().clone();
        if self.broken.is_some() || !self.hands.all_left() {
            return Ending::Retire(arena);
        }
        if let Some(incoming) = self.tied.take() {
            self.completions.discard(&arena, &incoming);
        }
        for worker in 0..arena.geometry().workers {
            loop {
                match self.completions.pop(worker) {
                    Ok(Some(incoming)) => self.completions.discard(&arena, &incoming),
                    Ok(None) => break,
                    Err(_) => return Ending::Retire(arena),
                }
            }
        }
        match self.event(Event::Shutdown).and_then(|()| self.effects()) {
            Ok(()) => Ending::Pool(arena),
            Err(_) => Ending::Retire(arena),
        }
    }
}

/// What becomes of an arena after its iterator.
#[derive(Debug)]
pub enum Ending {
    /// Somebody else has seen to it.
    Nothing,
    /// The next iterator may have it.
    Pool(Arc<Arena>),
    /// Nobody is to use it again.
    Retire(Arc<Arena>),
}

impl Ending {
    /// Puts the arena into the pool or gives its pages back; to be called without the GIL.
    pub fn carry_out(self) {
        match self {
            Self::Nothing => {}
            Self::Pool(arena) => pool::put(arena),
            Self::Retire(arena) => arena.retire(),
        }
    }
}

impl<T, O> Drop for Engine<T, O> {
    fn drop(&mut self) {
        if self.hands.is_ours() && !self.finished {
            // The workers, if there are any, have been told to leave; their results are nobody's.
            self.hands.arena.header().stop.0.store(1, Ordering::Release);
            self.arena().retire();
        }
    }
}
