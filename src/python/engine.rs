//! The main process's side: one `Engine` an iterator.

use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use pyo3::exceptions::{PyException, PyStopIteration, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use super::codec;
use super::pin::{self, Held, Pinner, Ready};
use super::runtime::Runtime;
use super::tensor::Bridge;
use super::turn::{Turn, closed};
use crate::engine::completions::Message;
use crate::engine::pin::Control;
use crate::engine::{Ending, Engine, Hands, Incoming, Step};
use crate::error::Error;
use crate::scheduler::Settings;
use crate::shm::forks;
use crate::shm::layout::WorkerState;
use crate::sys::pidfd::{ExitStatus, signal_name};
use crate::wire::{ResultKind, TaskKind};
use crate::worker::watchdog::Parent;

/// Batches that engines of this process have handed out.
static BATCHES: AtomicU64 = AtomicU64::new(0);

/// What `next` and `begin` answer; the same numbers stand in `_iter.py`.
mod code {
    pub const BATCH: u8 = 0;
    pub const ERROR: u8 = 1;
    pub const DEAD: u8 = 2;
    pub const END: u8 = 3;
    pub const TIMED_OUT: u8 = 4;
    pub const NO_PIN_THREAD: u8 = 5;
}

/// Seconds from which on a timeout is none: 30 years.
const LONGEST_TIMEOUT: f64 = 1e9;

/// So often an unpickling that has failed is tried again.
const RELOADS: usize = 4;

/// What `progress` answers.
type Counters = (u64, usize, Vec<usize>, Vec<(u64, u32)>);

/// A result that has to be unpickled.
struct Pickled {
    payload: Py<PyBytes>,
    /// What stands beside it.
    objects: Py<PyList>,
    is_batch: bool,
}

struct State {
    engine: Engine<Py<PyAny>, Ready>,
    /// Errors of the sampler that are to be raised by the next calls.
    held_back: VecDeque<PyErr>,
    /// Indices that an error of the sampler has kept from being sent, and that are to be asked for once more.
    owed: u32,
    /// An index batch for which there was no memory: it is sent before the sampler is asked again.
    unsent: Option<Py<PyAny>>,
    /// A result whose unpickling was interrupted at first.
    unread: Option<(u8, Py<PyAny>)>,
    /// Reused for each message.
    buffer: Vec<u8>,
    /// Reused for each index batch.
    payload: Vec<u8>,
}

/// The engine of one iterator. Methods take the turn by themselves, but for those marked so.
#[pyclass(frozen, name = "Engine", module = "rustloader._core")]
pub struct PyEngine {
    state: Mutex<State>,
    turn: Turn,
    /// Batches handed out.
    batches: AtomicU64,
    /// The workers have ended, and whoever has the turn is to finish.
    finish_wanted: AtomicBool,
    /// What may be used without the turn.
    pub hands: Arc<Hands>,
    runtime: Arc<Runtime>,
}

/// The turn and what may be used with it. Given back when it is dropped, also by an error.
struct InTurn<'a> {
    engine: &'a PyEngine,
    state: Option<MutexGuard<'a, State>>,
}

impl InTurn<'_> {
    fn state(&mut self) -> &mut State {
        match &mut self.state {
            Some(state) => state,
            None => unreachable!("a turn without its state is only ever dropped"),
        }
    }
}

impl Drop for InTurn<'_> {
    fn drop(&mut self) {
        let mut ending = Ending::Nothing;
        if let Some(state) = &mut self.state {
            state.engine.interrupted();
            if self.engine.finish_wanted.load(Ordering::Acquire) {
                ending = state.engine.finish();
            }
        }
        self.state = None;
        self.engine.turn.give_back();
        if !matches!(ending, Ending::Nothing) {
            Python::attach(|py| py.detach(|| ending.carry_out()));
        }
    }
}

/// Keeps a message's buffer for the next one.
fn keep(buffer: &mut Vec<u8>, message: Message) {
    *buffer = message.into_buffer();
    codec::shrink(buffer);
}

/// A result, as far as it can be read without Python code.
enum Read {
    Batch(Py<PyAny>),
    Pickled(Pickled),
}

fn read_message(py: Python<'_>, state: &mut State, incoming: &Incoming) -> PyResult<Read> {
    let buffer = std::mem::take(&mut state.buffer);
    let mut message = Message::open(state.engine.arena(), incoming, buffer)?;
    let (payload, objects) = if incoming.entry.kind == ResultKind::Error {
        (PyBytes::new(py, message.payload()).unbind(), PyList::empty(py).unbind())
    } else {
        let (payload, leaves) = message.parts();
        let object = codec::decode(py, Bridge::get(py)?, payload, leaves)?;
        if incoming.entry.kind == ResultKind::Plain {
            keep(&mut state.buffer, message);
            return Ok(Read::Batch(object));
        }
        let (pickle, objects) = codec::pickle_of(object.bind(py))?;
        (pickle.unbind(), objects.unbind())
    };
    keep(&mut state.buffer, message);
    Ok(Read::Pickled(Pickled { payload, objects, is_batch: incoming.is_batch() }))
}

/// Puts a code and its value where the caller finds them.
fn give<'py>(hand: &Bound<'py, PyList>, code: u8, value: impl IntoPyObject<'py>) -> PyResult<()> {
    hand.set_item(1, value)?;
    hand.set_item(0, code)
}

/// Keeps an exception for the next call; what is none of the sampler's (an interrupt) is raised at once.
fn hold_back(py: Python<'_>, state: &mut State, error: PyErr) -> PyResult<()> {
    if !error.is_instance_of::<PyException>(py) {
        return Err(error);
    }
    state.held_back.push_back(error);
    Ok(())
}

/// The sampler's next index; `None` at its end.
fn draw<'py>(next_index: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    match next_index.call0() {
        Ok(index) => Ok(Some(index)),
        Err(error) if error.is_instance_of::<PyStopIteration>(next_index.py()) => Ok(None),
        Err(error) => Err(error),
    }
}

impl PyEngine {
    /// Takes the turn; waits for it without the GIL.
    fn enter(&self, py: Python<'_>) -> PyResult<InTurn<'_>> {
        self.turn.take(py, &self.hands)?;
        match self.state.try_lock() {
            Ok(state) => Ok(InTurn { engine: self, state: Some(state) }),
            Err(TryLockError::Poisoned(poisoned)) => {
                Ok(InTurn { engine: self, state: Some(poisoned.into_inner()) })
            }
            Err(TryLockError::WouldBlock) => {
                self.turn.give_back();
                Err(Error::usage("the engine was used without the turn").into())
            }
        }
    }

    /// Takes one more index of the sampler, if there is one, and sends it.
    fn refill(&self, py: Python<'_>, state: &mut State, next_index: &Bound<'_, PyAny>) -> PyResult<()> {
        let index = match state.unsent.take() {
            Some(index) => Some(index.into_bound(py)),
            None => draw(next_index)?,
        };
        match index {
            Some(index) => self.submit(py, state, index),
            None => Ok(()),
        }
    }

    /// Sends an index batch to the worker whose turn it is. When none takes tasks any more it is dropped, as in torch.
    fn submit(&self, py: Python<'_>, state: &mut State, index: Bound<'_, PyAny>) -> PyResult<()> {
        let State { engine, payload, unsent, .. } = state;
        payload.clear();
        let tag = index.clone().unbind();
        let sent = if codec::encode_indices(py, &index, payload) {
            engine.submit(tag, TaskKind::Plain, payload)
        } else {
            let pickle = self.runtime.dump_index.bind(py).call1((&index,))?;
            let pickle = pickle.cast::<PyBytes>()?;
            engine.submit(tag, TaskKind::Pickle, pickle.as_bytes())
        };
        if let Err(Error::NoMemory { .. } | Error::RegionFull { .. }) = sent {
            *unsent = Some(index.unbind());
        }
        codec::shrink(payload);
        sent?;
        Ok(())
    }

    /// Reads a result into `hand`.
    fn read(
        &self,
        py: Python<'_>,
        state: &mut State,
        hand: &Bound<'_, PyList>,
        incoming: &Incoming,
    ) -> PyResult<()> {
        match read_message(py, state, incoming)? {
            Read::Batch(object) => self.deliver(hand, code::BATCH, object),
            Read::Pickled(pickle) => self.read_pickle(py, state, hand, pickle),
        }
    }

    /// Unpickles a result that asks something of its worker, which may leave afterwards. An error stands in the batch's place; an
    /// interrupt comes at once, and the batch is read once more, as far as it can be.
    fn open(&self, py: Python<'_>, state: &mut State, incoming: &Incoming) -> PyResult<()> {
        let mut interrupt = Ok(());
        let opened = match read_message(py, state, incoming) {
            Ok(Read::Batch(object)) => Ok(object),
            Ok(Read::Pickled(pickle)) => match self.load(py, &pickle) {
                Err(error) if !error.is_instance_of::<PyException>(py) => {
                    interrupt = Err(error);
                    self.load(py, &pickle)
                }
                loaded => loaded,
            },
            Err(error) => Err(error),
        };
        state.engine.opened(match opened {
            Ok(batch) => Ready::Batch(Held::new(batch)),
            Err(error) => Ready::Raised(error),
        })?;
        interrupt
    }

    fn load(&self, py: Python<'_>, pickle: &Pickled) -> PyResult<Py<PyAny>> {
        self.runtime.loads.bind(py).call1((&pickle.payload, &pickle.objects)).map(Bound::unbind)
    }

    /// Unpickling runs Python code, and signal handlers in it. What a handler raises there looks like an error of the batch, but
    /// does not come again: so it is tried again, and where it then succeeds the batch is kept for the next call.
    fn read_pickle(
        &self,
        py: Python<'_>,
        state: &mut State,
        hand: &Bound<'_, PyList>,
        pickle: Pickled,
    ) -> PyResult<()> {
        let code = if pickle.is_batch { code::BATCH } else { code::ERROR };
        let error = match self.load(py, &pickle) {
            Ok(object) => return self.deliver(hand, code, object),
            Err(error) => error,
        };
        if let Some(object) = (0..RELOADS).find_map(|_| self.load(py, &pickle).ok()) {
            state.unread = Some((code, object));
        }
        Err(error)
    }

    fn deliver<'py>(
        &self,
        hand: &Bound<'py, PyList>,
        code: u8,
        object: impl IntoPyObject<'py>,
    ) -> PyResult<()> {
        if code == code::BATCH {
            BATCHES.fetch_add(1, Ordering::Relaxed);
            self.batches.fetch_add(1, Ordering::Relaxed);
        }
        give(hand, code, object)
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
        // As in torch, what is not greater than 0 is no limit (NaN is neither); nor is what no clock can count.
        let timeout = if timeout > 0.0 && timeout < LONGEST_TIMEOUT { Some(timeout) } else { None };
        let timeout = timeout.map(Duration::from_secs_f64);
        let settings = Settings { workers, prefetch_factor, in_order, persistent, timeout };
        let engine = py.detach(|| Engine::new(settings))?;
        let hands = engine.hands().clone();
        let state = State {
            engine,
            held_back: VecDeque::new(),
            owed: 0,
            unsent: None,
            unread: None,
            buffer: Vec::new(),
            payload: Vec::new(),
        };
        Ok(Self {
            state: Mutex::new(state),
            turn: Turn::default(),
            batches: AtomicU64::new(0),
            finish_wanted: AtomicBool::new(false),
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

    /// Notes a worker that has been started.
    fn started(&self, py: Python<'_>, worker: u32, pid: i32) -> PyResult<()> {
        Ok(self.enter(py)?.state().engine.started(worker, pid)?)
    }

    /// Begins an epoch: for all but the first has the workers answer, then sends an index for each task that may be
    /// outstanding. `hand` gets the code of what came instead, or `END`.
    fn begin(
        &self,
        py: Python<'_>,
        hand: &Bound<'_, PyList>,
        next_index: &Bound<'_, PyAny>,
        is_first: bool,
    ) -> PyResult<()> {
        let mut turn = self.enter(py)?;
        let state = turn.state();
        state.held_back.clear();
        state.owed = 0;
        state.unsent = None;
        state.unread = None;
        if !is_first {
            state.engine.reset()?;
            while state.engine.resuming() {
                match state.engine.step()? {
                    Step::Dead { worker, .. } => return give(hand, code::DEAD, worker),
                    Step::TimedOut => return give(hand, code::TIMED_OUT, py.None()),
                    Step::Closed => return Err(closed(py, &self.hands)),
                    Step::NoPinThread(cause) => return give(hand, code::NO_PIN_THREAD, cause),
                    Step::Wait(deadline) => self.wait(py, state, deadline)?,
                    Step::Open(incoming) => self.open(py, state, &incoming)?,
                    Step::Deliver { .. } | Step::Submit | Step::End => {}
                }
            }
        }
        for _ in 0..state.engine.max_tasks() {
            self.refill(py, state, next_index)?;
        }
        give(hand, code::END, py.None())
    }

    /// Puts the next thing to do into `hand`: a code and its value. For each result that is about to be handed out one more
    /// index is wanted first, as in torch; the sampler's error there comes at the next call, because the batch is sound.
    ///
    /// The result lies in `hand` before this returns: an exception that a signal handler raises just then cannot take it away.
    fn next(&self, py: Python<'_>, hand: &Bound<'_, PyList>, next_index: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut turn = self.enter(py)?;
        let state = turn.state();
        if let Some(error) = state.held_back.pop_front() {
            return Err(error);
        }
        for _ in 0..state.owed {
            let refilled = self.refill(py, state, next_index);
            if refilled.as_ref().is_err_and(|error| !error.is_instance_of::<PyException>(py)) {
                return refilled;
            }
            // Without memory for an index the next call tries again: the epoch must not end before it is sent.
            let unsent = state.unsent.is_some();
            if !unsent {
                state.owed -= 1;
            }
            if let Err(error) = refilled {
                hold_back(py, state, error)?;
            }
            if unsent {
                break;
            }
        }
        if let Some((code, object)) = state.unread.take() {
            return self.deliver(hand, code, object);
        }
        loop {
            match state.engine.step()? {
                Step::Deliver { tag, incoming, ready } => {
                    drop(tag);
                    return match ready {
                        None => self.read(py, state, hand, &incoming),
                        Some(Ready::Batch(batch)) => self.deliver(hand, code::BATCH, batch.take()),
                        Some(Ready::Raised(error)) => Err(error),
                        Some(Ready::Error(wrapper)) => self.deliver(hand, code::ERROR, wrapper.take()),
                    };
                }
                Step::Open(incoming) => self.open(py, state, &incoming)?,
                Step::Submit => {
                    if let Err(error) = self.refill(py, state, next_index) {
                        // An interrupt may be behind it, which the sampler would survive: it is asked once more later.
                        state.owed += 1;
                        hold_back(py, state, error)?;
                    }
                }
                Step::Dead { worker, .. } => return give(hand, code::DEAD, worker),
                Step::End => match state.held_back.pop_front() {
                    Some(error) => return Err(error),
                    None => return give(hand, code::END, py.None()),
                },
                Step::TimedOut => return give(hand, code::TIMED_OUT, py.None()),
                Step::Closed => return Err(closed(py, &self.hands)),
                Step::NoPinThread(cause) => return give(hand, code::NO_PIN_THREAD, cause),
                Step::Wait(deadline) => self.wait(py, state, deadline)?,
            }
        }
    }

    /// Starts the pin thread, after the workers. `pinner` is a `_pin.Pinner`.
    fn start_pinning(&self, py: Python<'_>, pinner: Py<PyAny>) -> PyResult<()> {
        let pinner = Pinner::new(py, pinner)?;
        Ok(self.enter(py)?.state().engine.start_pinning(pinner, pin::run)?)
    }

    /// Whether a pin thread runs. Without the turn.
    fn pinning(&self) -> bool {
        self.hands.is_ours() && self.hands.pinning().is_some_and(Control::is_alive)
    }

    /// Tells the pin thread to end. Without the turn.
    fn stop_pinning(&self) -> PyResult<()> {
        if self.hands.is_ours() {
            self.hands.stop_pinning()?;
        }
        Ok(())
    }

    /// Waits for the pin thread's end, at most `seconds`; says whether it has ended. Without the turn and without the GIL.
    #[pyo3(signature = (seconds = None))]
    fn join_pinning(&self, py: Python<'_>, seconds: Option<f64>) -> PyResult<bool> {
        if !self.hands.is_ours() {
            return Ok(true);
        }
        let Some(control) = self.hands.pinning() else { return Ok(true) };
        if control.is_current() {
            return Ok(false);
        }
        let limit = seconds.map_or(Duration::MAX, |seconds| {
            Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
        });
        let start = crate::sys::clock::monotonic();
        loop {
            let left = limit.saturating_sub(crate::sys::clock::monotonic() - start);
            if py.detach(|| control.join(left)) {
                return Ok(true);
            }
            if left.is_zero() {
                return Ok(false);
            }
            py.check_signals()?;
        }
    }

    /// The index of the oldest task that a worker has not answered; None if there is none, or another thread is in `next`.
    fn oldest_index(&self, py: Python<'_>, worker: u32) -> Option<Py<PyAny>> {
        let state = self.state.try_lock().ok()?;
        state.engine.oldest_task_of(worker).map(|(_, index)| index.clone_ref(py))
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
        self.batches.load(Ordering::Relaxed)
    }

    /// Tells the workers to leave and wakes a waiting `next`. Without the turn; may be called again. With `exiting` threads
    /// that wait in `next` stay where they are.
    #[pyo3(signature = (exiting = false))]
    fn close(&self, exiting: bool) -> PyResult<()> {
        if !self.hands.is_ours() {
            return Ok(());
        }
        if exiting {
            self.hands.exit();
        }
        self.hands.close();
        Ok(())
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

    /// Gives everything back after the workers have ended; while a `next` holds the turn, as soon as it gives that back.
    fn finish(&self) {
        self.finish_wanted.store(true, Ordering::Release);
        if self.turn.try_take() {
            drop(InTurn { engine: self, state: self.state.try_lock().ok() });
        }
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
