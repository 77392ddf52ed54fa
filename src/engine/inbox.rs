//! Arrivals from the workers: results from the rings or the pin thread, wake-ups by the doorbell, and exits of
//! processes.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use super::completions::Completions;
use super::handle::{DOORBELL, Handle};
use super::pin;
use super::process::Process;
use crate::config::{BLIND_SLICE, DEATH_CHECK};
use crate::error::{Error, Result};
use crate::shm::layout::Sleeper;
use crate::sys::event::EventFd;
use crate::sys::poll::{PollSet, WaitOutcome};

/// The source of results.
#[derive(Debug)]
pub(super) enum Source<B> {
    Rings(Completions),
    Thread(pin::PinLink<B>),
}

/// The source of results, and the descriptors that `next` polls while it sleeps.
#[derive(Debug)]
pub(super) struct Inbox<B> {
    handle: Arc<Handle>,
    /// The source of results. `None` only while it is being replaced, and in a forked child.
    source: Option<Source<B>>,
    poll: PollSet,
    /// Tokens that the last poll returned.
    ready: Vec<u64>,
    /// Workers whose exit cannot be polled; they are checked after each slice of a wait instead.
    unwatched: Vec<u32>,
    /// True if the doorbell cannot be polled; `next` then checks for results after each slice of a wait.
    is_deaf: bool,
    /// The time of the last poll for dead workers.
    last_poll: Duration,
}

impl<B: Send + 'static> Inbox<B> {
    pub(super) fn new(handle: Arc<Handle>) -> Result<Self> {
        let mut poll = PollSet::new();
        poll.add(handle.doorbell.as_fd().as_raw_fd(), DOORBELL)?;
        Ok(Self {
            source: Some(Source::Rings(Completions::new(&handle.arena))),
            handle,
            poll,
            ready: Vec::new(),
            unwatched: Vec::new(),
            is_deaf: false,
            last_poll: Duration::ZERO,
        })
    }

    /// Starts the pin thread, which owns the rings from then on. See [`pin::start`] for the arguments.
    pub(super) fn start_pinning<P: pin::Prepare<Ready = B>>(
        &mut self,
        prepare: P,
        results: usize,
        restarts: bool,
        around: impl FnOnce(pin::Body<P>) -> std::result::Result<(), String> + Send + 'static,
    ) -> Result<()> {
        let Some(Source::Rings(completions)) = self.source.take_if(|source| matches!(source, Source::Rings(_))) else {
            return Err(Error::usage("the iterator already has a pin thread"));
        };
        let link = pin::start(prepare, &self.handle, completions, results, restarts, around)?;
        // Store the link before anything else can fail: the thread owns the rings now.
        let link = match self.source.insert(Source::Thread(link)) {
            Source::Thread(link) => link,
            Source::Rings(_) => unreachable!("the link has just been inserted"),
        };
        self.poll.remove(DOORBELL)?;
        self.poll.add(link.control.pickup.as_fd().as_raw_fd(), DOORBELL)
    }

    /// Returns the rings. Returns `None` if a pin thread owns them.
    #[inline]
    pub(super) fn rings(&mut self) -> Option<&mut Completions> {
        match &mut self.source {
            Some(Source::Rings(completions)) => Some(completions),
            _ => None,
        }
    }

    /// Returns true if `next` itself takes the results from the rings, because no pin thread owns them.
    pub(super) fn has_rings(&self) -> bool {
        matches!(self.source, Some(Source::Rings(_)))
    }

    /// Returns the channels to and from the pin thread, if there is one.
    #[inline]
    pub(super) fn link(&self) -> Option<&pin::PinLink<B>> {
        match &self.source {
            Some(Source::Thread(link)) => Some(link),
            _ => None,
        }
    }

    /// Forgets the source without dropping it. Call it in a forked child, because the parent's pin thread may have held
    /// the channel's locks at the fork.
    pub(super) fn forget_source(&mut self) {
        std::mem::forget(self.source.take());
    }

    /// Returns true if a result, or an event of the pin thread, has arrived.
    #[inline]
    pub(super) fn has_arrivals(&self) -> bool {
        match &self.source {
            Some(Source::Rings(completions)) => completions.marked(&self.handle.arena),
            Some(Source::Thread(link)) => !link.events.is_empty(),
            None => false,
        }
    }

    /// Makes later sleeps end when a worker's process ends. If the process has no descriptor to poll, it is checked
    /// after each slice instead; with `may_be_blind`, so is a process whose descriptor cannot be added to the poll set.
    pub(super) fn watch(&mut self, worker: u32, process: &Process, token: u64, may_be_blind: bool) -> Result<()> {
        match process.end_fd() {
            Some(end) => match self.poll.add(end.as_raw_fd(), token) {
                Err(_) if may_be_blind => self.unwatched.push(worker),
                added => added?,
            },
            None => self.unwatched.push(worker),
        }
        Ok(())
    }

    /// Makes later sleeps ignore the end of a worker's process.
    pub(super) fn unwatch(&mut self, worker: u32) -> Result<()> {
        if let Some(watched) = self.unwatched.iter().position(|unwatched| *unwatched == worker) {
            self.unwatched.swap_remove(watched);
            return Ok(());
        }
        self.poll.remove(self.handle.token_of(worker))
    }

    /// Returns the time of the last poll for dead workers.
    pub(super) fn last_poll(&self) -> Duration {
        self.last_poll
    }

    /// Polls for dead workers, at most once per [`DEATH_CHECK`]. Returns true if it polled; then [`Inbox::take_ready`]
    /// returns the tokens.
    #[inline]
    pub(super) fn poll_if_due(&mut self, now: Duration) -> Result<bool> {
        if now - self.last_poll < DEATH_CHECK {
            return Ok(false);
        }
        self.last_poll = now;
        self.ready.clear();
        self.poll.wait(Some(Duration::ZERO), &mut self.ready)?;
        Ok(true)
    }

    /// Prepares for a wait: drops the tokens of the last poll.
    pub(super) fn wait_begins(&mut self) {
        self.ready.clear();
    }

    /// Sleeps until something arrives, for at most `limit`. Returns `None` without sleeping if something has already
    /// arrived or the iterator is shut down.
    pub(super) fn sleep(&mut self, limit: Duration) -> Result<Option<WaitOutcome>> {
        let sleeper = self.sleeper();
        sleeper.announce();
        if self.has_arrivals() || self.handle.closing() {
            sleeper.awake();
            return Ok(None);
        }
        let limit = if self.is_blind() { limit.min(BLIND_SLICE) } else { limit };
        let outcome = self.poll.wait(Some(limit), &mut self.ready);
        self.sleeper().awake();
        outcome.map(Some)
    }

    /// Returns true if some arrivals do not end a sleep, so that sleeps must be short.
    pub(super) fn is_blind(&self) -> bool {
        self.is_deaf || !self.unwatched.is_empty()
    }

    fn sleeper(&self) -> &Sleeper {
        match &self.source {
            Some(Source::Thread(link)) => &link.control.sleeper,
            _ => &self.handle.arena.header().doorbell.0,
        }
    }

    /// Records that a wait ended at `now`. The wait counts as a poll for dead workers.
    pub(super) fn wait_ends(&mut self, now: Duration) {
        self.last_poll = now;
    }

    /// Takes the tokens that the last poll returned. Pass each to [`Inbox::ended_by`], and give the list back with
    /// [`Inbox::put_ready`].
    pub(super) fn take_ready(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.ready)
    }

    /// Takes back the list from [`Inbox::take_ready`], so that the next poll reuses its memory.
    pub(super) fn put_ready(&mut self, ready: Vec<u64>) {
        self.ready = ready;
    }

    /// Handles a token of a poll: drains the doorbell, or returns the worker whose process has ended.
    pub(super) fn ended_by(&mut self, token: u64) -> Result<Option<u32>> {
        if token == DOORBELL {
            if !self.bell().drain()? {
                // The doorbell was closed, and its number now belongs to another file, which may always be readable.
                self.poll.remove(DOORBELL)?;
                self.is_deaf = true;
            }
            return Ok(None);
        }
        let Some((worker, process)) = self.handle.named_by(token) else { return Ok(None) };
        self.poll.remove(token)?;
        if process.has_exited() {
            return Ok(Some(worker));
        }
        // The pidfd was closed, and its number now belongs to another file.
        self.unwatched.push(worker);
        Ok(None)
    }

    fn bell(&self) -> &EventFd {
        match &self.source {
            Some(Source::Thread(link)) => &link.control.pickup,
            _ => &self.handle.doorbell,
        }
    }

    /// Returns the unwatched workers that have ended, and stops checking them.
    pub(super) fn unwatched_ends(&mut self) -> Vec<u32> {
        let ended = |worker: &mut u32| self.handle.process(*worker).is_some_and(|it| it.has_exited());
        self.unwatched.extract_if(.., ended).collect()
    }
}
