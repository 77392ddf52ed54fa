//! The worker's side: one `Port` a worker process.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use super::code;
use super::engine::PyEngine;
use crate::codec::{self, Outgoing};
use crate::config::INLINE_LIMIT;
use crate::error::Error;
use crate::interop::collate;
use crate::interop::dlpack::buffer::LeaseBuffer;
use crate::interop::fetcher::{StoppableIndices, TimedCollate};
use crate::interop::tensor::Bridge;
use crate::shm::arena::Arena;
use crate::shm::layout::{Geometry, WorkerState};
use crate::sys::signal::{self, stack_signal};
use crate::wire::{ResultKind, TaskEntry, TaskKind};
use crate::worker::kept::{Kept, WorkerLease};
use crate::worker::port::{Port, Received};
use crate::worker::stopwatch::Stopwatch;
use crate::worker::terminate;
use crate::worker::watchdog::{self, Parent};

/// A worker's connection to the main process.
#[pyclass(frozen, name = "Port", module = "rustloader._core")]
pub struct PyPort {
    port: Arc<Port>,
    /// `load_index(payload)`: unpickles an index batch.
    load_index: Py<PyAny>,
    /// Reused for each batch.
    payload: Mutex<Vec<u8>>,
    kept: Arc<Kept>,
    stopwatch: Arc<Stopwatch>,
    /// The main process, where no watchdog looks after it.
    unguarded: OnceLock<Parent>,
}

impl PyPort {
    /// Memory in the arena for `len` bytes; `None` where ordinary memory is the better choice. Calls Python's collector first if
    /// garbage may be what holds the arena's blocks.
    fn lease(&self, py: Python<'_>, len: usize) -> PyResult<Option<WorkerLease>> {
        // An error of a finalizer has been reported by Python already.
        let collect = || drop(py.import("gc").and_then(|gc| gc.call_method0("collect")));
        if !self.kept.has_room(len as u64, collect) {
            return Ok(None);
        }
        let pause = |time| py.detach(|| std::thread::sleep(time));
        Ok(WorkerLease::new(&self.port, &self.kept, len, pause)?)
    }

    /// Publishes a message and notes its size.
    fn publish(
        &self,
        outgoing: Outgoing<'_>,
        task: u64,
        kind: ResultKind,
        payload: &[u8],
    ) -> Result<(), Error> {
        self.kept.note_batch(outgoing.bytes());
        outgoing.send(task, kind, payload, self.stopwatch.take(&self.port))
    }

    /// Sends what is a plain tree; false, and nothing sent, for everything else.
    fn encode(
        &self,
        py: Python<'_>,
        task: u64,
        kind: ResultKind,
        value: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let mut payload = self.payload();
        let mut outgoing = Outgoing::new(&self.port);
        let plain = codec::encode(py, Bridge::get(py)?, value, &mut payload, &mut outgoing)?;
        if plain {
            self.publish(outgoing, task, kind, &payload)?;
        }
        codec::shrink(&mut payload);
        Ok(plain)
    }

    /// Waits for a task without the GIL. `None`: the worker is to leave.
    fn wait(&self, py: Python<'_>) -> PyResult<Option<TaskEntry>> {
        self.port.enter(WorkerState::Idle);
        loop {
            match py.detach(|| self.port.receive())? {
                Received::Task(entry) => return Ok(Some(entry)),
                Received::Stop => return Ok(None),
                Received::Nothing => {
                    py.check_signals()?;
                    if self.unguarded.get().is_some_and(|parent| !parent.is_alive()) {
                        return Ok(None);
                    }
                }
            }
        }
    }

    fn over(arena: Arc<Arena>, doorbell: OwnedFd, worker: u32, load_index: Py<PyAny>) -> PyResult<Self> {
        Ok(Self {
            port: Arc::new(Port::open(arena, worker, doorbell)?),
            load_index,
            payload: Mutex::default(),
            kept: Arc::default(),
            stopwatch: Arc::default(),
            unguarded: OnceLock::new(),
        })
    }

    fn payload(&self) -> MutexGuard<'_, Vec<u8>> {
        let mut payload = self.payload.lock().unwrap_or_else(PoisonError::into_inner);
        payload.clear();
        payload
    }
}

#[pymethods]
impl PyPort {
    /// Opens worker `worker`'s port. The descriptors are the caller's to give away.
    #[new]
    fn new(
        memfd: i32,
        doorbell: i32,
        geometry: (u64, u32, u32),
        worker: u32,
        load_index: Py<PyAny>,
    ) -> PyResult<Self> {
        // SAFETY: the caller gives both descriptors away; they are open.
        let (memfd, doorbell) = unsafe { (OwnedFd::from_raw_fd(memfd), OwnedFd::from_raw_fd(doorbell)) };
        let (total, workers, ring_slots) = geometry;
        let geometry = Geometry::of_file(total, workers, ring_slots)?;
        if worker >= workers {
            return Err(PyValueError::new_err(format!("an arena of {workers} workers for worker {worker}")));
        }
        Self::over(Arena::attach(memfd, geometry)?, doorbell, worker, load_index)
    }

    /// Opens worker `worker`'s port in a forked child, over what it has inherited of the main process's engine.
    #[staticmethod]
    fn inherit(engine: &PyEngine, worker: u32, load_index: Py<PyAny>) -> PyResult<Self> {
        // In a child the engine lets its descriptors be.
        // SAFETY: the number is the doorbell's, and nobody else in this process closes it.
        let doorbell = unsafe { OwnedFd::from_raw_fd(engine.handle.doorbell.as_fd().as_raw_fd()) };
        Self::over(engine.handle.arena.inherited(), doorbell, worker, load_index)
    }

    /// Starts the thread that ends this process after the main process `(pid, start time)` has ended. Where no thread can be
    /// had (RLIMIT_NPROC), the worker looks by itself when it is idle.
    fn watch(&self, parent: (i32, u64)) {
        let parent = Parent::told(parent.0, parent.1);
        if watchdog::start(self.port.clone(), parent).is_err() {
            let _ = self.unguarded.set(parent);
        }
    }

    /// Has this worker work on after a SIGTERM to the whole process group, for as long as the main process `main` may take to
    /// react. False where the system refuses that: SIGTERM does what it did before.
    fn survive_group_signal(&self, main: i32, alone: f64) -> bool {
        let alone = std::time::Duration::try_from_secs_f64(alone).unwrap_or(std::time::Duration::MAX);
        terminate::survive_group_signal(&self.port, main, alone).is_ok()
    }

    /// Has Python's faulthandler dump the stacks of this process into a file of its own whenever the main process asks for
    /// them by a signal. It does so in the signal's handler, whoever holds the GIL. Where that is refused, or the signal is the
    /// user's, the status page says so.
    fn offer_stack(&self, py: Python<'_>) {
        let Some(fd) = self.port.make_stack_file() else { return };
        let (all_threads, chain) = (true, false);
        let arguments = (stack_signal(), fd, all_threads, chain);
        let register = || py.import("faulthandler")?.call_method1("register", arguments);
        self.port.offer_stack(register().is_ok().then_some(fd));
    }

    /// The next thing to do: `(code, task, index)`, with an exception in the place of an index that cannot be loaded. Waits
    /// without the GIL.
    fn receive(&self, py: Python<'_>) -> PyResult<(u8, u64, Option<Py<PyAny>>)> {
        let entry = match self.port.take_up()? {
            Some(entry) => entry,
            None => match self.wait(py)? {
                Some(entry) => entry,
                None => return Ok((code::LEAVE, 0, None)),
            },
        };
        let in_block = entry.block.map(|_| self.port.payload.lock().unwrap_or_else(PoisonError::into_inner));
        let bytes = in_block.as_deref().map_or(&entry.inline[..], |payload| payload);
        let bytes = &bytes[..entry.len as usize];
        let index = match entry.kind {
            TaskKind::Plain => codec::decode_indices(py, bytes)?,
            TaskKind::Pickle => match self.load_index.bind(py).call1((PyBytes::new(py, bytes),)) {
                Ok(index) => index.unbind(),
                Err(error) if error.is_instance_of::<PyException>(py) => {
                    return Ok((code::UNREADABLE, entry.task, Some(error.into_value(py).into_any())));
                }
                Err(error) => return Err(error),
            },
            TaskKind::Resume => {
                self.port.enter(WorkerState::Starting);
                return Ok((code::RESUME, 0, None));
            }
            TaskKind::Leave => return Ok((code::LEAVE, 0, None)),
        };
        if let Some(mut payload) = in_block {
            codec::shrink(&mut payload);
        }
        Ok((code::FETCH, entry.task, Some(index)))
    }

    /// Sends a batch that is a plain tree; False, and nothing sent, when it has to be pickled: always where users have
    /// reducers of their own for tensors or arrays.
    fn send(
        &self,
        py: Python<'_>,
        task: u64,
        batch: Bound<'_, PyAny>,
        leaves_are_ours: bool,
    ) -> PyResult<bool> {
        self.stopwatch.end_fetch(&self.port, WorkerState::Pack);
        Ok(leaves_are_ours && self.encode(py, task, ResultKind::Plain, &batch)?)
    }

    /// Sends a batch as a pickle and the tensors and arrays that stand beside it; False, and nothing sent, when
    /// they are no plain ones. `tied`: unpickling it asks something of this process.
    fn send_pickle(
        &self,
        py: Python<'_>,
        task: u64,
        pickle: Bound<'_, PyBytes>,
        objects: Bound<'_, PyList>,
        tied: bool,
    ) -> PyResult<bool> {
        let kind = if tied { ResultKind::Tied } else { ResultKind::Pickle };
        let sum = codec::pickle_sum(&pickle);
        self.encode(py, task, kind, (pickle, objects, sum).into_pyobject(py)?.as_any())
    }

    /// Sends an error as a pickle.
    fn send_error(&self, task: u64, pickle: Bound<'_, PyBytes>) -> PyResult<()> {
        Ok(self.publish(Outgoing::new(&self.port), task, ResultKind::Error, pickle.as_bytes())?)
    }

    /// Says that the iterable dataset is at its end.
    fn exhausted(&self, task: u64) -> PyResult<()> {
        Ok(self.port.answer(task, ResultKind::Exhausted)?)
    }

    /// Answers to the begin of a new epoch.
    fn resumed(&self) -> PyResult<()> {
        Ok(self.port.answer(0, ResultKind::Resumed)?)
    }

    /// The worker's last word. From here on a Ctrl-C is for the main process alone: in the exit code of multiprocessing it
    /// would only print a traceback.
    fn leave(&self, py: Python<'_>) {
        signal::ignore(libc::SIGINT);
        // One that Python has noted already, and would raise after this call.
        let _ = py.check_signals();
        self.port.leave();
    }

    /// An index list that ends the fetch between two samples when the worker is to leave.
    fn stoppable(&self, index: Bound<'_, PyAny>) -> StoppableIndices {
        StoppableIndices::new(self.port.clone(), index.unbind())
    }

    /// `collate_fn`, timed.
    fn timed(&self, collate_fn: Bound<'_, PyAny>) -> TimedCollate {
        TimedCollate::new(self.port.clone(), self.stopwatch.clone(), collate_fn.unbind())
    }

    /// An `UntypedStorage` of `nbytes` bytes in the arena; None where ordinary memory is the better choice.
    fn storage(&self, py: Python<'_>, nbytes: usize) -> PyResult<Option<Py<PyAny>>> {
        if nbytes < INLINE_LIMIT {
            return Ok(None);
        }
        let Some(lease) = self.lease(py, nbytes)? else { return Ok(None) };
        LeaseBuffer::new(lease).storage(py).map(Some)
    }

    /// default_collate for plain tensors of one dtype and shape; None: torch's function is to do it.
    fn stack(&self, py: Python<'_>, batch: Bound<'_, PyAny>) -> PyResult<Option<Py<PyAny>>> {
        collate::stack(py, Bridge::get(py)?, &batch, &mut |len| self.lease(py, len))
    }

    /// default_collate for plain floats or ints; None: torch's function is to do it.
    fn numbers(&self, py: Python<'_>, batch: Bound<'_, PyAny>) -> PyResult<Option<Py<PyAny>>> {
        collate::numbers(py, Bridge::get(py)?, &batch)
    }
}
