//! The worker's side: one `Port` per worker process.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use super::cache::PyCache;
use super::engine::PyEngine;
use super::sizes::Sizes;
use super::{code, remote};
use crate::codec::{self, Outgoing, gathered};
use crate::config::{ARRAY_MIN, INLINE_LIMIT};
use crate::copy::copy;
use crate::interop::array_tensor::ArrayTensor;
use crate::interop::buffer::LeaseBuffer;
use crate::interop::collate;
use crate::interop::fetcher::{self, StoppableIndices, TimedCollate};
use crate::interop::gather;
use crate::interop::numpy_memory::NumpyMemory;
use crate::interop::tensor::Bridge;
use crate::shm::arena::Arena;
use crate::shm::layout::{Geometry, WorkerState};
use crate::sync::lock;
use crate::sys::signal::{self, stack_signal};
use crate::tree::layout::{Style, TransferPlan};
use crate::wire::{self, ResultKind, TaskEntry, TaskKind};
use crate::worker::kept::{Kept, WorkerLease};
use crate::worker::port::{Port, Received};
use crate::worker::stopwatch::Stopwatch;
use crate::worker::terminate;
use crate::worker::watchdog::{self, Parent};

/// A worker's connection to the main process. `_core.pyi` documents the methods.
#[pyclass(frozen, name = "Port", module = "rustloader._core")]
pub struct PyPort {
    port: Arc<Port>,
    /// `load_index(payload)`: unpickles an index batch.
    load_index: Py<PyAny>,
    /// The buffer for encoding, reused from batch to batch.
    payload: Mutex<Vec<u8>>,
    kept: Arc<Kept>,
    stopwatch: Arc<Stopwatch>,
    /// The handler that makes NumPy allocate arrays in the worker's region, if it is in use.
    numpy_memory: OnceLock<NumpyMemory>,
    /// The main process, whose death the worker itself must detect; set only if there is no watchdog thread.
    polled_parent: OnceLock<Parent>,
}

impl PyPort {
    /// Decodes the payload of an entry that begins an epoch. Returns `code`, the number of the epoch's first task, and
    /// the message of `Engine.begin`.
    fn epoch(&self, py: Python<'_>, code: u8, payload: &[u8]) -> PyResult<(u8, u64, Option<Py<PyAny>>)> {
        self.port.enter(WorkerState::Starting);
        let (first_task, message) = wire::read_epoch(payload)?;
        Ok((code, first_task, Some(PyBytes::new(py, message).into_any().unbind())))
    }

    /// Allocates `len` bytes in the arena. Returns `None` if the region is full, or if the worker's objects hold too
    /// much of it even after Python's garbage collector has run. The caller then uses the heap.
    fn lease(&self, py: Python<'_>, len: usize) -> PyResult<Option<WorkerLease>> {
        // Python itself reports errors that finalizers raise.
        let collect = || drop(py.import("gc").and_then(|gc| gc.call_method0("collect")));
        if !self.kept.has_room(len as u64, collect) {
            return Ok(None);
        }
        let pause = |time| py.detach(|| std::thread::sleep(time));
        Ok(WorkerLease::new(&self.port, &self.kept, len, pause)?)
    }

    fn publish(&self, outgoing: Outgoing<'_>, task: u64, kind: ResultKind, payload: &[u8]) -> PyResult<()> {
        self.kept.note_batch(outgoing.bytes());
        Ok(outgoing.send(task, kind, payload, self.stopwatch.take(&self.port))?)
    }

    /// Sends `value` if it is a plain tree; otherwise sends nothing and returns false. The list `holder`, which this
    /// method may empty, has the only other reference to `value`, unless the worker also keeps one. Without `holder`,
    /// arrays are copied.
    fn encode(
        &self,
        task: u64,
        kind: ResultKind,
        value: Bound<'_, PyAny>,
        holder: Option<&Bound<'_, PyList>>,
    ) -> PyResult<bool> {
        let py = value.py();
        let mut payload = self.payload();
        let mut outgoing = Outgoing::new(&self.port, holder.is_some());
        let plain = codec::encode(Bridge::get(py)?, &value, &mut payload, &mut outgoing)?;
        if plain {
            if outgoing.begin_settling() {
                drop(value);
                holder.map_or(Ok(()), |list| list.del_slice(0, list.len()))?;
                // Copy with the GIL held: code that still has a reference to the array may write to it as soon as
                // Python code runs again.
                // SAFETY: `outgoing` has noted the array's block, so the block stays allocated; `to` points to `len`
                // fresh bytes.
                outgoing.settle(|from, to, len| unsafe { copy(from, to, len, true) })?;
            }
            self.publish(outgoing, task, kind, &payload)?;
        }
        codec::shrink(&mut payload);
        Ok(plain)
    }

    /// Waits for a task without the GIL. Returns `None` if the worker must exit, for example because the main process
    /// has died.
    fn wait(&self, py: Python<'_>) -> PyResult<Option<TaskEntry>> {
        fetcher::show_activity(py, &self.port, || self.port.enter(WorkerState::Idle));
        loop {
            match py.detach(|| self.port.receive())? {
                Received::Task(entry) => return Ok(Some(entry)),
                Received::Stop => return Ok(None),
                Received::Nothing => {
                    py.check_signals()?;
                    if self.polled_parent.get().is_some_and(|parent| !parent.is_alive()) {
                        return Ok(None);
                    }
                }
            }
        }
    }

    fn over(port: Port, load_index: Py<PyAny>) -> Self {
        Self {
            port: Arc::new(port),
            load_index,
            payload: Mutex::default(),
            kept: Arc::default(),
            stopwatch: Arc::default(),
            numpy_memory: OnceLock::new(),
            polled_parent: OnceLock::new(),
        }
    }

    fn payload(&self) -> MutexGuard<'_, Vec<u8>> {
        let mut payload = lock(&self.payload);
        payload.clear();
        payload
    }
}

#[pymethods]
impl PyPort {
    #[new]
    fn new(memfd: i32, doorbell: i32, geometry: Sizes, worker: u32, load_index: Py<PyAny>) -> PyResult<Self> {
        // SAFETY: the caller passes ownership of both descriptors, which are open.
        let (memfd, doorbell) = unsafe { (OwnedFd::from_raw_fd(memfd), OwnedFd::from_raw_fd(doorbell)) };
        let (total, workers, ring_slots, shared_queue) = geometry;
        let geometry = Geometry::of_file(total, workers, ring_slots, shared_queue)?;
        if worker >= workers {
            return Err(PyValueError::new_err(format!(
                "the arena has {workers} workers, so there is no worker {worker}"
            )));
        }
        Ok(Self::over(Port::open(Arena::attach(memfd, geometry)?, worker, doorbell)?, load_index))
    }

    #[staticmethod]
    fn inherit(engine: &PyEngine, worker: u32, load_index: Py<PyAny>) -> PyResult<Self> {
        // SAFETY: the descriptor is the doorbell's; the engine closes no descriptor in a child process, so the port is
        // its only owner here.
        let doorbell = unsafe { OwnedFd::from_raw_fd(engine.handle.doorbell.as_fd().as_raw_fd()) };
        Ok(Self::over(Port::open(engine.handle.arena.inherited(), worker, doorbell)?, load_index))
    }

    #[staticmethod]
    fn remote(fd: i32, ring_slots: u32, region_len: u64, load_index: Py<PyAny>) -> PyResult<Self> {
        Ok(Self::over(Port::over(remote::open(fd, ring_slots, region_len)?)?, load_index))
    }

    #[getter]
    fn is_remote(&self) -> bool {
        self.port.remote().is_some()
    }

    fn ready(&self) {
        if let Some(remote) = self.port.remote() {
            remote.ready();
        }
    }

    fn finish(&self, py: Python<'_>, seconds: f64) -> bool {
        let Some(remote) = self.port.remote() else { return true };
        py.detach(|| remote.finish(remote::limit(seconds)))
    }

    /// Starts the watchdog thread. If that fails (RLIMIT_NPROC), the worker itself checks, while it is idle, that the
    /// main process is alive.
    fn watch(&self, parent: (i32, u64)) {
        let parent = Parent::of(parent.0, parent.1);
        if watchdog::start(self.port.clone(), parent).is_err() {
            let _ = self.polled_parent.set(parent);
        }
    }

    fn survive_group_signal(&self, main: i32, alone: f64) -> bool {
        let alone = std::time::Duration::try_from_secs_f64(alone).unwrap_or(std::time::Duration::MAX);
        terminate::survive_group_signal(&self.port, main, alone).is_ok()
    }

    /// Registers faulthandler for the stack signal, so that its handler dumps the stacks of all threads into this
    /// worker's stack file without the GIL. If that fails, or if the program handles the signal itself, the status page
    /// shows the reason.
    fn offer_stack(&self, py: Python<'_>) {
        let Some(fd) = self.port.make_stack_file() else { return };
        let (all_threads, chain) = (true, false);
        let arguments = (stack_signal(), fd, all_threads, chain);
        let register = || py.import("faulthandler")?.call_method1("register", arguments);
        self.port.offer_stack(register().is_ok().then_some(fd));
    }

    fn receive(&self, py: Python<'_>) -> PyResult<(u8, u64, Option<Py<PyAny>>)> {
        let entry = match self.port.take_up()? {
            None => self.wait(py)?,
            entry => entry,
        };
        let Some(entry) = entry else { return Ok((code::LEAVE, 0, None)) };
        let in_block = entry.block.map(|_| lock(&self.port.payload));
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
            TaskKind::Resume => return self.epoch(py, code::RESUME, bytes),
            TaskKind::Early => return self.epoch(py, code::EARLY, bytes),
            TaskKind::Rewind => return self.epoch(py, code::REWIND, bytes),
            TaskKind::Leave => return Ok((code::LEAVE, 0, None)),
        };
        if let Some(mut payload) = in_block {
            codec::shrink(&mut payload);
        }
        Ok((code::FETCH, entry.task, Some(index)))
    }

    fn use_numpy_arena(&self, py: Python<'_>) -> PyResult<bool> {
        let Some(memory) = NumpyMemory::new(py, &self.port)? else { return Ok(false) };
        let memory = self.numpy_memory.get_or_init(|| memory);
        memory.enter(py)?;
        Ok(true)
    }

    fn enter_thread(&self, py: Python<'_>) -> PyResult<()> {
        self.numpy_memory.get().map_or(Ok(()), |memory| memory.enter(py))
    }

    fn array_tensor(&self, array: &Bound<'_, PyAny>) -> PyResult<Option<ArrayTensor>> {
        let (py, bridge) = (array.py(), Bridge::get(array.py())?);
        let Some(view) = bridge.view_as_tensor(array) else { return Ok(None) };
        let plan = TransferPlan::new(&view.shape, &view.byte_strides, view.dtype.itemsize(), Style::Tensor);
        let bytes = plan.filter(|plan| plan.gather.is_none()).map_or(0, |plan| plan.bytes);
        let block = (bytes >= ARRAY_MIN).then(|| self.port.adoptable(view.first as usize, bytes as u64)).flatten();
        if !block.is_some_and(|(block, _)| self.port.has_array(block))
            || bridge.has_modes(py)?
            || !bridge.default_is_cpu(py)?
        {
            return Ok(None);
        }
        Ok(Some(ArrayTensor::new(array)))
    }

    fn at_sample(&self, py: Python<'_>, place: u64) {
        fetcher::show_activity(py, &self.port, || self.port.at_sample(place));
    }

    fn send(&self, task: u64, batch: Bound<'_, PyList>, leaves_are_ours: bool) -> PyResult<bool> {
        self.stopwatch.end_fetch(&self.port, WorkerState::Pack);
        Ok(leaves_are_ours && self.encode(task, ResultKind::Plain, batch.get_item(0)?, Some(&batch))?)
    }

    fn send_pickle(
        &self,
        task: u64,
        pickle: Bound<'_, PyBytes>,
        objects: Bound<'_, PyList>,
        tied: bool,
    ) -> PyResult<bool> {
        let kind = if tied { ResultKind::Tied } else { ResultKind::Pickle };
        let (py, sum) = (pickle.py(), codec::pickle_sum(&pickle));
        // Dropping the batch may run user code, so the batch is kept until it has been sent.
        self.encode(task, kind, (pickle, objects, sum).into_pyobject(py)?.into_any(), None)
    }

    fn take_refusal(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.port.take_refusal().map(|error| PyErr::from(error).into_value(py).into_any())
    }

    fn send_error(&self, task: u64, pickle: Bound<'_, PyBytes>) -> PyResult<()> {
        self.publish(Outgoing::new(&self.port, false), task, ResultKind::Error, pickle.as_bytes())
    }

    fn send_snapshot(&self, count: u64, payload: &[u8], is_error: bool) -> PyResult<bool> {
        Ok(self.port.send_snapshot(count, payload, is_error)?)
    }

    fn exhausted(&self, task: u64) -> PyResult<()> {
        Ok(self.port.answer(task, ResultKind::Exhausted)?)
    }

    fn resumed(&self) -> PyResult<()> {
        Ok(self.port.answer(0, ResultKind::Resumed)?)
    }

    #[pyo3(signature = (*, ends = false))]
    fn progress(&self, py: Python<'_>, ends: bool) {
        py.detach(|| self.port.progress(ends));
    }

    /// Records that the worker is exiting. From then on Ctrl-C is ignored, because a KeyboardInterrupt in
    /// multiprocessing's shutdown code would only print a traceback.
    fn leave(&self, py: Python<'_>) {
        signal::ignore(libc::SIGINT);
        // Handle a signal that Python has already noted, and drop the error, which Python would otherwise raise after
        // this call.
        let _ = py.check_signals();
        self.port.leave();
    }

    #[pyo3(signature = (index, *, shows_places = false, traces = false))]
    fn stoppable(&self, index: Bound<'_, PyAny>, shows_places: bool, traces: bool) -> StoppableIndices {
        StoppableIndices { port: self.port.clone(), index: index.unbind(), shows_places, traces }
    }

    fn check_stop(&self) -> PyResult<()> {
        fetcher::check_stop(&self.port)
    }

    fn timed(&self, collate_fn: Bound<'_, PyAny>) -> TimedCollate {
        let (port, stopwatch) = (self.port.clone(), self.stopwatch.clone());
        TimedCollate { port, stopwatch, collate_fn: collate_fn.unbind() }
    }

    fn storage(&self, py: Python<'_>, nbytes: usize) -> PyResult<Option<Py<PyAny>>> {
        if nbytes < INLINE_LIMIT {
            return Ok(None);
        }
        let Some(lease) = self.lease(py, nbytes)? else { return Ok(None) };
        LeaseBuffer::new(lease).storage(py).map(Some)
    }

    fn stack(&self, py: Python<'_>, batch: Bound<'_, PyAny>) -> PyResult<Option<Py<PyAny>>> {
        collate::stack(py, Bridge::get(py)?, &batch, &mut |len| self.lease(py, len))
    }

    fn gather<'py>(
        &self,
        tensors: Bound<'py, PyAny>,
        index: Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        let py = index.py();
        let bridge = Bridge::get(py)?;
        gather::gather(bridge, &tensors, &index, &mut |_, plan| {
            collate::tensor_for(py, bridge, plan, &mut |len| self.lease(py, len)).map(Some)
        })
    }

    fn gather_cached(&self, table: Bound<'_, PyCache>, index: Bound<'_, PyAny>) -> PyResult<Option<Py<PyAny>>> {
        let py = index.py();
        let Some((rows, _)) = gather::rows(&index) else { return Ok(None) };
        let rows: Vec<u64> = rows.into_iter().map(|row| row as u64).collect();
        let bridge = Bridge::get(py)?;
        gathered::gather(py, table.get().cache(), &rows, &mut |plan| {
            collate::tensor_for(py, bridge, plan, &mut |len| self.lease(py, len))
        })
    }

    fn numbers(&self, py: Python<'_>, batch: Bound<'_, PyAny>) -> PyResult<Option<Py<PyAny>>> {
        collate::numbers(py, Bridge::get(py)?, &batch)
    }
}
