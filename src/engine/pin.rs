//! The pin thread: takes finished batches out of the rings, makes them ready, hands them on over a channel.
//!
//! What "ready" means is the caller's affair ([`Prepare`]); here stand the thread's life and the hand-over.
//!
//! ```text
//! worker --ring, doorbell--> pin thread --channel, pickup bell--> next()
//!                            pin thread <--channel, doorbell----- next(): "drain worker w, it has ended"
//! ```
//! The thread owns the consumer's ends of the rings ([`Completions`]). A batch that waits in the channel is outstanding for the scheduler,
//! so the channel never holds more than `max_tasks` of them and a few words beside.
//! A worker's end is reported to the scheduler only after the thread has drained that worker's ring, which
//! [`PinEvent::Drained`] says in the same channel: so whatever the worker had published comes first.
//!
//! A fork may copy a lock of the channel or of [`PinControl`] while the thread holds it. In the child nobody asks for one:
//! the engine forgets the link, receiver and all, and callers look first whether the process is theirs.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

use crossbeam_channel::{Receiver, SendTimeoutError, Sender, TryRecvError, bounded};

use super::DOORBELL;
use super::completions::{self, Completions, Incoming};
use super::handle::Handle;
use crate::config::{BLIND_SLICE, PIN_STACK, WAIT_SLICE};
use crate::error::{Error, Result};
use crate::metrics::Count;
use crate::shm::arena::Arena;
use crate::shm::layout::Sleeper;
use crate::sys;

/// Makes a finished batch ready for the one who asks for it. Called on the pin thread.
pub trait Prepare: Send + 'static {
    /// A batch that is ready.
    type Ready: Send + 'static;

    /// Makes a batch ready. What it cannot make ready is an error of that batch, so part of `Ready`.
    ///
    /// # Errors
    /// Why the thread has to end.
    fn prepare(
        &mut self,
        arena: &Arc<Arena>,
        incoming: &Incoming,
    ) -> std::result::Result<Self::Ready, String>;
}

/// What the thread hands on.
#[derive(Debug)]
pub enum PinEvent<B> {
    /// A result; a batch has been made ready, the rest is as it came.
    Result(Incoming, Option<B>),
    /// The ring of a worker that has ended is empty.
    Drained(u32),
    /// Shared memory is damaged.
    Broken(Error),
    /// The thread ends, and this is why.
    Gone(String),
}

/// What stops and wakes the thread, and says whether it still runs. Used from any thread, without the turn.
#[derive(Debug)]
pub struct PinControl {
    stop: AtomicBool,
    life: Arc<Life>,
    /// The thread, once it runs.
    thread: OnceLock<ThreadId>,
    /// Rung when the thread has handed something on and `next` sleeps.
    pub pickup: sys::event::EventFd,
    /// Whether `next` sleeps.
    pub sleeper: Sleeper,
}

/// Whether the thread has ended; by itself, so that the thread can let go of all else before it says so.
#[derive(Debug, Default)]
struct Life {
    ended: Mutex<bool>,
    has_ended: Condvar,
}

impl Life {
    fn end(&self) {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.has_ended.notify_all();
    }
}

impl PinControl {
    /// For a thread that has not been started.
    pub fn new() -> Result<Self> {
        Ok(Self {
            stop: AtomicBool::new(false),
            life: Arc::default(),
            thread: OnceLock::new(),
            pickup: sys::event::EventFd::new()?,
            sleeper: Sleeper::default(),
        })
    }

    /// Tells the thread to end. Whoever calls this rings the doorbell, which the thread may sleep on.
    pub fn stop(&self) {
        // SYNC: pin-stop (pairs with the Acquire in `stopped` and `hand_on`).
        self.stop.store(true, Ordering::Release);
    }

    /// Whether the thread runs.
    pub fn is_alive(&self) -> bool {
        !*self.life.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the caller is the thread: the collector may end an iterator there, which then cannot wait for it.
    pub fn is_current(&self) -> bool {
        self.thread.get() == Some(&thread::current().id())
    }

    /// Waits for the thread's end, at most `limit` and at most one slice; says whether it has ended.
    pub fn join(&self, limit: Duration) -> bool {
        let ended = self.life.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.life.has_ended.wait_timeout_while(ended, limit.min(WAIT_SLICE), |ended| !*ended);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// The engine's side of the channel.
#[derive(Debug)]
pub struct Link<B> {
    /// What the thread hands on.
    pub parcels: Receiver<PinEvent<B>>,
    /// Workers whose rings the thread is to drain.
    pub drain: Sender<u32>,
    /// The thread's control.
    pub control: Arc<PinControl>,
}

/// The thread's side.
pub struct Body<P: Prepare> {
    prepare: P,
    completions: Completions,
    arena: Arc<Arena>,
    handle: Arc<Handle>,
    control: Arc<PinControl>,
    parcels: Sender<PinEvent<P::Ready>>,
    drain: Receiver<u32>,
}

/// Starts a thread that runs `around` with its body; `around` calls [`Body::run`] in whatever surroundings that needs.
///
/// # Errors
/// [`Error::Os`]: the system refuses a thread or a descriptor.
pub fn start<P: Prepare>(
    prepare: P,
    handle: &Arc<Handle>,
    completions: Completions,
    max_tasks: usize,
    around: impl FnOnce(Body<P>) -> std::result::Result<(), String> + Send + 'static,
) -> Result<Link<P::Ready>> {
    let control = handle.control_of_pinning()?;
    let arena = handle.arena.clone();
    let workers = arena.geometry().workers as usize;
    // Beside the batches: what exhausted and resumed workers say, ended ones, and the thread's last word.
    let (parcels, received) = bounded(max_tasks + 4 * workers + 4);
    let (drain, to_drain) = bounded(workers);
    let (last_word, last_control, last_hands) = (parcels.clone(), control.clone(), handle.clone());
    let body = Body {
        prepare,
        completions,
        arena,
        handle: handle.clone(),
        control: control.clone(),
        parcels,
        drain: to_drain,
    };
    let (life, failed) = (control.life.clone(), control.life.clone());
    let thread = move || {
        let _ = last_control.thread.set(thread::current().id());
        sys::signal::block_all_in_this_thread();
        sys::thread::set_name("rl_pin");
        let outcome = catch_unwind(AssertUnwindSafe(|| around(body)));
        let cause = match outcome {
            Ok(Ok(())) => None,
            Ok(Err(cause)) => Some(cause),
            Err(panic) => Some(format!("it panicked: {}", text_of(panic.as_ref()))),
        };
        if let Some(cause) = cause {
            hand_on(&last_word, PinEvent::Gone(cause), &last_control, &last_hands);
        }
        // Descriptors and mappings hang on these: who has waited for the end finds them gone.
        drop((last_word, last_control, last_hands));
        life.end();
    };
    sys::thread::spawn("rl_pin", PIN_STACK, thread).map_err(|error| {
        failed.end();
        let hint = "the pin thread could not be started; raise the limit of processes (ulimit -u)".into();
        Error::Os { call: "pthread_create", errno: error.raw_os_error().unwrap_or(libc::EAGAIN), hint }
    })?;
    Ok(Link { parcels: received, drain, control })
}

/// Puts a parcel into the channel and wakes `next`; gives back one that nobody will ask for any more.
fn hand_on<B>(
    to: &Sender<PinEvent<B>>,
    parcel: PinEvent<B>,
    control: &PinControl,
    handle: &Handle,
) -> Option<PinEvent<B>> {
    let mut parcel = parcel;
    loop {
        match to.send_timeout(parcel, WAIT_SLICE) {
            Ok(()) => break,
            Err(SendTimeoutError::Disconnected(back)) => return Some(back),
            Err(SendTimeoutError::Timeout(back)) => parcel = back,
        }
        // SYNC: pin-stop (pairs with the Release in `PinControl::stop`).
        if control.stop.load(Ordering::Acquire) || handle.closing() {
            return Some(parcel);
        }
    }
    if control.sleeper.must_ring() {
        // Where somebody has closed it `next` looks again after its slice.
        let _ = control.pickup.ring();
    }
    None
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

impl<P: Prepare> Body<P> {
    /// What makes the batches ready.
    pub fn prepare(&self) -> &P {
        &self.prepare
    }

    /// Works until it is told to stop, or the iterator is shut down.
    ///
    /// # Errors
    /// Why the thread has to end.
    pub fn run(mut self) -> std::result::Result<(), String> {
        let mut poll = sys::poll::PollSet::new();
        let doorbell = std::os::fd::AsRawFd::as_raw_fd(&self.handle.doorbell.as_fd());
        poll.add(doorbell, DOORBELL).map_err(|error| error.to_string())?;
        while !self.stopped() {
            if let Err(error) = self.take_in()? {
                self.hand_on(PinEvent::Broken(error));
                return Ok(());
            }
            self.sleep(&mut poll)?;
        }
        Ok(())
    }

    fn stopped(&self) -> bool {
        // SYNC: pin-stop (pairs with the Release in `PinControl::stop`).
        self.control.stop.load(Ordering::Acquire) || self.handle.closing()
    }

    fn hand_on(&self, parcel: PinEvent<P::Ready>) {
        let back = hand_on(&self.parcels, parcel, &self.control, &self.handle);
        if let Some(PinEvent::Result(incoming, None)) = back {
            completions::discard(&self.arena, &incoming);
        }
    }

    /// Hands on all that lies in the rings. The outer error ends the thread; the inner one is damage.
    fn take_in(&mut self) -> std::result::Result<Result<()>, String> {
        loop {
            // The requests first: what a worker had published before its end was seen is in its ring by now.
            match self.drain.try_recv() {
                Ok(worker) => {
                    loop {
                        match self.completions.pop(worker) {
                            Ok(Some(incoming)) => self.result(incoming)?,
                            Ok(None) => break,
                            Err(error) => return Ok(Err(error)),
                        }
                    }
                    self.hand_on(PinEvent::Drained(worker));
                }
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => {
                    match self.completions.next(&self.arena) {
                        Ok(Some((_, incoming))) => self.result(incoming)?,
                        Ok(None) => return Ok(Ok(())),
                        Err(error) => return Ok(Err(error)),
                    }
                }
            }
            if self.stopped() {
                return Ok(Ok(()));
            }
        }
    }

    fn result(&mut self, incoming: Incoming) -> std::result::Result<(), String> {
        if self.stopped() {
            completions::discard(&self.arena, &incoming);
            return Ok(());
        }
        let ready = match incoming.is_batch() {
            true => {
                let begin = sys::clock::monotonic();
                let ready = self.prepare.prepare(&self.arena, &incoming)?;
                self.handle.meter.add_time(Count::Pinning, sys::clock::monotonic() - begin);
                self.handle.meter.add(Count::Pinned, 1);
                Some(ready)
            }
            false => None,
        };
        self.hand_on(PinEvent::Result(incoming, ready));
        Ok(())
    }

    /// Sleeps on the doorbell for at most one slice.
    fn sleep(&mut self, poll: &mut sys::poll::PollSet) -> std::result::Result<(), String> {
        let limit = if poll.is_empty() { BLIND_SLICE } else { WAIT_SLICE };
        let mut ready = Vec::new();
        let sleeper = &self.arena.header().doorbell.0;
        sleeper.announce();
        let nothing = !self.completions.marked(&self.arena) && self.drain.is_empty() && !self.stopped();
        let outcome = match nothing {
            true => poll.wait(Some(limit), &mut ready).map(drop),
            false => Ok(()),
        };
        sleeper.awake();
        let drained = outcome.and_then(|()| match ready.is_empty() || self.handle.doorbell.drain()? {
            true => Ok(()),
            // Another file has its number, and may be readable all the time.
            false => poll.remove(DOORBELL),
        });
        drained.map_err(|error| format!("it cannot wait for the workers: {error}"))
    }
}
