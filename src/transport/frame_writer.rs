//! The sending side of a link, which moves tasks from the rings to the socket, and keeps track of the tasks that have
//! not been answered.

use std::collections::VecDeque;
use std::sync::Arc;

use super::counters;
use super::frame::{Head, Kind};
use crate::config::LINK_CREDIT;
use crate::error::{Error, Result};
use crate::shm::arena::{Arena, ArenaQueue, ArenaRing};
use crate::shm::layout::WorkerState;
use crate::shm::lease;
use crate::shm::queue::Claimer;
use crate::shm::ring::Consumer;
use crate::sync::Ordering;
use crate::sys;
use crate::sys::socket::{Part, Socket, Transfer};
use crate::wire::{ResultEntry, ResultKind, TaskEntry, TaskKind};

/// The sending side, with the tasks that have been taken from the rings but not answered.
#[derive(Debug)]
pub(super) struct FrameWriter {
    arena: Arc<Arena>,
    worker: u32,
    tasks: Consumer<ArenaRing>,
    queue: Option<Claimer<ArenaQueue>>,
    /// Tasks that have been taken but not answered, the oldest first.
    unanswered: VecDeque<(u64, TaskKind)>,
    /// True if the worker's iterable dataset has ended. The worker then answers no tasks until the next epoch.
    exhausted: bool,
    /// True if the worker has entered its loop.
    ready: bool,
    /// Bytes to send.
    out: Vec<u8>,
    payload: Vec<u8>,
    stop_sent: bool,
}

impl FrameWriter {
    pub(super) fn new(arena: &Arc<Arena>, worker: u32) -> Self {
        Self {
            tasks: Consumer::new(arena.task_ring(worker)),
            queue: arena.queue().map(|queue| Claimer::new(queue, worker)),
            arena: arena.clone(),
            worker,
            unanswered: VecDeque::new(),
            exhausted: false,
            ready: false,
            out: Vec::new(),
            payload: Vec::new(),
            stop_sent: false,
        }
    }

    /// Returns true if another task may be taken from a shared queue. A worker that is not ready takes no tasks:
    /// another worker, already idle, could start them sooner.
    pub(super) fn has_credit(&self) -> bool {
        self.ready && self.outstanding() < LINK_CREDIT
    }

    /// Returns the number of tasks that have been taken but not answered.
    pub(super) fn outstanding(&self) -> usize {
        self.unanswered.len()
    }

    /// Queues a frame without a body.
    pub(super) fn put(&mut self, kind: Kind) {
        self.out.extend_from_slice(&Head::bare(kind).to_bytes());
    }

    /// Notes that the worker is entering its loop.
    pub(super) fn on_ready(&mut self) {
        self.ready = true;
        self.publish_status();
    }

    /// Takes entries from the rings, and queues their frames. When the loader shuts down, asks the worker to stop
    /// instead.
    pub(super) fn queue_tasks(&mut self) -> Result<()> {
        if self.arena.header().stop.0.load(Ordering::Relaxed) != 0 {
            if !std::mem::replace(&mut self.stop_sent, true) {
                self.put(Kind::Stop);
            }
            return Ok(());
        }
        while let Some(entry) = self.next()? {
            self.put_task(&entry)?;
        }
        Ok(())
    }

    /// Returns the next entry: first from the worker's own ring, which has the control messages, then from the shared
    /// queue.
    fn next(&mut self) -> Result<Option<TaskEntry>> {
        let own = self.tasks.pop()?;
        let credit = self.has_credit();
        let words = match &mut self.queue {
            Some(queue) if own.is_none() && credit => queue.claim()?.map(|(_, entry)| entry),
            _ => own,
        };
        words.map(|words| TaskEntry::from_words(&words)).transpose()
    }

    fn put_task(&mut self, entry: &TaskEntry) -> Result<()> {
        if let Some(block) = entry.block {
            let region = self.arena.geometry().main_region();
            let copied = self.arena.read_block(region, block, entry.len, &mut self.payload);
            lease::let_go(&self.arena, region, block);
            copied?;
        }
        let payload = match entry.block {
            Some(_) => &self.payload[..],
            None => &entry.inline[..entry.len as usize],
        };
        let head = Head { kind: Kind::Task, count: entry.kind as u32, len: entry.len };
        self.out.extend_from_slice(&head.to_bytes());
        self.out.extend_from_slice(&entry.task.to_le_bytes());
        self.out.extend_from_slice(payload);
        if entry.kind != TaskKind::Leave {
            self.unanswered.push_back((entry.task, entry.kind));
            if self.unanswered.len() == 1 {
                self.publish_status();
            }
        }
        Ok(())
    }

    /// Sends the queued bytes. Returns false if the socket has no room for all of them.
    pub(super) fn flush(&mut self, socket: &Socket) -> Result<bool> {
        let mut sent = 0;
        while sent < self.out.len() {
            match socket.send(&[Part::new(&self.out[sent..])])? {
                Transfer::Bytes(count) => sent += count,
                Transfer::Nothing | Transfer::End => break,
            }
        }
        self.out.drain(..sent);
        Ok(self.out.is_empty())
    }

    /// Stores the worker's current state and task in the status page, as far as the link knows them.
    fn publish_status(&self) {
        let (state, task) = match self.unanswered.front() {
            _ if !self.ready => return,
            Some((_, kind)) if kind.begins_epoch() => (WorkerState::Starting, None),
            Some((task, _)) if !self.exhausted => (WorkerState::Fetch, Some(*task)),
            _ => (WorkerState::Idle, None),
        };
        let page = &self.arena.control(self.worker).status;
        // The page already has the task if a `Sample` frame for it arrived before the answer to the previous task.
        let is_stored = task == Some(page.task.load(Ordering::Relaxed));
        if !is_stored || page.state() != state as u32 {
            counters::enter(page, state, task, sys::clock::monotonic_ns());
        }
    }

    /// Acts on a `Sample` frame. `words` contains the task, then the sample's index within its index batch, plus 1, or
    /// 0 if none is in progress. The frame may arrive before the answers to earlier tasks.
    pub(super) fn on_sample(&self, mut words: impl Iterator<Item = u64>) {
        let (Some(task), Some(place)) = (words.next(), words.next()) else { return };
        let is_this_task = |(unanswered, kind): &(u64, TaskKind)| *unanswered == task && *kind != TaskKind::Resume;
        if !self.ready || self.exhausted || !self.unanswered.iter().any(is_this_task) {
            return;
        }
        let page = &self.arena.control(self.worker).status;
        if page.task.load(Ordering::Relaxed) != task {
            counters::enter(page, WorkerState::Fetch, Some(task), sys::clock::monotonic_ns());
        }
        page.place.store(place, Ordering::Relaxed);
    }

    /// Notes an answer. Returns [`Error::Connection`] unless it is for the oldest unanswered task.
    pub(super) fn on_answer(&mut self, entry: &ResultEntry) -> Result<()> {
        let is_resume = entry.kind == ResultKind::Resumed;
        if is_resume && std::mem::take(&mut self.exhausted) {
            // Tasks that were sent after the end of the dataset get no answers.
            while self.unanswered.front().is_some_and(|(_, kind)| *kind != TaskKind::Resume) {
                self.unanswered.pop_front();
            }
        }
        let oldest = self.unanswered.pop_front();
        let fits = oldest.is_some_and(|(task, kind)| match kind {
            TaskKind::Resume => is_resume,
            _ => !is_resume && task == entry.task,
        });
        if !fits {
            return Err(Error::connection(format!(
                "a worker answered task {} with {:?}, but its oldest unanswered task was {oldest:?}",
                entry.task, entry.kind
            )));
        }
        self.exhausted |= entry.kind == ResultKind::Exhausted;
        self.publish_status();
        Ok(())
    }
}
