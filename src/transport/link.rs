//! The main process's end of a connection to a worker.
//!
//! Tasks are sent by whoever has queued one ([`Link::pump`]); a thread receives results. It sleeps on the socket and on an eventfd.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};

use super::counters;
use super::frame::{self, FIXED, Head, Kind};
use super::inflow::Inflow;
use super::outflow::Outflow;
use crate::config::{
    IDLE_SLICE, LINK_MEMORY_CHECK, LINK_MEMORY_WAIT, LINK_SILENCE, LINK_STACK, SMALL_MESSAGE,
};
use crate::error::{Error, Result};
use crate::shm::alloc::Allocator;
use crate::shm::arena::{Arena, ArenaRing};
use crate::shm::block::CONSUMER;
use crate::shm::layout::{StatusPage, WorkerState};
use crate::shm::ring::Producer;
use crate::shm::{doorbell, lease};
use crate::sync::{Ordering, lock};
use crate::sys;
use crate::sys::event::EventFd;
use crate::sys::socket::Socket;
use crate::wire::{self, Leaf, ResultEntry, ResultKind};

/// A connection to a worker.
#[derive(Debug)]
pub struct Link {
    socket: Socket,
    arena: Arc<Arena>,
    worker: u32,
    outflow: Mutex<Outflow>,
    /// The socket has no room: the thread sends the rest.
    blocked: AtomicBool,
    /// Rings the engine.
    doorbell: Arc<EventFd>,
    /// Wakes the thread.
    bell: EventFd,
    /// Readable once the connection has ended.
    end: EventFd,
    ended: AtomicBool,
    /// Why it ended, unless the worker has left.
    reason: Mutex<Option<String>>,
    received: AtomicU64,
}

impl Link {
    /// Serves worker `worker` of this process's arena over a connected socket, in a thread of its own. `doorbell` wakes the
    /// engine. The slot of the worker must be empty, as a process would find it at its start.
    pub fn start(
        arena: &Arc<Arena>,
        worker: u32,
        socket: OwnedFd,
        doorbell: Arc<EventFd>,
    ) -> Result<Arc<Self>> {
        let link = Arc::new(Self {
            socket: Socket::new(socket),
            arena: arena.clone(),
            worker,
            outflow: Mutex::new(Outflow::new(arena, worker)),
            blocked: AtomicBool::new(false),
            doorbell,
            bell: EventFd::new()?,
            end: EventFd::new()?,
            ended: AtomicBool::new(false),
            reason: Mutex::new(None),
            received: AtomicU64::new(0),
        });
        link.socket.keep_alive(LINK_SILENCE);
        counters::enter(link.page(), WorkerState::Starting, None, sys::clock::monotonic_ns());
        let serving = link.clone();
        let spawned = sys::thread::spawn("rl_link", LINK_STACK, move || serving.run());
        spawned.map_err(|error| Error::Os {
            call: "pthread_create",
            errno: error.raw_os_error().unwrap_or(0),
            hint: "each worker on another machine takes a thread: raise `ulimit -u`".into(),
        })?;
        Ok(link)
    }

    fn page(&self) -> &StatusPage {
        &self.arena.control(self.worker).status
    }

    /// Whether the connection has ended, and the thread no longer uses the arena.
    pub fn has_ended(&self) -> bool {
        // SYNC: link-ended (pairs with the Release in `run`).
        self.ended.load(Ordering::Acquire)
    }

    /// A descriptor that is readable once the connection has ended.
    pub fn end_fd(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }

    /// Why the connection has ended; `None` if the worker has left, and before the end.
    pub fn reason(&self) -> Option<String> {
        lock(&self.reason).clone()
    }

    /// Bytes received.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Whether another task of a shared queue may be sent.
    pub fn has_credit(&self) -> bool {
        !self.has_ended() && lock(&self.outflow).has_credit()
    }

    /// Makes the thread look at the rings and flags.
    pub fn wake(&self) {
        let _ = self.bell.ring();
    }

    /// Asks the worker's process to end at once.
    pub fn kill(&self) {
        lock(&self.outflow).put(Kind::Kill);
        self.pump();
    }

    /// Ends the connection.
    pub fn cut(&self, reason: &str) {
        lock(&self.reason).get_or_insert_with(|| reason.into());
        self.socket.shut_down(std::net::Shutdown::Both);
    }

    /// Sends what the rings have. What the socket has no room for is sent by the thread.
    pub fn pump(&self) {
        let mut outflow = lock(&self.outflow);
        if self.has_ended() {
            return;
        }
        let sent = outflow.take_up().and_then(|()| outflow.flush(&self.socket));
        self.blocked.store(matches!(sent, Ok(false)), Ordering::Relaxed);
        drop(outflow);
        match sent {
            Ok(true) => {}
            Ok(false) => self.wake(),
            Err(error) => self.cut(&error.to_string()),
        }
    }

    /// The thread.
    fn run(&self) {
        sys::signal::block_all_in_this_thread();
        sys::thread::set_name("rl_link");
        let (mut inflow, mut has_left) = (Inflow::new(), false);
        let served = self.serve(&mut inflow, &mut has_left);
        let reason = match served {
            // A reset is no news of a worker that has left.
            Ok(()) | Err(Error::Os { .. }) if has_left => None,
            Ok(()) => Some("the connection was closed".to_owned()),
            Err(error) => Some(error.to_string()),
        };
        if let Some(reason) = reason {
            lock(&self.reason).get_or_insert(reason);
        }
        self.socket.shut_down(std::net::Shutdown::Both);
        // The lock: nobody sends, or uses the rings, after this.
        let outflow = lock(&self.outflow);
        // SYNC: link-ended (pairs with the Acquire in `has_ended`).
        self.ended.store(true, Ordering::Release);
        drop(outflow);
        let _ = self.end.ring();
        let _ = self.doorbell.ring();
    }

    fn serve(&self, inflow: &mut Inflow, has_left: &mut bool) -> Result<()> {
        let mut allocator = Allocator::new(self.arena.clone(), self.worker);
        let mut results = Producer::new(self.arena.result_ring(self.worker));
        let most = self.arena.geometry().region_len;
        // What was queued before the thread began.
        self.pump();
        while let Some(head) = inflow.head(&self.socket, most, &mut || self.rest(Some(&mut allocator)))? {
            match head.kind {
                _ if *has_left => return Err(Error::corrupt("a frame after the worker's last one")),
                Kind::Ready => lock(&self.outflow).ready(),
                Kind::Result => self.take_in(head, inflow, &mut allocator, &mut results)?,
                Kind::Left => {
                    *has_left = true;
                    counters::enter(self.page(), WorkerState::Left, None, sys::clock::monotonic_ns());
                }
                Kind::Task | Kind::Stop | Kind::Kill => {
                    return Err(Error::corrupt(format!("a worker sends {:?}", head.kind)));
                }
            }
            self.received.store(inflow.total, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Sleeps until there is something to receive, or to send. An idle one trims the region.
    fn rest(&self, idle: Option<&mut Allocator>) -> Result<()> {
        let blocked = self.blocked.load(Ordering::Relaxed);
        let found = self.socket.wait(true, blocked, Some(self.bell.as_fd()), Some(IDLE_SLICE))?;
        if found.rung {
            self.bell.drain()?;
        }
        if found.rung || blocked {
            self.pump();
        }
        if let Some(allocator) = idle.filter(|_| !found.rung && !blocked && !found.readable) {
            allocator.trim(self.arena.budget(self.worker))?;
        }
        Ok(())
    }

    /// Receives a result into blocks of the worker's region, and publishes it.
    fn take_in(
        &self,
        head: Head,
        inflow: &mut Inflow,
        allocator: &mut Allocator,
        results: &mut Producer<ArenaRing>,
    ) -> Result<()> {
        let mut fixed = [0; FIXED];
        inflow.fill(&self.socket, &mut fixed, &mut || self.rest(None))?;
        let (words, counted) = frame::read_fixed(&fixed);
        let mut entry = ResultEntry::from_words(&words)?;
        self.check(&entry, head)?;
        let mut held = Held { link: self, blocks: Vec::new() };
        if entry.block.is_some() {
            let mut table = vec![0; head.count as usize * 8];
            inflow.fill(&self.socket, &mut table, &mut || self.rest(None))?;
            let lens: Vec<u64> = frame::words(&table).collect();
            let len = wire::message_len(lens.len(), head.len as usize);
            let sum = lens.iter().try_fold(len, |sum, len| sum.checked_add(*len));
            let region = self.arena.geometry().region_len;
            let bytes = sum.filter(|sum| *sum <= region).ok_or_else(|| {
                Error::corrupt(format!("a batch of {} leaves exceeds a region of {region} bytes", lens.len()))
            })?;
            let block = held.allocate(allocator, len)?;
            let mut leaves = Vec::with_capacity(lens.len());
            for len in lens {
                leaves.push(Leaf { block: held.allocate(allocator, len)?, len });
            }
            let mut rows = Vec::new();
            wire::message_head(leaves.iter(), &mut rows);
            let memory = self.arena.block_memory(self.worker, block, len)?.as_ptr();
            // SAFETY: the block has `len` bytes, which are the rows and the payload, and nothing else uses it yet.
            unsafe {
                std::ptr::copy_nonoverlapping(rows.as_ptr(), memory, rows.len());
                let payload = memory.add(rows.len());
                inflow.read(&self.socket, payload, head.len as usize, &mut || self.rest(None))?;
            }
            for leaf in &leaves {
                let memory = self.arena.block_memory(self.worker, leaf.block, leaf.len)?.as_ptr();
                let len = leaf.len as usize;
                // SAFETY: the block has these bytes, and nothing else uses it yet.
                unsafe { inflow.read(&self.socket, memory, len, &mut || self.rest(None))? };
            }
            (entry.block, entry.len, entry.load.bytes) = (Some(block), len, bytes);
        }
        counters::show(self.page(), &counted);
        let full =
            || Error::corrupt("a completion ring is full although it has room for all outstanding tasks");
        if !entry.kind.is_snapshot() {
            lock(&self.outflow).answered(&entry)?;
        }
        results.push(&entry.to_words()).map_err(|_| full())?;
        held.blocks.clear();
        doorbell::mark(self.arena.bitmap(), self.worker);
        // A snapshot but the first is followed by a result, which rings.
        if self.arena.header().doorbell.0.must_ring() {
            let _ = self.doorbell.ring();
        }
        if self.arena.queue_control().is_some() {
            self.pump();
        }
        Ok(())
    }

    fn check(&self, entry: &ResultEntry, head: Head) -> Result<()> {
        let fits = match entry.kind {
            ResultKind::Tied => false,
            ResultKind::Plain | ResultKind::Pickle => true,
            _ => head.count == 0,
        };
        match fits && (entry.block.is_some() || head.len == 0 && head.count == 0) {
            true => Ok(()),
            false => Err(Error::corrupt(format!(
                "a result of kind {:?} with {} leaves and {} bytes",
                entry.kind, head.count, head.len
            ))),
        }
    }
}

/// Blocks of a result that is not published yet.
struct Held<'a> {
    link: &'a Link,
    blocks: Vec<u32>,
}

impl Held<'_> {
    /// A block of `len` bytes. Waits while the consumer holds all memory.
    fn allocate(&mut self, allocator: &mut Allocator, len: u64) -> Result<u32> {
        if len <= SMALL_MESSAGE {
            allocator.trust(SMALL_MESSAGE);
        }
        let mut start = None;
        loop {
            match allocator.allocate(len, CONSUMER) {
                Ok(block) => {
                    self.blocks.push(block);
                    return Ok(block);
                }
                Err(error) => {
                    let now = sys::clock::monotonic();
                    let stops = self.link.arena.header().stop.0.load(Ordering::Relaxed) != 0;
                    if stops || now - *start.get_or_insert(now) >= LINK_MEMORY_WAIT {
                        return Err(error);
                    }
                }
            }
            std::thread::sleep(LINK_MEMORY_CHECK);
            self.link.pump();
        }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        for block in &self.blocks {
            lease::let_go(&self.link.arena, self.link.worker, *block);
        }
    }
}
