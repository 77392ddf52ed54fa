//! The worker's end of a connection: an arena of its own for the worker's loop, and two threads that copy.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use super::counters;
use super::frame::{self, Head, Kind};
use super::inflow::Inflow;
use crate::config::{IDLE_SLICE, LINK_SILENCE, LINK_STACK, SMALL_MESSAGE, YIELD_FOR};
use crate::error::{Error, Result};
use crate::shm::alloc::Allocator;
use crate::shm::arena::Arena;
use crate::shm::block::CONSUMER;
use crate::shm::layout::Needs;
use crate::shm::ring::{Consumer, Producer};
use crate::shm::{doorbell, lease};
use crate::sync::{Ordering, lock};
use crate::sys;
use crate::sys::event::EventFd;
use crate::sys::poll::PollSet;
use crate::sys::socket::{Moved, Part, Socket};
use crate::wire::{self, MESSAGE_HEAD, ResultEntry, TaskEntry, TaskKind};

/// The only worker of the arena.
const WORKER: u32 = 0;
/// Parts of one call of `sendmsg`; Linux takes 1024.
const PARTS: usize = 512;

/// The worker's end of a connection.
#[derive(Debug)]
pub struct Remote {
    socket: Socket,
    arena: Arc<Arena>,
    /// Rung by the worker's port.
    bell: EventFd,
    ready: AtomicBool,
    finishing: AtomicBool,
    /// The connection has ended, or everything has been sent.
    over: Mutex<bool>,
    is_over: Condvar,
}

impl Remote {
    /// Serves the worker of a new arena over a connected socket. `ring_slots`: those of the main process's arena. `lost` runs in a
    /// thread when the connection ends before [`Remote::finish`], after the worker has been asked to leave; `killed` when the main
    /// process asks for the process's end.
    pub fn start(
        socket: OwnedFd,
        ring_slots: u32,
        lost: impl FnOnce() + Send + 'static,
        killed: impl Fn() + Send + 'static,
    ) -> Result<Arc<Self>> {
        let needs = Needs { workers: 1, outstanding: ring_slots, shared_queue: false, snapshots: true };
        let arena = Arena::create(needs)?;
        let remote = Arc::new(Self {
            socket: Socket::new(socket),
            arena,
            bell: EventFd::new()?,
            ready: AtomicBool::new(false),
            finishing: AtomicBool::new(false),
            over: Mutex::new(false),
            is_over: Condvar::new(),
        });
        remote.socket.keep_alive(LINK_SILENCE);
        let (sending, receiving) = (remote.clone(), remote.clone());
        spawn("rl_send", move || sending.send_all())?;
        spawn("rl_receive", move || {
            let _ = receiving.receive_all(&killed);
            receiving.leave();
            if !receiving.finishing.load(Ordering::Relaxed) {
                lost();
            }
        })?;
        Ok(remote)
    }

    /// The arena of the worker's port, which is worker 0 in it.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// A duplicate of the bell, for the worker's port.
    pub fn doorbell(&self) -> std::io::Result<OwnedFd> {
        self.bell.as_fd().try_clone_to_owned()
    }

    /// Tells the main process that the worker enters its loop.
    pub fn ready(&self) {
        self.ready.store(true, Ordering::Release);
        let _ = self.bell.ring();
    }

    /// Sends what the worker has published, then its end. Returns whether all was sent within `limit`.
    pub fn finish(&self, limit: Duration) -> bool {
        self.finishing.store(true, Ordering::Release);
        let _ = self.bell.ring();
        let over = lock(&self.over);
        let waited = self.is_over.wait_timeout_while(over, limit, |over| !*over);
        let all = waited.is_ok_and(|(over, _)| *over);
        self.socket.shut_down(std::net::Shutdown::Both);
        all
    }

    /// Makes the worker leave.
    fn leave(&self) {
        self.arena.header().stop.0.store(1, Ordering::Relaxed);
        let sleeper = self.arena.sleeper_of(WORKER);
        sleeper.ring_always();
        let _ = sys::futex::wake(&sleeper.bell, u32::MAX);
    }

    fn receive_all(&self, killed: &dyn Fn()) -> Result<()> {
        sys::signal::block_all_in_this_thread();
        let region = self.arena.geometry().main_region();
        let mut allocator = Allocator::new(self.arena.clone(), region);
        let mut tasks = Producer::new(self.arena.task_ring(WORKER));
        let mut inflow = Inflow::new();
        let mut rest = || self.socket.wait(true, false, None, None).map(drop);
        let most = self.arena.geometry().region_len;
        while let Some(head) = inflow.head(&self.socket, most, &mut rest)? {
            match head.kind {
                Kind::Task => {
                    let entry = self.take_in(head, &mut inflow, &mut allocator, &mut rest)?;
                    let full = || Error::corrupt("more tasks than may be outstanding");
                    tasks.push(&entry.to_words()).map_err(|_| full())?;
                    let sleeper = self.arena.sleeper_of(WORKER);
                    if sleeper.must_ring() {
                        let _ = sys::futex::wake(&sleeper.bell, u32::MAX);
                    }
                }
                Kind::Stop => self.leave(),
                Kind::Kill => killed(),
                kind => return Err(Error::corrupt(format!("the main process sends {kind:?}"))),
            }
        }
        Ok(())
    }

    /// Receives a task.
    fn take_in(
        &self,
        head: Head,
        inflow: &mut Inflow,
        allocator: &mut Allocator,
        rest: &mut impl FnMut() -> Result<()>,
    ) -> Result<TaskEntry> {
        let kind = TaskKind::of_number(head.count);
        let kind = kind.ok_or_else(|| Error::corrupt(format!("a task of kind {}", head.count)))?;
        let mut task = [0; 8];
        inflow.fill(&self.socket, &mut task, rest)?;
        let task = u64::from_le_bytes(task);
        let mut inline = [0; wire::INLINE_BYTES];
        if let Some(payload) = inline.get_mut(..head.len as usize) {
            inflow.fill(&self.socket, payload, rest)?;
            let entry = TaskEntry::inline(task, kind, payload);
            return entry.ok_or_else(|| Error::usage("a short payload is inline"));
        }
        if head.len <= SMALL_MESSAGE {
            allocator.trust(SMALL_MESSAGE);
        }
        let block = allocator.allocate(head.len, CONSUMER)?;
        let memory = self.arena.block_memory(allocator.region(), block, head.len)?.as_ptr();
        // SAFETY: the block has these bytes, and nothing else uses it yet.
        unsafe { inflow.read(&self.socket, memory, head.len as usize, rest)? };
        Ok(TaskEntry::in_block(task, kind, block, head.len))
    }

    /// The sending thread.
    fn send_all(&self) {
        sys::signal::block_all_in_this_thread();
        if self.send_published().is_err() {
            // The receiving thread finds the end, too.
            self.socket.shut_down(std::net::Shutdown::Both);
        }
        *lock(&self.over) = true;
        self.is_over.notify_all();
    }

    fn send_published(&self) -> Result<()> {
        let mut results = Consumer::new(self.arena.result_ring(WORKER));
        let mut poll = PollSet::new();
        poll.add(self.bell.as_fd().as_raw_fd(), 0)?;
        let (mut told, mut ready, mut fired) = (false, Vec::new(), Vec::new());
        loop {
            if !told && self.ready.load(Ordering::Acquire) {
                told = true;
                self.send(&[Part::new(&Head::bare(Kind::Ready).to_bytes())])?;
            }
            // Before the last look at the ring: what was published before `finish` is sent.
            let finishing = self.finishing.load(Ordering::Acquire);
            doorbell::take(&self.arena.bitmap()[0]);
            while let Some(words) = results.pop()? {
                self.send_result(&ResultEntry::from_words(&words)?, &mut ready)?;
            }
            if finishing {
                self.send(&[Part::new(&Head::bare(Kind::Left).to_bytes())])?;
                self.socket.shut_down(std::net::Shutdown::Write);
                return Ok(());
            }
            if !self.idles() {
                continue;
            }
            let sleeper = &self.arena.header().doorbell.0;
            sleeper.announce();
            let idle = self.arena.bitmap()[0].load(Ordering::Relaxed) == 0;
            let waited = if idle
                && !self.finishing.load(Ordering::Acquire)
                && told == self.ready.load(Ordering::Acquire)
            {
                poll.wait(Some(IDLE_SLICE), &mut fired).map(drop)
            } else {
                Ok(())
            };
            sleeper.awake();
            waited?;
            self.bell.drain()?;
        }
    }

    /// Yields for a moment, as the next result is often under way; false once there is one.
    fn idles(&self) -> bool {
        let start = sys::clock::monotonic();
        while sys::clock::monotonic() - start < YIELD_FOR {
            sys::clock::yield_now();
            if self.arena.bitmap()[0].load(Ordering::Relaxed) != 0 {
                return false;
            }
        }
        true
    }

    /// Sends a published result, and releases its blocks.
    fn send_result(&self, entry: &ResultEntry, head: &mut Vec<u8>) -> Result<()> {
        head.clear();
        let counted = counters::read(&self.arena.control(WORKER).status);
        let Some(block) = entry.block else {
            head.extend_from_slice(&Head::bare(Kind::Result).to_bytes());
            frame::put_words(head, &entry.to_words());
            frame::put_words(head, &counted);
            return self.send(&[Part::new(head)]);
        };
        let mut table = Vec::new();
        self.arena.read_block(WORKER, block, entry.len.min(MESSAGE_HEAD as u64), &mut table)?;
        let start = wire::payload_start(&table, entry.len)?;
        self.arena.read_block(WORKER, block, start, &mut table)?;
        let (leaves, _) = wire::read_message(&table)?;
        let payload = entry.len - start;
        let count = u32::try_from(leaves.len()).unwrap_or(u32::MAX);
        head.extend_from_slice(&Head { kind: Kind::Result, count, len: payload }.to_bytes());
        frame::put_words(head, &entry.to_words());
        frame::put_words(head, &counted);
        leaves.iter().for_each(|leaf| frame::put_words(head, &[leaf.len]));
        let message = self.arena.block_memory(WORKER, block, entry.len)?.as_ptr();
        // SAFETY: `payload` bytes of the block begin there, and it belongs to this thread until `let_go`.
        let payload = unsafe { Part::raw(message.add(start as usize), payload as usize) };
        let mut parts = vec![Part::new(head), payload];
        for leaf in &leaves {
            let memory = self.arena.block_memory(WORKER, leaf.block, leaf.len)?.as_ptr();
            // SAFETY: as above. An object of the worker may write into it at the same time, as it may with a local worker.
            parts.push(unsafe { Part::raw(memory, leaf.len as usize) });
        }
        let sent = parts.chunks(PARTS).try_for_each(|parts| self.send(parts));
        lease::let_go(&self.arena, WORKER, block);
        leaves.iter().for_each(|leaf| lease::let_go(&self.arena, WORKER, leaf.block));
        sent
    }

    /// Sends all of `parts`, waiting for room.
    fn send(&self, parts: &[Part<'_>]) -> Result<()> {
        let mut parts = parts.to_vec();
        let mut left = &mut parts[..];
        Part::advance(&mut left, 0);
        while !left.is_empty() {
            match self.socket.send(left)? {
                Moved::Bytes(count) => Part::advance(&mut left, count),
                Moved::Nothing | Moved::End => {
                    self.socket.wait(false, true, None, None)?;
                }
            }
        }
        Ok(())
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    sys::thread::spawn(name, LINK_STACK, work).map_err(|error| Error::Os {
        call: "pthread_create",
        errno: error.raw_os_error().unwrap_or(0),
        hint: "a worker on another machine takes two threads: raise `ulimit -u`".into(),
    })
}
