//! Control of the pin thread from other threads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

use crate::config::WAIT_SLICE;
use crate::error::Result;
use crate::shm::layout::Sleeper;
use crate::sync::lock;
use crate::sys;

/// The state through which other threads control the pin thread. Any thread may use it, without exclusive access.
#[derive(Debug)]
pub struct PinControl {
    stop: AtomicBool,
    end: Arc<ThreadEnd>,
    thread: OnceLock<ThreadId>,
    /// The bell that the pin thread rings after it has sent an event, if `next` sleeps.
    pub pickup: sys::event::EventFd,
    /// The flag by which `next` announces that it sleeps.
    pub sleeper: Sleeper,
}

/// The signal that the thread has ended. It is a separate object, so that the thread can drop everything else before it
/// signals its end.
#[derive(Debug, Default)]
pub(super) struct ThreadEnd {
    ended: Mutex<bool>,
    condvar: Condvar,
}

impl ThreadEnd {
    pub(super) fn end(&self) {
        *lock(&self.ended) = true;
        self.condvar.notify_all();
    }
}

impl PinControl {
    /// Creates the state for a thread that has not been started yet.
    pub fn new() -> Result<Self> {
        Ok(Self {
            stop: AtomicBool::new(false),
            end: Arc::default(),
            thread: OnceLock::new(),
            pickup: sys::event::EventFd::new()?,
            sleeper: Sleeper::default(),
        })
    }

    /// Asks the thread to end. The caller must ring the doorbell afterwards.
    pub fn stop(&self) {
        // SYNC: pin-stop (pairs with the Acquire in `is_stopping`).
        self.stop.store(true, Ordering::Release);
    }

    /// Returns true once [`PinControl::stop`] has been called.
    pub(super) fn is_stopping(&self) -> bool {
        // SYNC: pin-stop (pairs with the Release in `stop`).
        self.stop.load(Ordering::Acquire)
    }

    /// Records that the calling thread is the pin thread.
    pub(super) fn begin(&self) {
        let _ = self.thread.set(thread::current().id());
    }

    /// Returns the object through which the thread signals its end.
    pub(super) fn thread_end(&self) -> Arc<ThreadEnd> {
        self.end.clone()
    }

    /// Returns true until the thread has signaled its end.
    pub fn is_alive(&self) -> bool {
        !*lock(&self.end.ended)
    }

    /// Returns true if the caller is the pin thread. The garbage collector may end the iterator on the pin thread,
    /// which cannot join itself.
    pub fn is_current(&self) -> bool {
        self.thread.get() == Some(&thread::current().id())
    }

    /// Waits until the thread has ended, for at most `limit` and at most one [`WAIT_SLICE`]. Returns true if it has
    /// ended.
    pub fn join(&self, limit: Duration) -> bool {
        let ended = lock(&self.end.ended);
        let waited = self.end.condvar.wait_timeout_while(ended, limit.min(WAIT_SLICE), |ended| !*ended);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}
