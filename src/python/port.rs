//! The worker's side: one `Port` a worker process.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use super::code;
use super::engine::PyEngine;
use super::indices::StoppableIndices;
use super::runtime::Runtime;
use crate::codec::{self, Sink};
use crate::config::{COLLECT_BATCHES, COLLECT_FROM, INLINE_LIMIT, RETAINED_MAX};
use crate::error::Error;
use crate::interop::collate;
use crate::interop::dlpack::{Lease, LeaseBuffer};
use crate::interop::tensor::Bridge;
use crate::shm::alloc::settle;
use crate::shm::arena::Arena;
use crate::shm::layout::{Geometry, WorkerState};
use crate::sys::signal::{self, stack_signal};
use crate::wire::{Leaf, ResultKind, TaskEntry, TaskKind, Timings};
use crate::worker::port::{Keep, Port, Received};
use crate::worker::terminate;
use crate::worker::watchdog::{self, Parent};

/// What objects of the worker hold.
#[derive(Default)]
struct Held {
    /// Bytes of blocks.
    bytes: AtomicU64,
    /// Bytes of the largest batch so far.
    largest: AtomicU64,
    /// At so many bytes the collector is called next.
    collect_at: AtomicU64,
}

/// A worker's own hold on a block, for tensors that it makes in the arena.
pub struct WorkerLease {
    port: Arc<Port>,
    held: Arc<Held>,
    block: u32,
    memory: *mut u8,
    len: usize,
}

// SAFETY: a raw pointer into a shared mapping; giving the block back takes the allocator's lock.
unsafe impl Send for WorkerLease {}

impl WorkerLease {
    /// `None` when the region is full, or this is a child of the worker: the caller takes ordinary memory. When the machine or
    /// the memory cgroup has none that is an error: ordinary memory would bring the OOM killer.
    fn new(py: Python<'_>, port: &PyPort, len: usize) -> PyResult<Option<Self>> {
        if port.collect_garbage(py, len as u64).is_none() {
            return Ok(None);
        }
        let pause = |time| py.detach(|| std::thread::sleep(time));
        let (block, memory) = match settle(|| port.port.allocate(len as u64), pause) {
            Ok(allocated) => allocated,
            Err(error @ Error::NoMemory { .. }) => return Err(error.into()),
            Err(_) => return Ok(None),
        };
        port.held.bytes.fetch_add(len as u64, Ordering::Relaxed);
        Ok(Some(Self { port: port.port.clone(), held: port.held.clone(), block, memory, len }))
    }
}

impl Lease for WorkerLease {
    fn ptr(&self) -> *mut u8 {
        self.memory
    }

    fn len(&self) -> usize {
        self.len
    }
}

impl Drop for WorkerLease {
    fn drop(&mut self) {
        self.held.bytes.fetch_sub(self.len as u64, Ordering::Relaxed);
        self.port.release(self.block);
    }
}

/// The blocks of a message in the making. What has not been sent is given back.
struct Outgoing<'a> {
    port: &'a Port,
    leaves: Vec<(Leaf, Keep)>,
}

impl Sink for Outgoing<'_> {
    fn reserve(&mut self, len: usize) -> Result<(u32, *mut u8), Error> {
        // With the GIL: the batch that is being read must not change meanwhile.
        let (block, memory) = settle(|| self.port.allocate(len as u64), std::thread::sleep)?;
        self.leaves.push((Leaf { block, len: len as u64 }, Keep::No));
        Ok((self.leaves.len() as u32 - 1, memory))
    }

    fn adopt(&mut self, ptr: *const u8, len: usize) -> Option<(u32, u64)> {
        let (block, offset) = self.port.adoptable(ptr as usize, len as u64)?;
        if self.leaves.iter().any(|(leaf, _)| leaf.block == block) {
            return None;
        }
        self.leaves.push((Leaf { block, len: offset + len as u64 }, Keep::Yes));
        Some((self.leaves.len() as u32 - 1, offset))
    }
}

impl Outgoing<'_> {
    fn send(&mut self, task: u64, kind: ResultKind, payload: &[u8], timings: Timings) -> Result<(), Error> {
        self.port.send(task, kind, &self.leaves, payload, timings)?;
        self.leaves.clear();
        Ok(())
    }
}

impl Drop for Outgoing<'_> {
    fn drop(&mut self) {
        for (leaf, keep) in &self.leaves {
            if *keep == Keep::No {
                self.port.release(leaf.block);
            }
        }
    }
}

/// A worker's connection to the main process.
#[pyclass(frozen, name = "Port", module = "rustloader._core")]
pub struct PyPort {
    port: Arc<Port>,
    runtime: Arc<Runtime>,
    /// Reused for each batch.
    payload: Mutex<Vec<u8>>,
    held: Arc<Held>,
    fetch_us: AtomicU32,
    collate_us: AtomicU32,
    /// The main process, where no watchdog looks after it.
    unguarded: OnceLock<Parent>,
}

impl PyPort {
    /// Calls Python's collector where garbage may be what holds the arena's blocks. `None`: the worker keeps so much that
    /// `len` bytes more had better be ordinary memory.
    fn collect_garbage(&self, py: Python<'_>, len: u64) -> Option<()> {
        let held = &self.held;
        let limit = COLLECT_FROM.max(COLLECT_BATCHES * held.largest.load(Ordering::Relaxed));
        let limit = limit.max(held.collect_at.load(Ordering::Relaxed));
        if held.bytes.load(Ordering::Relaxed) + len <= limit {
            return Some(());
        }
        // An error of a finalizer has been reported by Python already.
        let _ = py.import("gc").and_then(|gc| gc.call_method0("collect"));
        let kept = held.bytes.load(Ordering::Relaxed);
        held.collect_at.store(2 * (kept + len), Ordering::Relaxed);
        (kept + len <= RETAINED_MAX.max(limit)).then_some(())
    }

    /// Publishes a message and notes its size.
    fn publish(
        &self,
        outgoing: &mut Outgoing<'_>,
        task: u64,
        kind: ResultKind,
        payload: &[u8],
    ) -> Result<(), Error> {
        let bytes = outgoing.leaves.iter().map(|(leaf, _)| leaf.len).sum();
        self.held.largest.fetch_max(bytes, Ordering::Relaxed);
        outgoing.send(task, kind, payload, self.timings())
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
        let mut outgoing = Outgoing { port: &self.port, leaves: Vec::new() };
        let plain = codec::encode(py, Bridge::get(py)?, value, &mut payload, &mut outgoing)?;
        if plain {
            self.publish(&mut outgoing, task, kind, &payload)?;
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

    fn over(py: Python<'_>, arena: Arc<Arena>, doorbell: OwnedFd, worker: u32) -> PyResult<Self> {
        Ok(Self {
            port: Arc::new(Port::open(arena, worker, doorbell)?),
            runtime: Runtime::get(py)?,
            payload: Mutex::new(Vec::new()),
            held: Arc::default(),
            fetch_us: AtomicU32::new(0),
            collate_us: AtomicU32::new(0),
            unguarded: OnceLock::new(),
        })
    }

    fn timings(&self) -> Timings {
        Timings {
            fetch_us: self.fetch_us.swap(0, Ordering::Relaxed),
            collate_us: self.collate_us.swap(0, Ordering::Relaxed),
            pack_us: self.port.enter(WorkerState::Publish),
        }
    }

    fn payload(&self) -> MutexGuard<'_, Vec<u8>> {
        let mut payload = self.payload.lock().unwrap_or_else(PoisonError::into_inner);
        payload.clear();
        payload
    }

    /// Ends a stretch of time in the dataset.
    fn after_fetch(&self, next: WorkerState) {
        let us = self.port.enter(next);
        self.fetch_us.fetch_add(us, Ordering::Relaxed);
    }
}

#[pymethods]
impl PyPort {
    /// Opens worker `worker`'s port. The descriptors are the caller's to give away.
    #[new]
    fn new(
        py: Python<'_>,
        memfd: i32,
        doorbell: i32,
        geometry: (u64, u32, u32),
        worker: u32,
    ) -> PyResult<Self> {
        // SAFETY: the caller gives both descriptors away; they are open.
        let (memfd, doorbell) = unsafe { (OwnedFd::from_raw_fd(memfd), OwnedFd::from_raw_fd(doorbell)) };
        let (total, workers, ring_slots) = geometry;
        let geometry = Geometry::of_file(total, workers, ring_slots)?;
        if worker >= workers {
            return Err(PyValueError::new_err(format!("an arena of {workers} workers for worker {worker}")));
        }
        Self::over(py, Arena::attach(memfd, geometry)?, doorbell, worker)
    }

    /// Opens worker `worker`'s port in a forked child, over what it has inherited of the main process's engine.
    #[staticmethod]
    fn inherit(py: Python<'_>, engine: &PyEngine, worker: u32) -> PyResult<Self> {
        // In a child the engine lets its descriptors be.
        // SAFETY: the number is the doorbell's, and nobody else in this process closes it.
        let doorbell = unsafe { OwnedFd::from_raw_fd(engine.handle.doorbell.as_fd().as_raw_fd()) };
        Self::over(py, engine.handle.arena.inherited(), doorbell, worker)
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
        let held = entry.block.map(|_| self.port.payload.lock().unwrap_or_else(PoisonError::into_inner));
        let bytes = held.as_deref().map_or(&entry.inline[..], |payload| payload);
        let bytes = &bytes[..entry.len as usize];
        let index = match entry.kind {
            TaskKind::Plain => codec::decode_indices(py, bytes)?,
            TaskKind::Pickle => match self.runtime.load_index.bind(py).call1((PyBytes::new(py, bytes),)) {
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
        if let Some(mut payload) = held {
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
        self.after_fetch(WorkerState::Pack);
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
        let mut outgoing = Outgoing { port: &self.port, leaves: Vec::new() };
        Ok(self.publish(&mut outgoing, task, ResultKind::Error, pickle.as_bytes())?)
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
    fn timed(slf: Bound<'_, Self>, collate_fn: Bound<'_, PyAny>) -> TimedCollate {
        TimedCollate { port: slf.unbind(), collate_fn: collate_fn.unbind() }
    }

    /// An `UntypedStorage` of `nbytes` bytes in the arena; None where ordinary memory is the better choice.
    fn storage(&self, py: Python<'_>, nbytes: usize) -> PyResult<Option<Py<PyAny>>> {
        if nbytes < INLINE_LIMIT {
            return Ok(None);
        }
        let Some(lease) = WorkerLease::new(py, self, nbytes)? else { return Ok(None) };
        LeaseBuffer::new(lease).storage(py).map(Some)
    }

    /// default_collate for plain tensors of one dtype and shape; None: torch's function is to do it.
    fn stack(&self, py: Python<'_>, batch: Bound<'_, PyAny>) -> PyResult<Option<Py<PyAny>>> {
        collate::stack(py, Bridge::get(py)?, &batch, &mut |len| WorkerLease::new(py, self, len))
    }

    /// default_collate for plain floats or ints; None: torch's function is to do it.
    fn numbers(&self, py: Python<'_>, batch: Bound<'_, PyAny>) -> PyResult<Option<Py<PyAny>>> {
        collate::numbers(py, Bridge::get(py)?, &batch)
    }
}

/// A collate function, on its way into torch's fetcher, that says on the status page when it runs.
#[pyclass(frozen, module = "rustloader._core")]
pub struct TimedCollate {
    port: Py<PyPort>,
    collate_fn: Py<PyAny>,
}

#[pymethods]
impl TimedCollate {
    fn __call__(&self, py: Python<'_>, batch: Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let port = self.port.get();
        port.after_fetch(WorkerState::Collate);
        let collated = self.collate_fn.bind(py).call1((batch,));
        let us = port.port.enter(WorkerState::Fetch);
        port.collate_us.fetch_add(us, Ordering::Relaxed);
        collated.map(Bound::unbind)
    }

    fn __getattr__(&self, py: Python<'_>, name: &str) -> PyResult<Py<PyAny>> {
        self.collate_fn.bind(py).getattr(name).map(Bound::unbind)
    }
}
