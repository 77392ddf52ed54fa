//! The main process's side: one `Engine` an iterator.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use super::codec;
use super::dlpack::LeaseBuffer;
use super::runtime::Runtime;
use super::tensor::Bridge;
use super::turn::{Turn, closed};
use crate::engine::completions::Message;
use crate::engine::{Engine, Hands, Incoming, Step};
use crate::error::Error;
use crate::scheduler::Settings;
use crate::shm::forks;
use crate::shm::layout::WorkerState;
use crate::sys::pidfd::{ExitStatus, signal_name};
use crate::wire::{ResultKind, TaskKind};
use crate::worker::watchdog::Parent;

/// Batches that engines of this process have handed out.
static BATCHES: AtomicU64 = AtomicU64::new(0);

/// What `next` and `reset` answer; the same numbers stand in `_iter.py`.
mod code {
    pub const BATCH: u8 = 0;
    pub const ERROR: u8 = 1;
    pub const SUBMIT: u8 = 2;
    pub const DEAD: u8 = 3;
    pub const END: u8 = 4;
    pub const TIMED_OUT: u8 = 5;
}

struct State {
    engine: Engine<Py<PyAny>>,
    /// Reused for each message.
    buffer: Vec<u8>,
    /// Reused for each index batch.
    payload: Vec<u8>,
}

/// The engine of one iterator. All methods but those marked so want the turn (`enter`, `leave`).
#[pyclass(frozen, name = "Engine", module = "rustloader._core")]
pub struct PyEngine {
    state: Mutex<State>,
    turn: Turn,
    /// Batches handed out.
    batches: AtomicU64,
    /// What may be used without the turn.
    pub hands: Arc<Hands>,
    runtime: Arc<Runtime>,
}

impl PyEngine {
    fn state(&self) -> PyResult<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Ok(state),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(Error::usage("the engine was used without the turn").into()),
        }
    }

    fn open(&self, py: Python<'_>, state: &mut State, incoming: &Incoming) -> PyResult<Py<PyAny>> {
        let buffer = std::mem::take(&mut state.buffer);
        let mut message = Message::open(state.engine.arena(), incoming, buffer)?;
        let object = if incoming.entry.kind == ResultKind::Plain {
            let (payload, leaves) = message.parts();
            codec::decode(py, Bridge::get(py)?, payload, leaves)?
        } else {
            let buffers = PyList::empty(py);
            for index in 0..message.leaves.len() {
                buffers.append(Py::new(py, LeaseBuffer::new(message.leaves.take(index)?))?)?;
            }
            let payload = PyBytes::new(py, message.payload());
            self.runtime.loads.bind(py).call1((payload, buffers))?.unbind()
        };
        state.buffer = message.into_buffer();
        Ok(object)
    }

    /// Waits without the GIL, then looks for signals, then for what has come.
    fn wait(&self, py: Python<'_>, state: &mut State, deadline: Option<Duration>) -> PyResult<()> {
        let engine = &mut state.engine;
        py.detach(|| engine.wait(deadline))?;
        py.check_signals()?;
        Ok(state.engine.after_wait()?)
    }
}

#[pymethods]
impl PyEngine {
    #[new]
    fn new(
        py: Python<'_>,
        workers: usize,
        prefetch_factor: usize,
        in_order: bool,
        persistent: bool,
        timeout: f64,
    ) -> PyResult<Self> {
        let timeout = match timeout {
            none if none <= 0.0 => None,
            some => Some(
                Duration::try_from_secs_f64(some)
                    .map_err(|_| PyValueError::new_err(format!("timeout={some} is not a time in seconds")))?,
            ),
        };
        let settings = Settings { workers, prefetch_factor, in_order, persistent, timeout };
        let engine = py.detach(|| Engine::new(settings))?;
        let hands = engine.hands().clone();
        let state = State { engine, buffer: Vec::new(), payload: Vec::new() };
        Ok(Self {
            state: Mutex::new(state),
            turn: Turn::default(),
            batches: AtomicU64::new(0),
            hands,
            runtime: Runtime::get(py)?,
        })
    }

    /// What a worker needs to open its port: memfd, doorbell, sizes, and who the main process is.
    fn shipment(&self) -> (i32, i32, (u64, u32, u32), (i32, u64)) {
        let geometry = self.hands.arena.geometry();
        let parent = Parent::this_process();
        (
            self.hands.arena.raw_fd(),
            self.hands.doorbell.as_fd().as_raw_fd(),
            (geometry.total, geometry.workers, geometry.ring_slots),
            (parent.pid, parent.start_time),
        )
    }

    /// Takes the turn; waits for it without the GIL.
    fn enter(&self, py: Python<'_>) -> PyResult<()> {
        self.turn.take(py, &self.hands)
    }

    /// Gives the turn back.
    fn leave(&self) {
        self.turn.give_back();
    }

    /// Notes a worker that has been started.
    fn started(&self, worker: u32, pid: i32) -> PyResult<()> {
        Ok(self.state()?.engine.started(worker, pid)?)
    }

    /// Sends an index batch to the worker whose turn it is; False when none takes tasks any more.
    fn submit(&self, py: Python<'_>, index: Bound<'_, PyAny>) -> PyResult<bool> {
        let mut state = self.state()?;
        if self.hands.closing() {
            return Err(closed(py, &self.hands));
        }
        let State { engine, payload, .. } = &mut *state;
        payload.clear();
        let sent = if codec::encode_indices(py, &index, payload) {
            engine.submit(index.unbind(), TaskKind::Plain, payload)?
        } else {
            let pickle = self.runtime.dump_index.bind(py).call1((&index,))?;
            let pickle = pickle.cast::<PyBytes>()?;
            engine.submit(index.unbind(), TaskKind::Pickle, pickle.as_bytes())?
        };
        Ok(sent.is_some())
    }

    /// The next thing to do: `(code, value)`.
    fn next(&self, py: Python<'_>) -> PyResult<(u8, Option<Py<PyAny>>)> {
        let mut state = self.state()?;
        loop {
            match state.engine.step()? {
                Step::Deliver { tag, incoming } => {
                    let object = self.open(py, &mut state, &incoming)?;
                    drop(tag);
                    if incoming.is_batch() {
                        BATCHES.fetch_add(1, Ordering::Relaxed);
                        self.batches.fetch_add(1, Ordering::Relaxed);
                        return Ok((code::BATCH, Some(object)));
                    }
                    return Ok((code::ERROR, Some(object)));
                }
                Step::Submit => return Ok((code::SUBMIT, None)),
                Step::Dead { worker, .. } => {
                    return Ok((code::DEAD, Some(worker.into_pyobject(py)?.into_any().unbind())));
                }
                Step::End => return Ok((code::END, None)),
                Step::TimedOut => return Ok((code::TIMED_OUT, None)),
                Step::Closed => return Err(closed(py, &self.hands)),
                Step::Wait(deadline) => self.wait(py, &mut state, deadline)?,
            }
        }
    }

    /// Begins a new epoch of persistent workers and waits until all of them have answered; the code of what came
    /// instead, or `END` when they have.
    fn reset(&self, py: Python<'_>) -> PyResult<(u8, Option<Py<PyAny>>)> {
        let mut state = self.state()?;
        state.engine.reset()?;
        while state.engine.resuming() {
            match state.engine.step()? {
                Step::Dead { worker, .. } => {
                    return Ok((code::DEAD, Some(worker.into_pyobject(py)?.into_any().unbind())));
                }
                Step::TimedOut => return Ok((code::TIMED_OUT, None)),
                Step::Closed => return Err(closed(py, &self.hands)),
                Step::Wait(deadline) => self.wait(py, &mut state, deadline)?,
                Step::Deliver { .. } | Step::Submit | Step::End => {}
            }
        }
        Ok((code::END, None))
    }

    /// The index of the oldest task that a worker has not answered; None if there is none.
    fn oldest_index(&self, py: Python<'_>, worker: u32) -> PyResult<Option<Py<PyAny>>> {
        Ok(self.state()?.engine.oldest_task_of(worker).map(|(_, index)| index.clone_ref(py)))
    }

    /// Whether each worker takes tasks in this epoch.
    fn active(&self) -> PyResult<Vec<bool>> {
        Ok(self.state()?.engine.active())
    }

    /// Batches handed out so far. Without the turn.
    #[getter]
    fn batches(&self) -> u64 {
        self.batches.load(Ordering::Relaxed)
    }

    /// Tells the workers to leave and wakes a waiting `next`. Without the turn; may be called again. With `exiting` threads
    /// that wait in `next` stay where they are.
    #[pyo3(signature = (exiting = false))]
    fn close(&self, exiting: bool) -> PyResult<()> {
        if exiting {
            self.hands.exit();
        }
        Ok(self.hands.close()?)
    }

    /// True once `close` was called. Without the turn.
    #[getter]
    fn closing(&self) -> bool {
        self.hands.closing()
    }

    /// False in a forked child. Without the turn.
    #[getter]
    fn is_ours(&self) -> bool {
        self.hands.is_ours()
    }

    /// Number of workers that run. Without the turn.
    fn alive(&self) -> usize {
        self.hands.alive()
    }

    /// Waits for the workers to end, at most `seconds` and at most one slice. Without the turn and without the GIL.
    fn wait_gone(&self, py: Python<'_>, seconds: f64) -> PyResult<bool> {
        let limit = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX);
        Ok(py.detach(|| self.hands.wait_gone(limit))?)
    }

    /// Sends a signal to the workers that run. Without the turn.
    fn signal_all(&self, signal: i32) {
        self.hands.signal_all(signal);
    }

    /// How a worker ended: `("code", n, "")`, `("signal", n, name)`, or None where it cannot be told. Without the turn.
    fn exit_status(&self, worker: u32) -> Option<(&'static str, i32, String)> {
        match self.hands.process(worker)?.status()? {
            ExitStatus::Code(code) => Some(("code", code, String::new())),
            ExitStatus::Signal(signal) => Some(("signal", signal, signal_name(signal))),
        }
    }

    /// What a worker says of itself: state, task, seconds in the state, tasks done, seconds in each state. Without the
    /// turn.
    fn worker_status<'py>(&self, py: Python<'py>, worker: u32) -> PyResult<Bound<'py, PyDict>> {
        if worker >= self.hands.arena.geometry().workers {
            return Err(PyValueError::new_err(format!("there is no worker {worker}")));
        }
        let page = &self.hands.arena.control(worker).status;
        let status = PyDict::new(py);
        let since = page.since_ns.load(Ordering::Relaxed);
        let now = crate::sys::clock::monotonic_ns();
        status.set_item("state", WorkerState::from_u32(page.state.load(Ordering::Relaxed)).name())?;
        status.set_item("pid", page.pid.load(Ordering::Relaxed))?;
        status.set_item("task", page.task.load(Ordering::Relaxed))?;
        status.set_item("tasks_done", page.tasks_done.load(Ordering::Relaxed))?;
        status.set_item("seconds_in_state", now.saturating_sub(since) as f64 / 1e9)?;
        let spent = PyDict::new(py);
        for (number, word) in page.spent_ns.iter().enumerate() {
            let name = WorkerState::from_u32(number as u32).name();
            spent.set_item(name, word.load(Ordering::Relaxed) as f64 / 1e9)?;
        }
        status.set_item("seconds", spent)?;
        Ok(status)
    }

    /// Gives everything back after the workers have ended. Does nothing while a `next` holds the turn.
    fn finish(&self) -> PyResult<()> {
        if self.turn.try_take() {
            let finished = self.state().map(|mut state| state.engine.finish());
            self.turn.give_back();
            return finished;
        }
        Ok(())
    }

    /// Bytes of the arena that have pages, and those of them that somebody holds. Without the turn.
    fn memory(&self) -> (u64, u64) {
        self.hands.arena.usage()
    }
}

/// Number of batches that engines of this process have delivered.
#[pyfunction]
pub fn engine_batches() -> u64 {
    BATCHES.load(Ordering::Relaxed)
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
