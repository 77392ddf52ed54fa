//! The main process's side: one `Engine` per iterator.

mod call;
mod early;
mod epoch;
mod raised;
mod read;
mod state;
mod submit;
mod worker;

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use pyo3::{PyTraverseError, PyVisit};

use self::call::{Call, Callbacks};
pub use self::epoch::{PyPosition, PyProgress, PySnapshot};
use self::state::{Access, State};
pub use self::worker::PyDeath;
use super::figures::PyMeter;
use super::functions::WarmPages;
use super::gate::{closed, enter};
use super::remote::{PyLink, limit};
use super::sizes::Sizes;
use super::trace::PyTraceSink;
use crate::codec::prepare::{PinCallbacks, PinnedDecoder};
use crate::config::TIMEOUT_MAX;
use crate::engine::gate::{Attempt, Gate};
use crate::engine::pin::{Body, PinControl};
use crate::engine::{Engine, Handle};
use crate::error::Error;
use crate::interop::detached::{DetachedObject, attached};
use crate::interop::exit_guard::park_at_exit;
use crate::metrics::Count;
use crate::scheduler::{Dispatch, Settings, Window};
use crate::sys::clock;
use crate::trace::{Kind, MAIN};
use crate::worker::watchdog::Parent;

/// The engine of one iterator. `_core.pyi` documents the methods. Methods that call `enter` wait for exclusive access;
/// all others may be called at any time and do not wait for it.
#[pyclass(frozen, name = "Engine", module = "rustloader._core")]
pub struct PyEngine {
    state: Mutex<State>,
    gate: Gate,
    /// Set by `finish` once the workers have ended. The call that has exclusive access must then finish the engine.
    finish_wanted: AtomicBool,
    pub handle: Arc<Handle>,
    callbacks: Callbacks,
}

/// Converts seconds to a duration. Returns `None`, which means no limit, for values that are not positive, for NaN, and
/// for values that are too large for a clock.
fn seconds(value: f64) -> Option<Duration> {
    (value > 0.0 && value < TIMEOUT_MAX).then(|| Duration::from_secs_f64(value))
}

/// Runs the pin thread, which attaches to Python once and holds the GIL only where it needs it.
fn run_pinning(body: Body<PinnedDecoder>) -> Result<(), String> {
    attached(|py| {
        body.prepare().begin(py).map_err(|error| error.to_string())?;
        py.detach(|| body.run())
    })
}

/// The limits of `StallLimits` in `settings/limits.py`. The value 0 disables a limit.
#[derive(FromPyObject)]
struct StallLimits {
    start_seconds: f64,
    item_seconds: f64,
    stack_seconds: f64,
}

/// The settings that the engine reads from `LoaderConfig` in `settings/config.py`. Values are converted by Python's
/// rules, and conversion errors are raised unchanged.
struct Config {
    settings: Settings,
    snapshots: bool,
    stall_timeout: Option<f64>,
    name: String,
}

impl<'py> FromPyObject<'_, 'py> for Config {
    type Error = PyErr;

    fn extract(config: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let value = |name| config.getattr(name);
        let in_order = value("in_order")?.is_truthy()?;
        let torch = Settings::torch(value("num_workers")?.extract()?, value("prefetch_factor")?.extract()?, in_order);
        let shared_queue = value("dispatch")?.eq("shared_queue")?;
        let (batches, bytes): (Option<usize>, Option<u64>) = value("window")?.extract()?;
        let settings = Settings {
            persistent: value("persistent_workers")?.is_truthy()?,
            timeout: seconds(value("timeout")?.extract()?),
            dispatch: if shared_queue { Dispatch::SharedQueue } else { torch.dispatch },
            window: bytes.map(|bytes| Window::of_bytes(bytes, torch.max_tasks())).or(batches.map(Window::of_batches)),
            restarts: value("max_restarts")?.gt(0)?,
            ..torch
        };
        let snapshots = value("snapshots")?.extract()?;
        let (stall_timeout, name) = (value("stall_timeout")?.extract()?, value("name")?.extract()?);
        Ok(Self { settings, snapshots, stall_timeout, name })
    }
}

#[pymethods]
impl PyEngine {
    #[new]
    #[pyo3(signature = (config, stalls, loads, dump_index, is_interrupt, warn_stall))]
    fn new(
        py: Python<'_>,
        config: Config,
        stalls: StallLimits,
        loads: Py<PyAny>,
        dump_index: Py<PyAny>,
        is_interrupt: Py<PyAny>,
        warn_stall: Py<PyAny>,
    ) -> PyResult<Self> {
        let Config { settings, snapshots, stall_timeout, name } = config;
        let mut engine = py.detach(|| Engine::new(settings, snapshots))?;
        engine.show_name(&name);
        let limits = [stalls.start_seconds, stalls.item_seconds].map(seconds);
        engine.set_stall_limits(limits, seconds(stalls.stack_seconds));
        engine.set_stall_timeout(stall_timeout.and_then(seconds));
        Ok(Self {
            handle: engine.handle().clone(),
            state: Mutex::new(State { engine, buffer: Vec::new(), payload: Vec::new(), begun: None, early: None }),
            gate: Gate::default(),
            finish_wanted: AtomicBool::new(false),
            callbacks: Callbacks { loads, dump_index, is_interrupt, warn_stall },
        })
    }

    fn belongs_to(&self, pages: &WarmPages) {
        pages.begin(&self.handle.arena);
    }

    fn shipment(&self) -> (i32, i32, Sizes, (i32, u64)) {
        let geometry = self.handle.arena.geometry();
        let parent = Parent::this_process();
        (
            self.handle.arena.raw_fd(),
            self.handle.doorbell.as_fd().as_raw_fd(),
            (geometry.total, geometry.workers, geometry.ring_slots, geometry.shared_queue),
            (parent.pid, parent.start_time),
        )
    }

    fn started(&self, py: Python<'_>, worker: u32, pid: i32) -> PyResult<()> {
        let mut access = self.enter(py)?;
        // A process that is registered after the shutdown has begun would not be ended.
        if self.handle.closing() {
            return Err(closed(py, &self.handle));
        }
        Ok(access.state().engine.started(worker, pid)?)
    }

    fn attached(&self, py: Python<'_>, worker: u32, fd: i32, pid: i32) -> PyResult<PyLink> {
        // SAFETY: the caller passes ownership of the descriptor, which is open.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        let mut access = self.enter(py)?;
        if self.handle.closing() {
            return Err(closed(py, &self.handle));
        }
        access.state().engine.attached(worker, socket, pid)?;
        let link = self.handle.process(worker).and_then(|process| process.link.clone());
        link.map(PyLink).ok_or_else(|| PyValueError::new_err(format!("worker {worker} has no connection")))
    }

    #[getter]
    fn ring_slots(&self) -> u32 {
        self.handle.arena.geometry().ring_slots
    }

    #[getter]
    fn region_len(&self) -> u64 {
        self.handle.arena.geometry().region_len
    }

    fn vacate(&self, py: Python<'_>, worker: u32) -> PyResult<()> {
        Ok(self.enter(py)?.state().engine.vacate(worker)?)
    }

    fn postpone(&self, py: Python<'_>, worker: u32, seconds: f64) -> PyResult<()> {
        Ok(self.enter(py)?.state().engine.postpone(worker, limit(seconds))?)
    }

    fn give_up(&self, py: Python<'_>, worker: u32) -> PyResult<()> {
        Ok(self.enter(py)?.state().engine.give_up(worker)?)
    }

    /// Begins an epoch. Unless it is the first, sends `message` to the workers and waits until they have resumed. Then
    /// draws and sends index batches up to the limit of outstanding tasks. The answer is `END`, or the event that
    /// arrived instead.
    // The arguments are those of the Python method.
    #[allow(clippy::too_many_arguments)]
    #[pyo3(signature = (answer, next_index, is_first, message, first_worker = 0, predictor = None))]
    fn begin<'py>(
        &self,
        py: Python<'py>,
        answer: &Bound<'py, PyList>,
        next_index: &Bound<'py, PyAny>,
        is_first: bool,
        message: &[u8],
        first_worker: u32,
        predictor: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<()> {
        self.check_worker(first_worker)?;
        let mut access = self.enter(py)?;
        self.call(py, access.state(), answer, next_index, predictor).begin(is_first, message, first_worker)
    }

    /// Delivers the next result. Before that, draws one more index batch, as torch does, or fills the reorder window.
    /// If the sampler raises an error, a later call raises it, because this call can still deliver its batch. The
    /// result is in `answer` before this method returns, so a signal handler that raises cannot lose it.
    #[pyo3(signature = (answer, next_index, predictor = None))]
    fn next<'py>(
        &self,
        py: Python<'py>,
        answer: &Bound<'py, PyList>,
        next_index: &Bound<'py, PyAny>,
        predictor: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<()> {
        let mut access = self.enter(py)?;
        self.call(py, access.state(), answer, next_index, predictor).next()
    }

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
        Ok(self.enter(py)?.state().engine.start_pinning(decoder, run_pinning)?)
    }

    fn pinning(&self) -> bool {
        self.handle.is_ours() && self.handle.pinning().is_some_and(PinControl::is_alive)
    }

    fn stop_pinning(&self) {
        if self.handle.is_ours() {
            self.handle.stop_pinning();
        }
    }

    #[pyo3(signature = (seconds = None))]
    fn join_pinning(&self, py: Python<'_>, seconds: Option<f64>) -> PyResult<bool> {
        if !self.handle.is_ours() {
            return Ok(true);
        }
        let Some(control) = self.handle.pinning() else { return Ok(true) };
        if control.is_current() {
            return Ok(false);
        }
        let (limit, start) = (seconds.map_or(Duration::MAX, limit), clock::monotonic());
        loop {
            let left = limit.saturating_sub(clock::monotonic() - start);
            if py.detach(|| control.join(left)) {
                return Ok(true);
            }
            if left.is_zero() {
                return Ok(false);
            }
            py.check_signals()?;
        }
    }

    fn active(&self) -> Option<Vec<bool>> {
        Some(self.state.try_lock().ok()?.engine.active())
    }

    fn progress(&self) -> Option<PyProgress> {
        Some(self.state.try_lock().ok()?.engine.progress().into())
    }

    fn position(&self, answers: u64, back: usize) -> PyResult<PyPosition> {
        self.handle.check_ours()?;
        let position = self.handle.answers().positions.at(answers, back);
        Ok(position.map_err(PyValueError::new_err)?.into())
    }

    fn snapshot(&self, py: Python<'_>, worker: u32, answers: u64) -> PyResult<Option<PySnapshot>> {
        self.check_worker(worker)?;
        let snapshot = self.handle.snapshot(worker, answers)?;
        Ok(snapshot.map(|snapshot| PySnapshot::new(py, &snapshot)))
    }

    fn trace(&self, sink: &PyTraceSink, source: u32, level: u32) -> PyResult<bool> {
        if self.handle.has_ended() {
            return Ok(false);
        }
        let first_task = self.handle.arena.header().main.epoch_task.load(Ordering::Relaxed);
        let epoch = (first_task, self.handle.meter.get(Count::Epochs));
        sink.0.follow(&self.handle.trace, source, level, epoch)?;
        Ok(true)
    }

    fn end_trace(&self) {
        self.handle.trace.end();
    }

    fn note_saved(&self, answers: u64) {
        self.handle.trace.mark(Kind::Saved, MAIN, answers, 0);
    }

    #[pyo3(signature = (timeout = 0.0))]
    fn wait_started(&self, py: Python<'_>, timeout: f64) -> PyResult<Option<bool>> {
        let Some(mut access) = self.try_enter()? else { return Ok(Some(false)) };
        let deadline = seconds(timeout).map(|limit| clock::monotonic() + limit);
        let (answer, next_index) = (&PyList::empty(py), py.None().into_bound(py));
        let mut call = self.call(py, access.state(), answer, &next_index, None);
        Ok(call.wait_started(deadline)?.then_some(true))
    }

    #[getter]
    fn batches(&self) -> u64 {
        self.handle.meter.get(Count::Batches)
    }

    #[pyo3(signature = (exiting = false))]
    fn close(&self, exiting: bool) {
        if self.handle.is_ours() {
            if exiting {
                self.handle.exit();
            }
            self.handle.close();
        }
    }

    fn stay(&self, py: Python<'_>) {
        park_at_exit(py, &self.handle);
    }

    #[getter]
    fn closing(&self) -> bool {
        self.handle.closing()
    }

    #[getter]
    fn is_ours(&self) -> bool {
        self.handle.is_ours()
    }

    fn alive(&self) -> usize {
        self.handle.alive()
    }

    fn wait_gone(&self, py: Python<'_>, seconds: f64) -> PyResult<bool> {
        Ok(py.detach(|| self.handle.wait_gone(limit(seconds)))?)
    }

    fn signal_all(&self, signal: i32) {
        self.handle.signal_all(signal);
    }

    fn worker_status<'py>(&self, py: Python<'py>, worker: u32) -> PyResult<Bound<'py, PyDict>> {
        let status = self.handle.status(worker)?;
        let status = status.ok_or_else(|| PyValueError::new_err(format!("there is no worker {worker}")))?;
        worker::status_dict(py, &status)
    }

    /// Releases everything. If another call has exclusive access, that call releases everything instead when it
    /// returns.
    ///
    /// The GIL is held here, and in `Access::drop` until the gate is released, for two reasons. First, the holder
    /// checks for the request and then releases the gate: without the GIL, a request between these two steps would find
    /// the gate still taken and be lost. Second, holding the GIL ensures that Python never forks while a thread holds
    /// the handle's lock or the meter's. Threads that wait at the gate take its lock without the GIL, so a forked child
    /// must not touch that lock.
    fn finish(&self) {
        if !self.handle.is_ours() {
            return;
        }
        // SYNC: finish-wanted (pairs with the Acquire in `Access::drop`).
        self.finish_wanted.store(true, Ordering::Release);
        if self.gate.try_enter() == Attempt::Entered {
            drop(self.access_to(self.state.try_lock().ok()));
        }
    }

    /// Visits the deferred errors of the sampler: each refers to the iterator through its traceback, and the iterator
    /// refers to this engine.
    ///
    /// The garbage collector holds the GIL, and so does a thread that takes the lock. A call in progress may keep the
    /// lock while it waits without the GIL; the engine is then in use, and nothing needs to be visited. There is no
    /// `__clear__`: each cycle passes through a traceback, which the collector clears.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self.state.try_lock() {
            Ok(mut state) => state.engine.delivery().errors().iter().try_for_each(|error| visit.call(error)),
            Err(_) => Ok(()),
        }
    }

    fn memory(&self) -> (u64, u64) {
        let usage = self.handle.usage();
        (usage.warm, usage.held)
    }

    #[getter]
    fn meter(&self) -> PyMeter {
        PyMeter::of(&self.handle)
    }
}

impl PyEngine {
    fn check_worker(&self, worker: u32) -> PyResult<()> {
        if worker < self.handle.arena.geometry().workers {
            return Ok(());
        }
        Err(PyValueError::new_err(format!("there is no worker {worker}")))
    }

    /// Waits for exclusive access, without the GIL.
    fn enter(&self, py: Python<'_>) -> PyResult<Access<'_>> {
        enter(py, &self.gate, &self.handle)?;
        self.access()
    }

    /// Takes exclusive access without waiting. Returns `None` if any thread, including this one, already has it.
    fn try_enter(&self) -> PyResult<Option<Access<'_>>> {
        self.handle.check_ours()?;
        let entered = self.gate.try_enter() == Attempt::Entered;
        entered.then(|| self.access()).transpose()
    }

    fn access(&self) -> PyResult<Access<'_>> {
        let state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.gate.leave();
                return Err(Error::usage("the engine was used without exclusive access").into());
            }
        };
        Ok(self.access_to(Some(state)))
    }

    fn access_to<'a>(&'a self, state: Option<MutexGuard<'a, State>>) -> Access<'a> {
        Access { gate: &self.gate, finish_wanted: &self.finish_wanted, handle: &self.handle, state }
    }

    fn call<'a, 'py>(
        &'a self,
        py: Python<'py>,
        state: &'a mut State,
        answer: &'a Bound<'py, PyList>,
        next_index: &'a Bound<'py, PyAny>,
        predictor: Option<&'a Bound<'py, PyAny>>,
    ) -> Call<'a, 'py> {
        Call { py, handle: &self.handle, callbacks: &self.callbacks, state, answer, next_index, predictor }
    }
}
