//! The main process's side: one `Engine` an iterator.

mod death;
mod epoch;
mod read;
mod state;
mod status;
mod submit;

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

pub use self::death::PyDeath;
use self::state::{InTurn, State};
use super::callbacks::Callbacks;
use super::gate::park_at_exit;
use super::pin;
use crate::codec::prepare::{PinCallbacks, PinnedDecoder};
use crate::config::TIMEOUT_MAX;
use crate::engine::gate::{Attempt, Gate};
use crate::engine::pin::PinControl;
use crate::engine::{Engine, Handle};
use crate::interop::detached::DetachedObject;
use crate::metrics::Count;
use crate::python::figures::PyMeter;
use crate::scheduler::Settings;
use crate::shm::forks;
use crate::worker::watchdog::Parent;

/// Batches that engines of this process have handed out.
static BATCHES: AtomicU64 = AtomicU64::new(0);

/// What `progress` answers.
type Counters = (u64, usize, Vec<usize>, Vec<(u64, u32)>);

/// The engine of one iterator. Methods take the turn by themselves, but for those marked so.
#[pyclass(frozen, name = "Engine", module = "rustloader._core")]
pub struct PyEngine {
    state: Mutex<State>,
    gate: Gate,
    /// The workers have ended, and whoever has the turn is to finish.
    finish_wanted: AtomicBool,
    /// What may be used without the turn.
    pub handle: Arc<Handle>,
    callbacks: Callbacks,
}

/// A number of seconds that a user has set; nothing for what is not greater than 0 (NaN is neither), and for what no clock can
/// count.
fn seconds(value: f64) -> Option<Duration> {
    (value > 0.0 && value < TIMEOUT_MAX).then(|| Duration::from_secs_f64(value))
}

/// `StallLimits` of `config.py`; 0 switches each off.
#[derive(FromPyObject)]
struct StallLimits {
    start_seconds: f64,
    item_seconds: f64,
    stack_seconds: f64,
}

#[pymethods]
impl PyEngine {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "Python gives them by name")]
    fn new(
        py: Python<'_>,
        workers: usize,
        prefetch_factor: usize,
        in_order: bool,
        persistent: bool,
        timeout: f64,
        stalls: StallLimits,
        loads: Py<PyAny>,
        dump_index: Py<PyAny>,
        is_interrupt: Py<PyAny>,
        warn_stall: Py<PyAny>,
    ) -> PyResult<Self> {
        let settings = Settings::torch(workers, prefetch_factor, in_order);
        let settings = Settings { persistent, timeout: seconds(timeout), ..settings };
        let mut engine = py.detach(|| Engine::new(settings))?;
        let limits = [stalls.start_seconds, stalls.item_seconds].map(seconds);
        engine.name_stalls(limits, seconds(stalls.stack_seconds));
        let handle = engine.handle().clone();
        Ok(Self {
            state: Mutex::new(State::new(engine)),
            gate: Gate::default(),
            finish_wanted: AtomicBool::new(false),
            handle,
            callbacks: Callbacks { loads, dump_index, is_interrupt, warn_stall },
        })
    }

    /// What a worker needs to open its port: memfd, doorbell, sizes, and who the main process is.
    fn shipment(&self) -> (i32, i32, (u64, u32, u32), (i32, u64)) {
        let geometry = self.handle.arena.geometry();
        let parent = Parent::this_process();
        (
            self.handle.arena.raw_fd(),
            self.handle.doorbell.as_fd().as_raw_fd(),
            (geometry.total, geometry.workers, geometry.ring_slots),
            (parent.pid, parent.start_time),
        )
    }

    /// Notes a worker that has been started.
    fn started(&self, py: Python<'_>, worker: u32, pid: i32) -> PyResult<()> {
        Ok(self.enter(py)?.state().engine.started(worker, pid)?)
    }

    /// Begins an epoch: for all but the first has the workers answer, then sends an index for each task that may be
    /// outstanding. `answer` gets the code of what came instead, or `END`.
    fn begin(
        &self,
        py: Python<'_>,
        answer: &Bound<'_, PyList>,
        next_index: &Bound<'_, PyAny>,
        is_first: bool,
    ) -> PyResult<()> {
        self.begin_epoch(py, answer, next_index, is_first)
    }

    /// Puts the next thing to do into `answer`: a code and its value. For each result that is about to be handed out one more
    /// index is wanted first, as in torch; the sampler's error there comes at the next call, because the batch is sound.
    ///
    /// The result lies in `answer` before this returns: an exception that a signal handler raises just then cannot take it away.
    fn next(
        &self,
        py: Python<'_>,
        answer: &Bound<'_, PyList>,
        next_index: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.next_answer(py, answer, next_index)
    }

    /// Starts the pin thread, after the workers. It calls the functions: `begin` once, `plain`, `pin` and `failure` for batches.
    fn start_pinning(
        &self,
        py: Python<'_>,
        begin: Py<PyAny>,
        plain: Py<PyAny>,
        pin: Py<PyAny>,
        failure: Py<PyAny>,
    ) -> PyResult<()> {
        let [begin, plain, pin, failure, loads] =
            [begin, plain, pin, failure, self.callbacks.loads.clone_ref(py)].map(DetachedObject::new);
        let decoder = PinnedDecoder::new(PinCallbacks { begin, plain, pin, failure, loads });
        Ok(self.enter(py)?.state().engine.start_pinning(decoder, pin::run)?)
    }

    /// Whether a pin thread runs. Without the turn.
    fn pinning(&self) -> bool {
        self.handle.is_ours() && self.handle.pinning().is_some_and(PinControl::is_alive)
    }

    /// Tells the pin thread to end. Without the turn.
    fn stop_pinning(&self) {
        if self.handle.is_ours() {
            self.handle.stop_pinning();
        }
    }

    /// Waits for the pin thread's end, at most `seconds`; says whether it has ended. Without the turn and without the GIL.
    #[pyo3(signature = (seconds = None))]
    fn join_pinning(&self, py: Python<'_>, seconds: Option<f64>) -> PyResult<bool> {
        pin::join(py, &self.handle, seconds)
    }

    /// Whether each worker takes tasks in this epoch.
    /// None while another thread is in `next`.
    fn active(&self) -> Option<Vec<bool>> {
        Some(self.state.try_lock().ok()?.engine.active())
    }

    /// Tasks sent in this epoch, tasks without a result, tasks not delivered of each worker, and (number, worker) of each task that was not
    /// delivered. None while another thread is in `next`.
    fn progress(&self) -> Option<Counters> {
        let progress = self.state.try_lock().ok()?.engine.progress();
        Some((progress.sent, progress.outstanding, progress.loads, progress.undelivered))
    }

    /// Batches handed out so far. Without the turn.
    #[getter]
    fn batches(&self) -> u64 {
        self.handle.meter.get(Count::Batches)
    }

    /// Tells the workers to leave and wakes a waiting `next`. Without the turn; may be called again. With `exiting` threads
    /// that wait in `next` stay where they are.
    #[pyo3(signature = (exiting = false))]
    fn close(&self, exiting: bool) -> PyResult<()> {
        if !self.handle.is_ours() {
            return Ok(());
        }
        if exiting {
            self.handle.exit();
        }
        self.handle.close();
        Ok(())
    }

    /// Returns, but not to a daemon thread once the interpreter exits: for it the epoch has not come to its end. Without the turn.
    fn stay(&self, py: Python<'_>) {
        park_at_exit(py, &self.handle);
    }

    /// True once `close` was called. Without the turn.
    #[getter]
    fn closing(&self) -> bool {
        self.handle.closing()
    }

    /// False in a forked child. Without the turn.
    #[getter]
    fn is_ours(&self) -> bool {
        self.handle.is_ours()
    }

    /// Number of workers that run. Without the turn.
    fn alive(&self) -> usize {
        self.handle.alive()
    }

    /// Waits for the workers to end, at most `seconds` and at most one slice. Without the turn and without the GIL.
    fn wait_gone(&self, py: Python<'_>, seconds: f64) -> PyResult<bool> {
        let limit = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX);
        Ok(py.detach(|| self.handle.wait_gone(limit))?)
    }

    /// Sends a signal to the workers that run. Without the turn.
    fn signal_all(&self, signal: i32) {
        self.handle.signal_all(signal);
    }

    /// What a worker says of itself: state, task, seconds in the state, tasks done, seconds in each state. After the end what it
    /// said last; an error in a forked child. Without the turn.
    fn worker_status<'py>(&self, py: Python<'py>, worker: u32) -> PyResult<Bound<'py, PyDict>> {
        let said = self.handle.status(worker)?;
        let said = said.ok_or_else(|| PyValueError::new_err(format!("there is no worker {worker}")))?;
        status::describe(py, &said)
    }

    /// Gives everything back after the workers have ended; while a `next` holds the turn, as soon as it gives that back.
    ///
    /// Two things depend on it that the GIL is held here, and in `InTurn::drop` until the turn is given back. Who gives it back
    /// looks for the wish first: without the GIL the wish could come between that look and the turn's end, find the turn taken,
    /// and be lost. And no fork of Python's copies the handle's lock or the meter's while somebody has it. The turn's own is held
    /// without the GIL by who waits for the turn, so that a forked child must leave it alone.
    fn finish(&self) {
        if !self.handle.is_ours() {
            return;
        }
        // SYNC: finish-wanted (pairs with the Acquire of whoever gives the turn back).
        self.finish_wanted.store(true, Ordering::Release);
        if self.gate.try_enter() == Attempt::Entered {
            drop(InTurn { engine: self, state: self.state.try_lock().ok() });
        }
    }

    /// Bytes of the arena that have pages, and those of them that somebody holds; none after the end, when the arena may be
    /// another iterator's, and in a forked child. Without the turn.
    fn memory(&self) -> (u64, u64) {
        let usage = self.handle.usage();
        (usage.warm, usage.held)
    }

    /// What is counted of this iterator. Without the turn.
    #[getter]
    fn meter(&self) -> PyMeter {
        PyMeter::of(&self.handle)
    }
}

/// Counts the batches that the Rust engine has delivered in this process, all loaders together.
///
/// Batches of torch's own loop (``num_workers=0``, or a loader that fell back to it) do not count.
///
/// Returns:
///   The number of batches.
///
/// Examples:
///   >>> before = rustloader.engine_batches()
///   >>> batches = list(rustloader.DataLoader(range(8), batch_size=4, num_workers=2))
///   >>> rustloader.engine_batches() - before
///   2
#[pyfunction]
pub fn engine_batches() -> u64 {
    BATCHES.load(Ordering::Relaxed)
}

/// Whether a process is a child of this one, or a child of a child, as under the fork server; False for this process itself.
#[pyfunction]
pub fn descends(pid: i64) -> bool {
    i32::try_from(pid).is_ok_and(crate::sys::pidfd::descends)
}

/// Lets go of the arenas that wait for the next iterator; says how many there were.
#[pyfunction]
pub fn _trim_pool(py: Python<'_>) -> usize {
    py.detach(crate::shm::pool::clear)
}

/// The forks of this thread from here to `end_forks` are the workers of one iterator.
#[pyfunction]
pub fn begin_forks() {
    forks::begin_group();
}

/// Ends what `begin_forks` began.
#[pyfunction]
pub fn end_forks() {
    forks::end_group();
}
