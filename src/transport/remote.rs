//! The worker's end of a connection, which has its own arena for the worker's loop.
//!
//! The worker's thread itself receives while it waits for a task ([`Remote::wait`]), and sends small results
//! ([`Remote::send_now`]), because handing them over to another thread takes longer than sending most small batches.
//! Two threads do the remaining work: one sends large results and those for which the socket has no room, and the other
//! receives while the worker makes a batch.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use super::counters;
use super::frame::{self, Head, Kind};
use super::frame_reader::{Arrived, FrameReader};
use crate::config::{IDLE_SLICE, LINK_AT_ONCE, LINK_SILENCE, LINK_STACK, LINK_TICK, SMALL_MESSAGE, YIELD_FOR};
use crate::error::{Error, Result};
use crate::shm::alloc::Allocator;
use crate::shm::arena::{Arena, ArenaRing};
use crate::shm::block::CONSUMER;
use crate::shm::layout::{Geometry, Needs};
use crate::shm::ring::{Consumer, Producer};
use crate::shm::{doorbell, lease};
use crate::sync::{Ordering, lock, try_lock};
use crate::sys;
use crate::sys::event::EventFd;
use crate::sys::poll::PollSet;
use crate::sys::socket::{Part, Socket, Transfer};
use crate::wire::{self, LEAF_COUNT_BYTES, Leaf, ResultEntry, TaskEntry, TaskKind};

/// The ID of the arena's only worker.
const WORKER: u32 = 0;
/// Maximum number of parts in one call of `sendmsg`; Linux allows 1024.
const PARTS: usize = 512;

/// The worker's end of a connection.
#[derive(Debug)]
pub struct Remote {
    socket: Socket,
    arena: Arc<Arena>,
    intake: Mutex<Intake>,
    outgoing: Mutex<Outgoing>,
    /// True if the sending thread has something to send. Only the worker's thread sets it.
    left_to_thread: AtomicBool,
    /// Wakes the sending thread. The worker's port rings it.
    bell: EventFd,
    finishing: AtomicBool,
    /// True if the connection has ended, or everything has been sent.
    ended: Mutex<bool>,
    condvar: Condvar,
}

/// The receiving side.
#[derive(Debug)]
struct Intake {
    reader: FrameReader,
    allocator: Allocator,
    tasks: Producer<ArenaRing>,
    /// True if the main process has asked this process to end.
    kill: bool,
    has_ended: bool,
}

/// The sending side.
#[derive(Debug)]
struct Outgoing {
    results: Consumer<ArenaRing>,
    /// Bytes of small results for which the socket had no room.
    unsent: Vec<u8>,
}

impl Remote {
    /// Creates an arena, and serves its only worker over a connected socket. `ring_slots` and `region_len` are those of
    /// the main process's arena, so that a batch that would not fit there is refused here. If the connection ends
    /// before [`Remote::finish`], the worker is asked to leave, and then the receiving thread runs `lost`. It runs
    /// `killed` when the main process asks this process to end.
    pub fn start(
        socket: OwnedFd,
        ring_slots: u32,
        region_len: u64,
        lost: impl FnOnce() + Send + 'static,
        killed: impl Fn() + Send + 'static,
    ) -> Result<Arc<Self>> {
        let needs = Needs { workers: 1, outstanding: ring_slots, shared_queue: false, snapshots: true };
        let arena = Arena::create_within(Geometry::total_for(region_len, needs)?, needs)?;
        let remote = Arc::new(Self {
            socket: Socket::new(socket),
            intake: Mutex::new(Intake {
                reader: FrameReader::new(),
                allocator: Allocator::new(arena.clone(), arena.geometry().main_region()),
                tasks: Producer::new(arena.task_ring(WORKER)),
                kill: false,
                has_ended: false,
            }),
            outgoing: Mutex::new(Outgoing { results: Consumer::new(arena.result_ring(WORKER)), unsent: Vec::new() }),
            left_to_thread: AtomicBool::new(false),
            arena,
            bell: EventFd::new()?,
            finishing: AtomicBool::new(false),
            ended: Mutex::new(false),
            condvar: Condvar::new(),
        });
        remote.socket.keep_alive(LINK_SILENCE);
        let (sending, receiving) = (remote.clone(), remote.clone());
        let started = spawn("rl_receive", move || {
            receiving.run_receiver(&killed);
            if !receiving.finishing.load(Ordering::Relaxed) {
                lost();
            }
        });
        let started = started.and_then(|()| spawn("rl_send", move || sending.run_sender()));
        if let Err(error) = started {
            // End the first thread if the second one could not be started.
            remote.finishing.store(true, Ordering::Relaxed);
            remote.socket.shut_down(std::net::Shutdown::Both);
            return Err(error);
        }
        Ok(remote)
    }

    /// Returns the arena for the worker's port. The worker is worker 0 there.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Returns a duplicate of the bell, for the worker's port.
    pub fn doorbell(&self) -> Result<OwnedFd> {
        self.bell.as_fd().try_clone_to_owned().map_err(|error| Error::Os {
            call: "dup",
            errno: error.raw_os_error().unwrap_or(0),
            hint: "raise `ulimit -n`".into(),
        })
    }

    /// Notifies the main process that the worker is entering its loop.
    pub fn ready(&self) {
        self.send_notice(&Head::bare(Kind::Ready).to_bytes());
    }

    /// Notifies the main process that the worker begins a sample of a task. `place` is the sample's index within its
    /// index batch, plus 1, or 0 if no sample is in progress. Returns only when the kernel has accepted the frame,
    /// because fetching the sample may end the process.
    pub fn at_sample(&self, task: u64, place: u64) {
        let mut frame = Head::bare(Kind::Sample).to_bytes().to_vec();
        frame::put_words(&mut frame, &[task, place]);
        self.send_notice(&frame);
    }

    /// Notifies the main process that the worker begins a batch of a replay.
    pub fn begin_replay(&self) {
        self.send_notice(&Head::bare(Kind::Replay).to_bytes());
    }

    fn send_notice(&self, frame: &[u8]) {
        let mut outgoing = lock(&self.outgoing);
        if outgoing.send_unsent(self).and_then(|()| self.send(&[Part::new(frame)])).is_err() {
            self.socket.shut_down(std::net::Shutdown::Both);
        }
    }

    /// Sends the results that the worker has published, then a [`Kind::Left`] frame, and ends the connection. Returns
    /// false if sending takes longer than `limit`, and in a child of the worker.
    pub fn finish(&self, limit: Duration) -> bool {
        // A child that the dataset forked has no connection.
        if !self.arena.is_ours() {
            return false;
        }
        self.finishing.store(true, Ordering::Release);
        let _ = self.bell.ring();
        let ended = lock(&self.ended);
        let waited = self.condvar.wait_timeout_while(ended, limit, |ended| !*ended);
        let in_time = waited.is_ok_and(|(ended, _)| *ended);
        self.socket.shut_down(std::net::Shutdown::Both);
        in_time
    }

    /// Ends the connection of a worker that cannot start. The main process treats this as the worker's death.
    pub fn give_up(&self) {
        // Hold the lock, so that the sending thread cannot report an orderly end meanwhile.
        let _outgoing = lock(&self.outgoing);
        self.finishing.store(true, Ordering::Release);
        self.socket.shut_down(std::net::Shutdown::Both);
        let _ = self.bell.ring();
    }

    /// Makes the worker leave its loop, and wakes it.
    fn leave(&self) {
        self.arena.header().stop.0.store(1, Ordering::Relaxed);
        let sleeper = self.arena.sleeper_of(WORKER);
        sleeper.ring_always();
        let _ = sys::futex::wake(&sleeper.bell, u32::MAX);
    }

    /// Waits up to `limit` for a task or a signal, and receives the task into the ring. Returns false if another thread
    /// is receiving.
    pub fn wait(&self, limit: Duration) -> Result<bool> {
        let start = sys::clock::monotonic();
        let yields = || {
            sys::clock::yield_now();
            sys::clock::monotonic() - start < YIELD_FOR
        };
        // The receiving thread holds the lock for microseconds, unless it is in the middle of a frame.
        let mut intake = loop {
            match try_lock(&self.intake) {
                Some(intake) => break intake,
                None if yields() => {}
                None => return Ok(false),
            }
        };
        while !self.receive(&mut intake) {
            if !yields() {
                self.socket.wait(true, false, None, Some(limit))?;
                self.receive(&mut intake);
                break;
            }
        }
        Ok(true)
    }

    /// Runs the receiving thread, which receives frames while the worker makes a batch, and detects the end of the
    /// connection.
    fn run_receiver(&self, killed: &dyn Fn()) {
        sys::signal::block_all_in_this_thread();
        loop {
            if let Some(mut intake) = try_lock(&self.intake) {
                self.receive(&mut intake);
                if std::mem::take(&mut intake.kill) {
                    killed();
                }
                if intake.has_ended {
                    return;
                }
            }
            std::thread::sleep(LINK_TICK);
        }
    }

    /// Receives the frames that have arrived. Returns true if there were any, or if the connection has ended. The end
    /// of the connection makes the worker leave.
    fn receive(&self, intake: &mut Intake) -> bool {
        let mut received_any = false;
        while !intake.has_ended {
            match intake.receive(self) {
                Ok(Arrived::Head) => received_any = true,
                Ok(Arrived::Nothing) => return received_any,
                Ok(Arrived::End) | Err(_) => {
                    intake.has_ended = true;
                    self.leave();
                }
            }
        }
        true
    }

    /// Runs the sending thread.
    fn run_sender(&self) {
        sys::signal::block_all_in_this_thread();
        if self.send_published().is_err() {
            // The receiving thread also detects the end.
            self.socket.shut_down(std::net::Shutdown::Both);
        }
        *lock(&self.ended) = true;
        self.condvar.notify_all();
    }

    fn send_published(&self) -> Result<()> {
        let mut poll = PollSet::new();
        poll.add(self.bell.as_fd().as_raw_fd(), 0)?;
        let mut fired = Vec::new();
        loop {
            // Read before the last check of the ring, so that results published before `finish` are sent.
            let finishing = self.finishing.load(Ordering::Acquire);
            self.send_waiting()?;
            if finishing {
                let _outgoing = lock(&self.outgoing);
                self.send(&[Part::new(&Head::bare(Kind::Left).to_bytes())])?;
                self.socket.shut_down(std::net::Shutdown::Write);
                return Ok(());
            }
            if !self.stays_idle() {
                continue;
            }
            let sleeper = &self.arena.header().doorbell.0;
            sleeper.announce();
            let waited = if !self.has_more() && !self.finishing.load(Ordering::Acquire) {
                poll.wait(Some(IDLE_SLICE), &mut fired).map(drop)
            } else {
                Ok(())
            };
            sleeper.awake();
            waited?;
            self.bell.drain()?;
        }
    }

    /// Sends all published results that have not been sent yet.
    fn send_waiting(&self) -> Result<()> {
        let mut outgoing = lock(&self.outgoing);
        // SYNC: left-to-thread (pairs with the Release in `leave_to_thread`).
        self.left_to_thread.swap(false, Ordering::Acquire);
        doorbell::take(&self.arena.bitmap()[0]);
        outgoing.send_unsent(self)?;
        let mut head = Vec::new();
        while let Some(words) = outgoing.results.pop()? {
            self.send_result(&ResultEntry::from_words(&words)?, &mut head)?;
        }
        Ok(())
    }

    /// Sends the result of `bytes` bytes that the worker has just published, if it is small and no large result is
    /// waiting. Does not wait for the socket. Returns false if the sending thread has to be woken.
    pub fn send_now(&self, bytes: u64) -> bool {
        self.leave_to_thread(bytes);
        let sent = !self.left_to_thread.load(Ordering::Relaxed) && self.try_send();
        if !sent {
            self.leave_to_thread(u64::MAX);
        }
        sent
    }

    /// Leaves a published result to the sending thread if its size `bytes` exceeds [`LINK_AT_ONCE`].
    pub fn leave_to_thread(&self, bytes: u64) {
        if bytes > LINK_AT_ONCE {
            // SYNC: left-to-thread (pairs with the Acquire in `send_waiting`).
            self.left_to_thread.store(true, Ordering::Release);
        }
    }

    fn try_send(&self) -> bool {
        let Some(mut outgoing) = try_lock(&self.outgoing) else { return false };
        doorbell::take(&self.arena.bitmap()[0]);
        outgoing.send_small(self).unwrap_or_else(|_| {
            // The receiving thread also detects the end.
            self.socket.shut_down(std::net::Shutdown::Both);
            true
        })
    }

    fn has_more(&self) -> bool {
        self.left_to_thread.load(Ordering::Acquire) || self.arena.bitmap()[0].load(Ordering::Relaxed) != 0
    }

    /// Yields for up to [`YIELD_FOR`], because the next result often comes soon. Returns false as soon as there is
    /// something to send, and true if there was nothing.
    fn stays_idle(&self) -> bool {
        let start = sys::clock::monotonic();
        while sys::clock::monotonic() - start < YIELD_FOR {
            sys::clock::yield_now();
            if self.has_more() {
                return false;
            }
        }
        true
    }

    /// Sends a published result, and releases its blocks. `head` is a reusable buffer.
    fn send_result(&self, entry: &ResultEntry, head: &mut Vec<u8>) -> Result<()> {
        head.clear();
        let Some((block, leaves, start)) = self.write_head(entry, head)? else {
            return self.send(&[Part::new(head)]);
        };
        let payload = entry.len - start;
        let message = self.arena.block_memory(WORKER, block, entry.len)?.as_ptr();
        // SAFETY: the block has `payload` bytes from `start` on, and belongs to this thread until `let_go`.
        let payload = unsafe { Part::raw(message.add(start as usize), payload as usize) };
        let mut parts = vec![Part::new(head), payload];
        for leaf in &leaves {
            let memory = self.arena.block_memory(WORKER, leaf.block, leaf.len)?.as_ptr();
            // SAFETY: as above. The dataset may write into the leaf at the same time, as it may in a local worker.
            parts.push(unsafe { Part::raw(memory, leaf.len as usize) });
        }
        let sent = parts.chunks(PARTS).try_for_each(|parts| self.send(parts));
        self.let_go(block, &leaves);
        sent
    }

    /// Appends the part of a result's frame that precedes the payload to `out`. Returns the result's block, its leaves
    /// and the position of the payload in the block; `None` if the result has no block.
    fn write_head(&self, entry: &ResultEntry, out: &mut Vec<u8>) -> Result<Option<(u32, Vec<Leaf>, u64)>> {
        let counted = counters::read(&self.arena.control(WORKER).status);
        let mut put = |count: usize, len| {
            let count = u32::try_from(count).unwrap_or(u32::MAX);
            out.extend_from_slice(&Head { kind: Kind::Result, count, len }.to_bytes());
            frame::put_words(out, &entry.to_words());
            frame::put_words(out, &counted);
        };
        let Some(block) = entry.block else {
            put(0, 0);
            return Ok(None);
        };
        let mut table = Vec::new();
        self.arena.read_block(WORKER, block, entry.len.min(LEAF_COUNT_BYTES as u64), &mut table)?;
        let start = wire::payload_start(&table, entry.len)?;
        self.arena.read_block(WORKER, block, start, &mut table)?;
        let (leaves, _) = wire::read_message(&table)?;
        put(leaves.len(), entry.len - start);
        leaves.iter().for_each(|leaf| frame::put_words(out, &[leaf.len]));
        Ok(Some((block, leaves, start)))
    }

    fn let_go(&self, block: u32, leaves: &[Leaf]) {
        lease::let_go(&self.arena, WORKER, block);
        leaves.iter().for_each(|leaf| lease::let_go(&self.arena, WORKER, leaf.block));
    }

    /// Sends all of `parts`, waiting for room in the socket. The caller must hold the lock of `outgoing`.
    fn send(&self, parts: &[Part<'_>]) -> Result<()> {
        let mut parts = parts.to_vec();
        let mut unsent = &mut parts[..];
        Part::advance(&mut unsent, 0);
        while !unsent.is_empty() {
            match self.socket.send(unsent)? {
                Transfer::Bytes(count) => Part::advance(&mut unsent, count),
                Transfer::Nothing | Transfer::End => {
                    self.socket.wait(false, true, None, None)?;
                }
            }
        }
        Ok(())
    }
}

impl Intake {
    /// Receives a frame, if its head has arrived.
    fn receive(&mut self, remote: &Remote) -> Result<Arrived> {
        let arrived = self.reader.arrived(&remote.socket)?;
        if arrived != Arrived::Head {
            return Ok(arrived);
        }
        let head = self.reader.head(remote.arena.geometry().region_len)?;
        match head.kind {
            Kind::Task => {
                let entry = self.receive_body(remote, head)?;
                let full = || Error::connection("received more tasks than may be outstanding");
                self.tasks.push(&entry.to_words()).map_err(|_| full())?;
                let sleeper = remote.arena.sleeper_of(WORKER);
                if sleeper.must_ring() {
                    let _ = sys::futex::wake(&sleeper.bell, u32::MAX);
                }
            }
            Kind::Stop => remote.leave(),
            Kind::Kill => self.kill = true,
            kind => return Err(Error::connection(format!("the main process sent a {kind:?} frame"))),
        }
        Ok(arrived)
    }

    /// Receives the remainder of a task.
    fn receive_body(&mut self, remote: &Remote, head: Head) -> Result<TaskEntry> {
        let socket = &remote.socket;
        let pause = &mut || socket.wait(true, false, None, None).map(drop);
        let kind = TaskKind::of_number(head.count);
        let kind = kind.ok_or_else(|| Error::connection(format!("received a task of unknown kind {}", head.count)))?;
        let mut task = [0; 8];
        self.reader.fill(socket, &mut task, pause)?;
        let task = u64::from_le_bytes(task);
        let mut inline = [0; wire::INLINE_BYTES];
        if let Some(payload) = inline.get_mut(..head.len as usize) {
            self.reader.fill(socket, payload, pause)?;
            let entry = TaskEntry::inline(task, kind, payload);
            return entry.ok_or_else(|| Error::usage("a payload that fits into an entry must be inline"));
        }
        if head.len <= SMALL_MESSAGE {
            self.allocator.trust(SMALL_MESSAGE);
        }
        let block = self.allocator.allocate(head.len, CONSUMER)?;
        let memory = remote.arena.block_memory(self.allocator.region(), block, head.len)?.as_ptr();
        // SAFETY: the block has these bytes, and nothing else uses it yet.
        unsafe { self.reader.read(socket, memory, head.len as usize, pause)? };
        Ok(TaskEntry::in_block(task, kind, block, head.len))
    }
}

impl Outgoing {
    /// Sends the bytes for which the socket had no room.
    fn send_unsent(&mut self, remote: &Remote) -> Result<()> {
        remote.send(&[Part::new(&std::mem::take(&mut self.unsent))])
    }

    /// Sends the published results, all of which are small, as far as the socket has room. The remainder stays in
    /// `unsent`. Returns true if nothing remains.
    fn send_small(&mut self, remote: &Remote) -> Result<bool> {
        let mut part = Vec::new();
        while let Some(words) = self.results.pop()? {
            let entry = ResultEntry::from_words(&words)?;
            if let Some((block, leaves, start)) = remote.write_head(&entry, &mut self.unsent)? {
                remote.arena.read_block(WORKER, block, entry.len, &mut part)?;
                self.unsent.extend_from_slice(&part[start as usize..]);
                for leaf in &leaves {
                    remote.arena.read_block(WORKER, leaf.block, leaf.len, &mut part)?;
                    self.unsent.extend_from_slice(&part);
                }
                remote.let_go(block, &leaves);
            }
        }
        if self.unsent.is_empty() {
            return Ok(true);
        }
        if let Transfer::Bytes(count) = remote.socket.send(&[Part::new(&self.unsent)])? {
            self.unsent.drain(..count);
        }
        Ok(self.unsent.is_empty())
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    sys::thread::spawn(name, LINK_STACK, work).map_err(|error| Error::Os {
        call: "pthread_create",
        errno: error.raw_os_error().unwrap_or(0),
        hint: "a worker on another machine needs two threads: raise `ulimit -u`".into(),
    })
}
