//! The pin thread, which takes results from the rings, prepares their batches ([`Prepare`]) and sends them to `next`.
//!
//! ```text
//! worker --ring, doorbell--> pin thread --channel, pickup bell--> next()
//!                            pin thread <--channel, doorbell----- next(): "drain worker w, it has ended"
//! ```
//! The thread owns the consumer's ends of the rings ([`Completions`]). To the scheduler, batches in the channel are
//! still outstanding, so the channel holds at most `max_tasks` batches, `max_tasks` snapshots and a few other events.
//! [`PinEvent::Drained`] comes through the same channel, so a worker's death is reported after all results that it
//! published.
//!
//! A fork may copy a lock of the channel or of [`PinControl`] while the thread holds it. A child takes none of these
//! locks: the engine forgets the [`PinLink`], and callers check [`Handle::is_ours`] first.

use std::any::Any;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, SendTimeoutError, Sender, bounded};

use super::completions::{self, Completions, Incoming};
use super::handle::{DOORBELL, Handle};
pub use super::pin_control::PinControl;
use crate::config::{BLIND_SLICE, PIN_STACK, TIED_EXIT, WAIT_SLICE};
use crate::error::{Error, Result};
use crate::metrics::Count;
use crate::shm::arena::Arena;
use crate::sys;
use crate::trace::{Kind, PINNER};
use crate::wire::ResultKind;

/// Prepares batches on the pin thread.
pub trait Prepare: Send + 'static {
    /// A prepared batch, or the error with which its preparation failed.
    type Ready: Send + 'static;

    /// Prepares a batch. An `Err` ends the thread; the string is the reason.
    fn prepare(&mut self, arena: &Arc<Arena>, incoming: &Incoming) -> std::result::Result<Self::Ready, String>;

    /// Returns true for an error in place of a batch.
    fn is_error(ready: &Self::Ready) -> bool;
}

/// An event that the thread sends to `next`.
#[derive(Debug)]
pub enum PinEvent<B> {
    /// A result, with the prepared batch if the result is a batch.
    Result(Incoming, Option<B>),
    /// The ring of this dead worker has been drained.
    Drained(u32),
    /// Shared memory is damaged.
    Broken(Error),
    /// The thread ends, for this reason.
    Gone(String),
}

/// The engine's ends of the channels to and from the thread.
#[derive(Debug)]
pub struct PinLink<B> {
    /// The thread's events.
    pub events: Receiver<PinEvent<B>>,
    /// Dead workers whose rings the thread must drain.
    pub drain: Sender<u32>,
    /// The state through which the engine controls the thread.
    pub control: Arc<PinControl>,
}

/// The state of the thread, including its ends of the channels.
pub struct Body<P: Prepare> {
    prepare: P,
    completions: Completions,
    arena: Arc<Arena>,
    handle: Arc<Handle>,
    control: Arc<PinControl>,
    events: Sender<PinEvent<P::Ready>>,
    drain: Receiver<u32>,
    /// Workers that died before one of their tied results was opened. That result and all later ones of the same
    /// process are discarded. `None` unless workers may be replaced.
    lost: Option<BTreeSet<u32>>,
}

/// Starts a thread that runs `around`; `around` must call [`Body::run`] and return its result. `results` is the number
/// of results for which the channel has room. Fails with [`Error::Os`] if the system refuses a thread or a descriptor.
pub fn start<P: Prepare>(
    prepare: P,
    handle: &Arc<Handle>,
    completions: Completions,
    results: usize,
    restarts: bool,
    around: impl FnOnce(Body<P>) -> std::result::Result<(), String> + Send + 'static,
) -> Result<PinLink<P::Ready>> {
    let control = handle.new_pin_control()?;
    let arena = handle.arena.clone();
    let workers = arena.geometry().workers as usize;
    // The channel also needs room for other events: those of exhausted, resumed and drained workers, and the thread's
    // last event.
    let (events, received) = bounded(results + 4 * workers + 4);
    let (drain, to_drain) = bounded(workers);
    let (last_events, last_control, last_handle) = (events.clone(), control.clone(), handle.clone());
    let body = Body {
        prepare,
        completions,
        arena,
        handle: handle.clone(),
        control: control.clone(),
        events,
        drain: to_drain,
        lost: restarts.then(BTreeSet::new),
    };
    let (end, failed) = (control.thread_end(), control.thread_end());
    let thread = move || {
        last_control.begin();
        sys::signal::block_all_in_this_thread();
        sys::thread::set_name("rl_pin");
        let outcome = catch_unwind(AssertUnwindSafe(|| around(body)));
        let cause = match outcome {
            Ok(Ok(())) => None,
            Ok(Err(cause)) => Some(cause),
            Err(panic) => Some(format!("it panicked: {}", text_of(panic.as_ref()))),
        };
        if let Some(cause) = cause {
            send_event(&last_events, PinEvent::Gone(cause), &last_control, &last_handle);
        }
        // These values own descriptors and mappings, which must be released before `join` returns.
        drop((last_events, last_control, last_handle));
        end.end();
    };
    sys::thread::spawn("rl_pin", PIN_STACK, thread).map_err(|error| {
        failed.end();
        let hint = "the pin thread could not be started; raise the limit on processes (ulimit -u)".into();
        Error::Os { call: "pthread_create", errno: error.raw_os_error().unwrap_or(libc::EAGAIN), hint }
    })?;
    Ok(PinLink { events: received, drain, control })
}

/// Sends an event and wakes `next`. Returns the event if the iterator ends before the channel has room.
fn send_event<B>(
    to: &Sender<PinEvent<B>>,
    mut event: PinEvent<B>,
    control: &PinControl,
    handle: &Handle,
) -> Option<PinEvent<B>> {
    loop {
        match to.send_timeout(event, WAIT_SLICE) {
            Ok(()) => break,
            Err(SendTimeoutError::Disconnected(back)) => return Some(back),
            Err(SendTimeoutError::Timeout(back)) => event = back,
        }
        if control.is_stopping() || handle.closing() {
            return Some(event);
        }
    }
    if control.sleeper.must_ring() {
        // If the bell's descriptor was closed, `next` sees the event after its current slice.
        let _ = control.pickup.ring();
    }
    None
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

impl<P: Prepare> Body<P> {
    /// Returns the object that prepares batches.
    pub fn prepare(&self) -> &P {
        &self.prepare
    }

    /// Runs until the thread is stopped, the iterator is shut down, or damage has been reported. An `Err` says why the
    /// thread ends early.
    pub fn run(mut self) -> std::result::Result<(), String> {
        let mut poll = sys::poll::PollSet::new();
        let doorbell = std::os::fd::AsRawFd::as_raw_fd(&self.handle.doorbell.as_fd());
        poll.add(doorbell, DOORBELL).map_err(|error| error.to_string())?;
        while !self.stopped() {
            if let Err(error) = self.take_in()? {
                self.send(PinEvent::Broken(error));
                return Ok(());
            }
            self.sleep(&mut poll)?;
        }
        Ok(())
    }

    fn stopped(&self) -> bool {
        self.control.is_stopping() || self.handle.closing()
    }

    fn send(&self, event: PinEvent<P::Ready>) {
        let back = send_event(&self.events, event, &self.control, &self.handle);
        if let Some(PinEvent::Result(incoming, None)) = back {
            completions::discard(&self.arena, &incoming);
        }
    }

    /// Prepares and sends all results from the rings. The outer error says why the thread must end; the inner error
    /// reports damage in shared memory.
    fn take_in(&mut self) -> std::result::Result<Result<()>, String> {
        loop {
            // Serve drain requests first. Nothing more can arrive in the ring of a dead worker.
            if let Ok(worker) = self.drain.try_recv() {
                loop {
                    match self.completions.pop(worker) {
                        Ok(Some(incoming)) => self.result(incoming)?,
                        Ok(None) => break,
                        Err(error) => return Ok(Err(error)),
                    }
                }
                if let Some(lost) = &mut self.lost {
                    lost.remove(&worker);
                }
                self.send(PinEvent::Drained(worker));
            } else {
                match self.completions.next(&self.arena) {
                    Ok(Some((_, incoming))) => self.result(incoming)?,
                    Ok(None) => return Ok(Ok(())),
                    Err(error) => return Ok(Err(error)),
                }
            }
            if self.stopped() {
                return Ok(Ok(()));
            }
        }
    }

    fn result(&mut self, incoming: Incoming) -> std::result::Result<(), String> {
        if self.stopped() || self.is_lost(&incoming, Duration::ZERO) {
            completions::discard(&self.arena, &incoming);
            return Ok(());
        }
        let mut ready = None;
        if incoming.is_batch() {
            let begin = sys::clock::monotonic();
            ready = Some(self.prepare.prepare(&self.arena, &incoming)?);
            let end = sys::clock::monotonic();
            self.handle.meter.add_time(Count::Pinning, end - begin);
            self.handle.trace.slice(Kind::Pin, PINNER, begin, end, incoming.entry.task);
            self.handle.meter.add(Count::Pinned, 1);
        }
        if ready.as_ref().is_some_and(P::is_error) && self.is_lost(&incoming, TIED_EXIT) {
            return Ok(());
        }
        self.send(PinEvent::Result(incoming, ready));
        Ok(())
    }

    /// Returns true if a result must be discarded because its worker, which may be replaced, died before a tied result
    /// was opened: this one or an earlier one. For a tied result, waits up to `limit` for the worker to end.
    fn is_lost(&mut self, incoming: &Incoming, limit: Duration) -> bool {
        let (worker, is_tied) = (incoming.worker, incoming.entry.kind == ResultKind::Tied);
        let Some(lost) = &mut self.lost else { return false };
        if is_tied && self.handle.exits_within(worker, limit) {
            lost.insert(worker);
        }
        lost.contains(&worker)
    }

    /// Sleeps until the doorbell rings, for at most one slice.
    fn sleep(&mut self, poll: &mut sys::poll::PollSet) -> std::result::Result<(), String> {
        let limit = if poll.is_empty() { BLIND_SLICE } else { WAIT_SLICE };
        let mut ready = Vec::new();
        let sleeper = &self.arena.header().doorbell.0;
        sleeper.announce();
        let nothing = !self.completions.marked(&self.arena) && self.drain.is_empty() && !self.stopped();
        let outcome = if nothing { poll.wait(Some(limit), &mut ready).map(drop) } else { Ok(()) };
        sleeper.awake();
        let drained = outcome.and_then(|()| match ready.is_empty() || self.handle.doorbell.drain()? {
            true => Ok(()),
            // The doorbell was closed, and its number now belongs to another file, which may always be readable.
            false => poll.remove(DOORBELL),
        });
        drained.map_err(|error| format!("it cannot wait for the workers: {error}"))
    }
}
