//! The turn: which of the user's threads may be in `next`.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::config::WAIT_SLICE;
use crate::engine::Handle;
use crate::sys;

/// A lock that is waited for without the GIL, in slices between which signals are looked for, and that a
/// thread cannot take twice: a signal handler that calls `next` gets an error instead of a deadlock.
#[derive(Debug, Default)]
pub struct Turn {
    queue: Mutex<Queue>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    owner: Option<ThreadId>,
    /// Threads that wait for `freed`. To notify is a system call, also when nobody does.
    waiting: usize,
}

impl Turn {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the turn, waiting for it until the iterator is shut down.
    pub fn take(&self, py: Python<'_>, handle: &Handle) -> PyResult<()> {
        handle.check_ours()?;
        let me = thread::current().id();
        loop {
            let mut queue = self.queue();
            match queue.owner {
                None => {
                    queue.owner = Some(me);
                    return Ok(());
                }
                Some(other) if other == me => {
                    return Err(PyRuntimeError::new_err(
                        "this DataLoader iterator is already in use by this thread: next() was called again from \
                         inside itself, by a signal handler or by the sampler",
                    ));
                }
                Some(_) => drop(queue),
            }
            if handle.closing() {
                return Err(closed(py, handle));
            }
            py.detach(|| {
                let mut queue = self.queue();
                if queue.owner.is_some() {
                    queue.waiting += 1;
                    (queue, _) =
                        self.freed.wait_timeout(queue, WAIT_SLICE).unwrap_or_else(PoisonError::into_inner);
                    queue.waiting -= 1;
                }
            });
            py.check_signals()?;
        }
    }

    /// Takes the turn if nobody has it.
    pub fn try_take(&self) -> bool {
        let mut queue = self.queue();
        let free = queue.owner.is_none();
        if free {
            queue.owner = Some(thread::current().id());
        }
        free
    }

    /// Gives the turn back.
    pub fn give_back(&self) {
        let mut queue = self.queue();
        queue.owner = None;
        if queue.waiting > 0 {
            self.freed.notify_one();
        }
    }
}

/// The error of a `next` whose iterator is shut down meanwhile. A daemon thread that is in `next` while the interpreter exits
/// gets none, which it would only print.
pub fn closed(py: Python<'_>, handle: &Handle) -> PyErr {
    stay(py, handle);
    PyRuntimeError::new_err("the DataLoader iterator has been shut down")
}

/// Where a daemon thread stays until the process ends, once the interpreter exits; everybody else goes on.
pub fn stay(py: Python<'_>, handle: &Handle) {
    if handle.exiting() && sys::signal::gettid() != std::process::id() as i32 {
        py.detach(|| {
            loop {
                thread::park();
            }
        })
    }
}
