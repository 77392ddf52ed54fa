//! The counters of iterators as frozen objects: of this process, and of an arena of another one.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::engine::Handle;
use crate::metrics::{self, Count, Meter};
use crate::observe;
use crate::shm::layout::WorkerState;

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// A figure that grows: a number, or a time that is kept in nanoseconds.
trait Figure: Copy {
    fn of(raw: u64) -> Self;
    fn since(self, earlier: Self) -> Self;
}

impl Figure for u64 {
    fn of(raw: u64) -> Self {
        raw
    }

    fn since(self, earlier: Self) -> Self {
        self.saturating_sub(earlier)
    }
}

impl Figure for f64 {
    fn of(raw: u64) -> Self {
        seconds(raw)
    }

    fn since(self, earlier: Self) -> Self {
        (self - earlier).max(0.0)
    }
}

/// Defines a class of constant fields and of figures, each an entry of a table.
macro_rules! figures {
    ($(#[$meta:meta])* $class:ident { $($constant:ident: $kind:ty,)* } $($figure:ident: $type:ty = $entry:expr,)*) => {
        $(#[$meta])*
        #[pyclass(frozen, get_all, module = "rustloader._core")]
        pub struct $class { $($constant: $kind,)* $($figure: $type,)* }

        impl $class {
            fn of($($constant: $kind,)* table: &[u64]) -> Self {
                Self { $($constant,)* $($figure: Figure::of(table[$entry as usize]),)* }
            }
        }

        #[pymethods]
        impl $class {
            /// What has been added since an earlier moment.
            fn since(&self, earlier: &Self) -> Self {
                Self { $($constant: self.$constant,)* $($figure: Figure::since(self.$figure, earlier.$figure),)* }
            }
        }
    };
}

figures! {
    /// What the main process has counted.
    Counts {}
    epochs: u64 = Count::Epochs,
    batches: u64 = Count::Batches,
    bytes: u64 = Count::Bytes,
    copies: u64 = Count::Copies,
    copied_bytes: u64 = Count::CopiedBytes,
    pickled: u64 = Count::Pickled,
    next_seconds: f64 = Count::Next,
    waited_seconds: f64 = Count::Waited,
    first_seconds: f64 = Count::First,
    blocked_seconds: f64 = Count::Blocked,
    sampler_seconds: f64 = Count::Sampler,
    step_seconds: f64 = Count::Step,
    pinned: u64 = Count::Pinned,
    pinning_seconds: f64 = Count::Pinning,
}

/// The entry of a worker's tasks, behind those of its states.
const TASKS: usize = WorkerState::COUNT;

figures! {
    /// What a worker has done. Times are in seconds; those of the states are called by their names.
    WorkerTotals { pid: u32, alive: bool, start_cpu: f64, start_queued: f64, }
    tasks: u64 = TASKS,
    starting: f64 = WorkerState::Starting,
    idle: f64 = WorkerState::Idle,
    fetch: f64 = WorkerState::Fetch,
    collate: f64 = WorkerState::Collate,
    pack: f64 = WorkerState::Pack,
    publish: f64 = WorkerState::Publish,
    left: f64 = WorkerState::Left,
}

impl From<&metrics::WorkerTotals> for WorkerTotals {
    fn from(totals: &metrics::WorkerTotals) -> Self {
        let mut table = [totals.tasks; TASKS + 1];
        table[..TASKS].copy_from_slice(&totals.spent_ns);
        let (start_cpu, start_queued) = (seconds(totals.start_cpu_ns), seconds(totals.start_queued_ns));
        Self::of(totals.pid, totals.alive, start_cpu, start_queued, &table)
    }
}

/// One of the slowest tasks; times are in seconds.
#[pyclass(frozen, get_all, module = "rustloader._core")]
pub struct SlowTask {
    index: String,
    worker: u32,
    fetch: f64,
    collate: f64,
    pack: f64,
}

impl From<&metrics::SlowTask> for SlowTask {
    fn from(task: &metrics::SlowTask) -> Self {
        let seconds = |us: u32| f64::from(us) / 1e6;
        Self {
            index: task.index.clone(),
            worker: task.worker,
            fetch: seconds(task.timings.fetch_us),
            collate: seconds(task.timings.collate_us),
            pack: seconds(task.timings.pack_us),
        }
    }
}

/// The figures of one or more iterators.
#[pyclass(frozen, get_all, module = "rustloader._core")]
pub struct Totals {
    counts: Py<Counts>,
    workers: Vec<Py<WorkerTotals>>,
    slowest: Vec<Py<SlowTask>>,
    leased: u64,
    warm: u64,
    blocks: u64,
    high_water: u64,
    pin_threads: u32,
}

/// The counters of one iterator, which they outlive, or of a loader's ended iterators.
#[pyclass(frozen, name = "Meter", module = "rustloader._core")]
pub struct PyMeter {
    meter: Arc<Meter>,
    handle: Weak<Handle>,
}

impl PyMeter {
    /// Those of an iterator.
    pub fn of(handle: &Arc<Handle>) -> Self {
        Self { meter: handle.meter.clone(), handle: Arc::downgrade(handle) }
    }

    fn totals(&self) -> metrics::Totals {
        self.handle.upgrade().map_or_else(|| self.meter.totals(), |handle| handle.totals())
    }
}

#[pymethods]
impl PyMeter {
    /// Counters that stand at zero.
    #[new]
    fn new() -> Self {
        Self { meter: Arc::default(), handle: Weak::new() }
    }

    /// Whether the iterator has ended, so that nothing will be counted any more.
    #[getter]
    fn ended(&self) -> bool {
        self.handle.upgrade().is_none_or(|handle| handle.has_ended())
    }

    /// Takes those of ended iterators out of a list, and adds their figures. In one call, so that a reader in another thread
    /// neither misses them nor counts them twice.
    fn absorb(&self, meters: &Bound<'_, PyList>) -> PyResult<()> {
        for at in (0..meters.len()).rev() {
            let meter = meters.get_item(at)?.cast_into::<Self>()?;
            if meter.get().ended() {
                self.meter.absorb(&meter.get().totals());
                meters.del_item(at)?;
            }
        }
        Ok(())
    }
}

/// The figures of several iterators together, the latest last.
#[pyfunction]
pub fn figures(py: Python<'_>, meters: Vec<PyRef<'_, PyMeter>>) -> PyResult<Totals> {
    let mut totals = metrics::Totals::default();
    meters.iter().for_each(|meter| totals.add(&meter.totals()));
    Ok(Totals {
        counts: Py::new(py, Counts::of(&totals.counts))?,
        workers: totals
            .workers
            .iter()
            .map(|it| Py::new(py, WorkerTotals::from(it)))
            .collect::<PyResult<_>>()?,
        slowest: totals.slowest.iter().map(|it| Py::new(py, SlowTask::from(it))).collect::<PyResult<_>>()?,
        leased: totals.usage.leased,
        warm: totals.usage.warm,
        blocks: totals.usage.blocks,
        high_water: totals.high_water,
        pin_threads: totals.pin_threads,
    })
}

/// A worker of another process's iterator at one moment; times are in seconds.
#[pyclass(frozen, get_all, module = "rustloader._core")]
pub struct ObservedWorker {
    totals: Py<WorkerTotals>,
    state: &'static str,
    seconds_in_state: f64,
    batch: Option<u64>,
    seconds_at_batch: f64,
    index: Option<String>,
    queued: u32,
    ready: u32,
    warm: u64,
}

impl ObservedWorker {
    fn new(py: Python<'_>, worker: &observe::ObservedWorker) -> PyResult<Py<Self>> {
        let observed = Self {
            totals: Py::new(py, WorkerTotals::from(&worker.totals))?,
            state: worker.state.name(),
            seconds_in_state: seconds(worker.in_state_ns),
            batch: worker.batch,
            seconds_at_batch: seconds(worker.at_batch_ns),
            index: worker.index.clone(),
            queued: worker.queued,
            ready: worker.ready,
            warm: worker.warm,
        };
        Py::new(py, observed)
    }
}

/// An iterator of another process at one moment; times are in seconds.
#[pyclass(frozen, get_all, module = "rustloader._core")]
pub struct Observed {
    now: f64,
    pid: u32,
    state: &'static str,
    seconds_in_state: f64,
    started: f64,
    stopping: bool,
    prefetch_factor: u32,
    in_order: bool,
    persistent: bool,
    pinning: bool,
    epoch_batches: u64,
    counts: Py<Counts>,
    workers: Vec<Py<ObservedWorker>>,
    leased: u64,
    warm: u64,
    high_water: u64,
    blocks: u64,
}

/// What the arena behind a descriptor shows of its iterator; `None` while no iterator has it. The descriptor need only be open for
/// reading.
#[pyfunction]
#[pyo3(name = "inspect_arena")]
pub fn observe_arena(py: Python<'_>, fd: i32) -> PyResult<Option<Observed>> {
    if fd < 0 {
        return Err(PyValueError::new_err(format!("{fd} is no descriptor")));
    }
    // SAFETY: the caller keeps the descriptor open for the call; of one that is not, the reads fail.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let Some(observed) = py.detach(|| observe::observe(fd))? else { return Ok(None) };
    let workers = observed.workers.iter().map(|worker| ObservedWorker::new(py, worker));
    Ok(Some(Observed {
        now: seconds(observed.now_ns),
        pid: observed.pid,
        state: observed.state.name(),
        seconds_in_state: seconds(observed.in_state_ns),
        started: seconds(observed.now_ns.saturating_sub(observed.age_ns)),
        stopping: observed.stopping,
        prefetch_factor: observed.prefetch_factor,
        in_order: observed.in_order,
        persistent: observed.persistent,
        pinning: observed.pinning,
        epoch_batches: observed.epoch_batches,
        counts: Py::new(py, Counts::of(&observed.counts))?,
        workers: workers.collect::<PyResult<_>>()?,
        leased: observed.usage.leased,
        warm: observed.usage.warm,
        high_water: observed.usage.high_water,
        blocks: observed.usage.blocks,
    }))
}
