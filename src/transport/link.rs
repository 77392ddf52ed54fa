//! The main process's end of a connection to a worker.
//!
//! A task is sent by the thread that queues it ([`Link::pump`]). A thread of the link receives results; it sleeps on
//! the socket and on an eventfd. A consumer that waits for a small result receives it itself ([`Link::receive_now`]),
//! because handing it over from another thread takes longer than receiving most small batches. While the consumer does
//! so repeatedly, the link's thread is *off duty*: it does not sleep on the socket, where each result would wake it for
//! nothing. The thread is on duty again when the consumer sleeps ([`Link::on_duty`]) or has received nothing for
//! [`LINK_OFF_DUTY`].

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::counters;
use super::frame::{self, FIXED, Head, Kind, SAMPLE};
use super::frame_reader::{Arrived, FrameReader};
use super::frame_writer::FrameWriter;
use crate::config::{
    IDLE_SLICE, LINK_MEMORY_CHECK, LINK_MEMORY_WAIT, LINK_OFF_DUTY, LINK_SILENCE, LINK_STACK, LINK_STREAK,
    SMALL_MESSAGE, YIELD_FOR,
};
use crate::error::{Error, Result};
use crate::shm::alloc::Allocator;
use crate::shm::arena::{Arena, ArenaRing};
use crate::shm::block::CONSUMER;
use crate::shm::layout::{NOT_BEGUN, StatusPage, WorkerState};
use crate::shm::ring::Producer;
use crate::shm::{doorbell, lease};
use crate::sync::{Ordering, fence, lock, try_lock};
use crate::sys;
use crate::sys::event::EventFd;
use crate::sys::socket::{Readiness, Socket};
use crate::wire::{self, Leaf, ResultEntry, ResultKind};

/// A connection to a worker.
#[derive(Debug)]
pub struct Link {
    socket: Socket,
    arena: Arc<Arena>,
    worker: u32,
    writer: Mutex<FrameWriter>,
    intake: Mutex<Intake>,
    /// True if the socket had no room for all bytes. The thread then sends the remainder.
    blocked: AtomicBool,
    /// Number of results that the consumer itself has received since it last slept, or since the thread was last off
    /// duty.
    streak: AtomicU32,
    /// True while the thread is off duty.
    off_duty: AtomicBool,
    /// Wakes the engine.
    doorbell: Arc<EventFd>,
    /// Wakes the thread.
    bell: EventFd,
    /// Readable once the connection has ended.
    end: EventFd,
    ended: AtomicBool,
    /// The reason why the connection ended; `None` if the worker has left.
    reason: Mutex<Option<String>>,
    received: AtomicU64,
}

/// The receiving side.
#[derive(Debug)]
struct Intake {
    reader: FrameReader,
    allocator: Allocator,
    results: Producer<ArenaRing>,
    has_left: bool,
    /// The error with which the consumer failed to receive. The thread then ends the connection.
    failed: Option<Error>,
    /// True if the connection has ended or failed.
    has_ended: bool,
    /// True if the thread must receive the next frame, because the frame must wait for memory.
    needs_memory: bool,
}

impl Link {
    /// Starts a thread that serves worker `worker` of this process's arena over a connected socket, and returns the
    /// link. `doorbell` wakes the engine. The worker's rings and region must be empty, as for a new process.
    pub fn start(arena: &Arc<Arena>, worker: u32, socket: OwnedFd, doorbell: Arc<EventFd>) -> Result<Arc<Self>> {
        let link = Arc::new(Self {
            socket: Socket::new(socket),
            arena: arena.clone(),
            worker,
            writer: Mutex::new(FrameWriter::new(arena, worker)),
            intake: Mutex::new(Intake {
                reader: FrameReader::new(),
                allocator: Allocator::new(arena.clone(), worker),
                results: Producer::new(arena.result_ring(worker)),
                has_left: false,
                failed: None,
                has_ended: false,
                needs_memory: false,
            }),
            blocked: AtomicBool::new(false),
            streak: AtomicU32::new(0),
            off_duty: AtomicBool::new(false),
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
            hint: "each worker on another machine needs a thread of this process: raise `ulimit -u`".into(),
        })?;
        Ok(link)
    }

    fn page(&self) -> &StatusPage {
        &self.arena.control(self.worker).status
    }

    /// Returns true if the connection has ended, and the thread no longer uses the arena.
    pub fn has_ended(&self) -> bool {
        // SYNC: link-ended (pairs with the Release in `run`).
        self.ended.load(Ordering::Acquire)
    }

    /// Returns a descriptor that is readable once the connection has ended.
    pub fn end_fd(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }

    /// Returns the reason why the connection ended; `None` if it has not ended, or if the worker has left.
    pub fn reason(&self) -> Option<String> {
        lock(&self.reason).clone()
    }

    /// Returns the number of bytes received.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Returns the number of outstanding tasks; `None` if the link may not take another task from a shared queue.
    pub fn outstanding(&self) -> Option<usize> {
        let writer = lock(&self.writer);
        (!self.has_ended() && writer.has_credit()).then(|| writer.outstanding())
    }

    /// Makes the thread check the rings and flags.
    pub fn wake(&self) {
        let _ = self.bell.ring();
    }

    /// Asks the worker's process to end at once.
    pub fn kill(&self) {
        lock(&self.writer).put(Kind::Kill);
        self.pump();
    }

    /// Returns true if a reason for ending the connection is recorded, for example by [`Link::cut`].
    fn is_cut(&self) -> bool {
        lock(&self.reason).is_some()
    }

    /// Ends the connection. Records `reason`, unless a reason is recorded already.
    pub fn cut(&self, reason: &str) {
        lock(&self.reason).get_or_insert_with(|| reason.into());
        self.socket.shut_down(std::net::Shutdown::Both);
    }

    /// Sends the entries in the rings. The link's thread sends those for which the socket has no room.
    pub fn pump(&self) {
        if matches!(self.send_queued(), Some(false)) {
            self.wake();
        }
    }

    /// Sends the entries in the rings. Returns false if the socket has no room for all of them, and `None` after an
    /// error or the end of the connection.
    fn send_queued(&self) -> Option<bool> {
        let mut writer = lock(&self.writer);
        if self.has_ended() {
            return None;
        }
        let sent = writer.queue_tasks().and_then(|()| writer.flush(&self.socket));
        self.blocked.store(matches!(sent, Ok(false)), Ordering::Relaxed);
        drop(writer);
        sent.inspect_err(|error| self.cut(&error.to_string())).ok()
    }

    /// Receives small frames that have arrived completely, and leaves everything else to the link's thread. Does not
    /// wait. The consumer calls this while it waits for results.
    pub fn receive_now(&self) {
        let Some(mut intake) = try_lock(&self.intake) else { return };
        let mut results = 0;
        loop {
            match self.take_small(&mut intake) {
                Ok(None) => break,
                Ok(Some(kind)) => results += u32::from(kind == Kind::Result),
                Err(error) => {
                    (intake.failed, intake.has_ended) = (Some(error), true);
                    break;
                }
            }
        }
        if results > 0 {
            self.received.store(intake.reader.total, Ordering::Relaxed);
            self.streak.fetch_add(results, Ordering::Relaxed);
        }
        let is_for_thread = intake.failed.is_some() || intake.needs_memory;
        // The link's thread may be sleeping on the socket, which is now empty. It is woken after the lock is released:
        // otherwise it would find the lock taken, and sleep again.
        drop(intake);
        if is_for_thread {
            self.wake();
        }
    }

    fn take_small(&self, intake: &mut Intake) -> Result<Option<Kind>> {
        if intake.has_ended || intake.has_left || intake.needs_memory {
            return Ok(None);
        }
        let max_len = self.arena.geometry().region_len;
        if !intake.reader.has_arrived(&self.socket, max_len)? {
            return Ok(None);
        }
        let frame_begin = intake.reader.begin();
        let head = intake.reader.head(max_len)?;
        match self.receive_body(head, intake, false) {
            Ok(()) => Ok(Some(head.kind)),
            Err(Error::NoMemory { .. } | Error::RegionFull { .. }) => {
                // The thread waits for memory.
                intake.reader.rewind(frame_begin);
                intake.needs_memory = true;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Puts the thread back on duty. The consumer calls this before it sleeps.
    pub fn on_duty(&self) {
        self.streak.store(0, Ordering::Relaxed);
        // SYNC: off-duty (pairs with the fence in `stay_off_duty`).
        fence(Ordering::SeqCst);
        if self.off_duty.load(Ordering::Relaxed) {
            self.wake();
        }
    }

    /// Runs the link's thread until the connection ends.
    fn run(&self) {
        sys::signal::block_all_in_this_thread();
        sys::thread::set_name("rl_link");
        let served = self.serve();
        let has_left = lock(&self.intake).has_left;
        let reason = match served {
            // A reset by a worker that has left is not an error.
            Ok(()) | Err(Error::Os { .. }) if has_left => None,
            Ok(()) => Some("the connection was closed".to_owned()),
            Err(error) => Some(error.to_string()),
        };
        if let Some(reason) = reason {
            lock(&self.reason).get_or_insert(reason);
        }
        self.socket.shut_down(std::net::Shutdown::Both);
        // The flags are set under both locks, so that from now on no other thread sends, receives or uses the rings.
        let (mut intake, writer) = (lock(&self.intake), lock(&self.writer));
        intake.has_ended = true;
        // SYNC: link-ended (pairs with the Acquire in `has_ended`).
        self.ended.store(true, Ordering::Release);
        drop((intake, writer));
        let _ = self.end.ring();
        let _ = self.doorbell.ring();
    }

    fn serve(&self) -> Result<()> {
        // Send the tasks that were queued before the thread began.
        self.pump();
        let mut idle = None;
        loop {
            match self.receive_arrived()? {
                Arrived::End => return Ok(()),
                Arrived::Head => idle = None,
                Arrived::Nothing => {
                    let now = sys::clock::monotonic();
                    if self.streak.load(Ordering::Relaxed) >= LINK_STREAK && !self.blocked.load(Ordering::Relaxed) {
                        self.stay_off_duty()?;
                    } else if now - *idle.get_or_insert(now) < YIELD_FOR {
                        // The next result often comes soon.
                        sys::clock::yield_now();
                    } else {
                        self.sleep(true)?;
                    }
                }
            }
        }
    }

    /// Receives the frames that have arrived, and waits for the remainder of a frame that has begun. Receives nothing
    /// while the consumer receives.
    fn receive_arrived(&self) -> Result<Arrived> {
        let Some(mut intake) = try_lock(&self.intake) else { return Ok(Arrived::Nothing) };
        if let Some(error) = intake.failed.take() {
            return Err(error);
        }
        intake.needs_memory = false;
        let arrived = self.take_arrived(&mut intake);
        intake.has_ended = matches!(arrived, Ok(Arrived::End) | Err(_));
        arrived
    }

    fn take_arrived(&self, intake: &mut Intake) -> Result<Arrived> {
        let max_len = self.arena.geometry().region_len;
        let mut arrived = Arrived::Nothing;
        loop {
            match intake.reader.arrived(&self.socket)? {
                Arrived::Head => arrived = Arrived::Head,
                Arrived::End => return Ok(Arrived::End),
                Arrived::Nothing => return Ok(arrived),
            }
            let head = intake.reader.head(max_len)?;
            self.receive_body(head, intake, true)?;
            self.received.store(intake.reader.total, Ordering::Relaxed);
        }
    }

    /// Sleeps without watching the socket while the consumer receives. Returns when the consumer is about to sleep,
    /// when it has received nothing for [`LINK_OFF_DUTY`], or when there is something to send.
    fn stay_off_duty(&self) -> Result<()> {
        self.off_duty.store(true, Ordering::Relaxed);
        // SYNC: off-duty (pairs with the fence in `on_duty`).
        fence(Ordering::SeqCst);
        let mut readiness = Ok(Readiness::default());
        let mut seen = 0;
        while matches!(readiness, Ok(Readiness { rung: false, .. })) {
            let streak = self.streak.load(Ordering::Relaxed);
            if streak == seen {
                break;
            }
            seen = streak;
            readiness = self.socket.wait(false, false, Some(self.bell.as_fd()), Some(LINK_OFF_DUTY));
        }
        self.off_duty.store(false, Ordering::Relaxed);
        self.streak.store(0, Ordering::Relaxed);
        readiness.map(drop)
    }

    /// Sleeps until there is something to receive or to send, for at most [`IDLE_SLICE`]. If nothing happens in that
    /// time and `trims` is set, trims the region.
    fn sleep(&self, trims: bool) -> Result<()> {
        let blocked = self.blocked.load(Ordering::Relaxed);
        let readiness = self.socket.wait(true, blocked, Some(self.bell.as_fd()), Some(IDLE_SLICE))?;
        if readiness.rung {
            self.bell.drain()?;
        }
        if readiness.rung || blocked {
            self.send_queued();
        }
        if trims && !readiness.rung && !blocked && !readiness.readable {
            lock(&self.intake).allocator.trim(self.arena.budget(self.worker))?;
        }
        Ok(())
    }

    /// Receives the remainder of the frame with this head, and acts on the frame. If `waits` is set, waits for memory.
    fn receive_body(&self, head: Head, intake: &mut Intake, waits: bool) -> Result<()> {
        match head.kind {
            _ if intake.has_left => return Err(Error::connection("received a frame after the worker's last one")),
            Kind::Ready => {
                lock(&self.writer).on_ready();
                // From now on the link may claim tasks from the shared queue, if there is one.
                self.pump();
            }
            Kind::Result => self.take_result(head, intake, waits)?,
            Kind::Sample => {
                let mut body = [0; SAMPLE];
                intake.reader.fill(&self.socket, &mut body, &mut || self.sleep(false))?;
                lock(&self.writer).on_sample(frame::words(&body));
            }
            // The time spent on the batch is measured from now.
            Kind::Replay => {
                self.page().task_since_ns.store(sys::clock::monotonic_ns(), Ordering::Relaxed);
                self.page().place.store(NOT_BEGUN, Ordering::Relaxed);
            }
            Kind::Left => {
                intake.has_left = true;
                counters::enter(self.page(), WorkerState::Left, None, sys::clock::monotonic_ns());
            }
            Kind::Task | Kind::Stop | Kind::Kill => {
                return Err(Error::connection(format!("a worker sent a {:?} frame", head.kind)));
            }
        }
        Ok(())
    }

    /// Receives a result into blocks of the worker's region, and publishes it. Waits for memory if `waits` is set.
    fn take_result(&self, head: Head, intake: &mut Intake, waits: bool) -> Result<()> {
        let Intake { reader, allocator, results, .. } = intake;
        let mut fixed = [0; FIXED];
        reader.fill(&self.socket, &mut fixed, &mut || self.sleep(false))?;
        let (words, counted) = frame::read_fixed(&fixed);
        let mut entry = ResultEntry::from_words(&words).map_err(Error::received)?;
        self.check(&entry, head)?;
        let mut held = Held { link: self, blocks: Vec::new(), waits, start: None };
        if entry.block.is_some() {
            let mut table = vec![0; head.count as usize * 8];
            reader.fill(&self.socket, &mut table, &mut || self.sleep(false))?;
            let lens: Vec<u64> = frame::words(&table).collect();
            let len = wire::message_len(lens.len(), head.len as usize);
            let sum = lens.iter().try_fold(len, |sum, len| sum.checked_add(*len));
            let region = self.arena.geometry().region_len;
            let bytes = sum.filter(|sum| *sum <= region).ok_or_else(|| {
                Error::connection(format!("a batch of {} leaves exceeds a region of {region} bytes", lens.len()))
            })?;
            let block = held.allocate(allocator, len)?;
            let mut leaves = Vec::with_capacity(lens.len());
            for len in lens {
                leaves.push(Leaf { block: held.allocate(allocator, len)?, len });
            }
            let mut rows = Vec::new();
            wire::message_head(leaves.iter(), &mut rows);
            let memory = self.arena.block_memory(self.worker, block, len)?.as_ptr();
            // SAFETY: the block has `len` bytes, for the rows and the payload, and nothing else uses it yet.
            unsafe {
                std::ptr::copy_nonoverlapping(rows.as_ptr(), memory, rows.len());
                let payload = memory.add(rows.len());
                reader.read(&self.socket, payload, head.len as usize, &mut || self.sleep(false))?;
            }
            for leaf in &leaves {
                let memory = self.arena.block_memory(self.worker, leaf.block, leaf.len)?.as_ptr();
                let len = leaf.len as usize;
                // SAFETY: the block has these bytes, and nothing else uses it yet.
                unsafe { reader.read(&self.socket, memory, len, &mut || self.sleep(false))? };
            }
            (entry.block, entry.len, entry.load.bytes) = (Some(block), len, bytes);
        }
        counters::store(self.page(), &counted);
        let full = || Error::connection("received more results than the ring can hold");
        if !entry.kind.is_snapshot() {
            lock(&self.writer).on_answer(&entry)?;
        }
        results.push(&entry.to_words()).map_err(|_| full())?;
        held.blocks.clear();
        doorbell::mark(self.arena.bitmap(), self.worker);
        // Ring for snapshots, too, because the main process may be waiting for the first one.
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
            false => Err(Error::connection(format!(
                "received an invalid result: kind {:?}, {} leaves, {} bytes",
                entry.kind, head.count, head.len
            ))),
        }
    }
}

/// Blocks of a result that is not published yet. Dropping the value releases them.
struct Held<'a> {
    link: &'a Link,
    blocks: Vec<u32>,
    waits: bool,
    /// The time at which the first wait for memory began.
    start: Option<Duration>,
}

impl Held<'_> {
    /// Allocates a block of `len` bytes. If `waits` is set, waits while the consumer holds all memory: for at most
    /// [`LINK_MEMORY_WAIT`] per result, and only while the connection and the loader last.
    fn allocate(&mut self, allocator: &mut Allocator, len: u64) -> Result<u32> {
        if len <= SMALL_MESSAGE {
            allocator.trust(SMALL_MESSAGE);
        }
        loop {
            match allocator.allocate(len, CONSUMER) {
                Ok(block) => {
                    self.blocks.push(block);
                    return Ok(block);
                }
                Err(error) => {
                    let now = sys::clock::monotonic();
                    let stops = self.link.arena.header().stop.0.load(Ordering::Relaxed) != 0;
                    let waited = now - *self.start.get_or_insert(now);
                    let gives_up = stops || self.link.is_cut() || waited >= LINK_MEMORY_WAIT;
                    if gives_up || !self.waits {
                        return Err(error);
                    }
                }
            }
            std::thread::sleep(LINK_MEMORY_CHECK);
            self.link.send_queued();
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
