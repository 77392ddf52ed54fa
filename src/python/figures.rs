//! Counters as frozen Python objects: those of this process's iterators, and those in another process's arena.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::engine::Handle;
use crate::metrics::{self, Count, Meter};
use crate::observe;
use crate::shm::layout::WorkerState;

pub(super) fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// Defines a class of constants and counters. Each counter is an entry of a table of u64s: a count, or a time in
/// nanoseconds that the class converts to seconds. `since` subtracts the counters of an earlier object; the constants
/// keep their values.
macro_rules! figures {
    ($class:ident { $($constant:ident: $kind:ty,)* }
     numbers { $($number:ident = $n:expr,)* } seconds { $($time:ident = $t:expr,)* }) => {
        #[pyclass(frozen, get_all, module = "rustloader._core")]
        pub struct $class { $($constant: $kind,)* $($number: u64,)* $($time: f64,)* }

        impl $class {
            fn of($($constant: $kind,)* table: &[u64]) -> Self {
                Self {
                    $($constant,)*
                    $($number: table[$n as usize],)*
                    $($time: seconds(table[$t as usize]),)*
                }
            }
        }

        #[pymethods]
        impl $class {
            fn since(&self, earlier: &Self) -> Self {
                Self {
                    $($constant: self.$constant,)*
                    $($number: self.$number.saturating_sub(earlier.$number),)*
                    $($time: (self.$time - earlier.$time).max(0.0),)*
                }
            }
        }
    };
}

/// Defines a class whose fields are computed from a value of the Rust core.
macro_rules! record {
    ($class:ident of $source:ty: |$py:ident, $it:ident| { $($field:ident: $type:ty = $value:expr,)* }) => {
        #[pyclass(frozen, get_all, module = "rustloader._core")]
        pub struct $class { $($field: $type,)* }

        impl $class {
            fn of($py: Python<'_>, $it: &$source) -> PyResult<Py<Self>> {
                Py::new($py, Self { $($field: $value,)* })
            }
        }
    };
}

figures! {
    Counts {}
    numbers {
        epochs = Count::Epochs,
        batches = Count::Batches,
        bytes = Count::Bytes,
        copies = Count::Copies,
        copied_bytes = Count::CopiedBytes,
        pickled = Count::Pickled,
        pinned = Count::Pinned,
    }
    seconds {
        next_seconds = Count::Next,
        waited_seconds = Count::Waited,
        first_seconds = Count::First,
        blocked_seconds = Count::Blocked,
        sampler_seconds = Count::Sampler,
        step_seconds = Count::Step,
        pinning_seconds = Count::Pinning,
    }
}

// A worker's table: the time in each state, the number of tasks, the CPU time and the wall time of the measured
// fetches, and the numbers of adopted leaves and of their bytes.
figures! {
    WorkerTotals { pid: u32, alive: bool, start_cpu: f64, start_queued: f64, }
    numbers {
        tasks = WorkerState::COUNT,
        adopted = WorkerState::COUNT + 3,
        adopted_bytes = WorkerState::COUNT + 4,
    }
    seconds {
        starting = WorkerState::Starting,
        idle = WorkerState::Idle,
        fetch = WorkerState::Fetch,
        collate = WorkerState::Collate,
        pack = WorkerState::Pack,
        publish = WorkerState::Publish,
        left = WorkerState::Left,
        fetch_cpu = WorkerState::COUNT + 1,
        fetch_measured = WorkerState::COUNT + 2,
    }
}

fn worker_totals(py: Python<'_>, totals: &metrics::WorkerTotals) -> PyResult<Py<WorkerTotals>> {
    let mut table = [0; WorkerState::COUNT + 5];
    table[..WorkerState::COUNT].copy_from_slice(&totals.spent_ns);
    let measured = [totals.tasks, totals.fetch_cpu_ns, totals.fetch_measured_ns];
    let others = [totals.adopted, totals.adopted_bytes];
    table[WorkerState::COUNT..].copy_from_slice(&[&measured[..], &others].concat());
    let (start_cpu, start_queued) = (seconds(totals.start_cpu_ns), seconds(totals.start_queued_ns));
    Py::new(py, WorkerTotals::of(totals.pid, totals.alive, start_cpu, start_queued, &table))
}

fn sums(py: Python<'_>, sums: &metrics::Sums) -> PyResult<(Py<Counts>, Vec<Py<WorkerTotals>>)> {
    let workers = sums.workers.iter().map(|worker| worker_totals(py, worker)).collect::<PyResult<_>>()?;
    Ok((Py::new(py, Counts::of(&sums.counts))?, workers))
}

record! {
    SlowTask of metrics::SlowTask: |_py, task| {
        index: String = task.index.clone(),
        worker: u32 = task.worker,
        fetch: f64 = f64::from(task.timings.fetch_us) / 1e6,
        collate: f64 = f64::from(task.timings.collate_us) / 1e6,
        pack: f64 = f64::from(task.timings.pack_us) / 1e6,
        blocked: f64 = task.blocked_us as f64 / 1e6,
    }
}

record! {
    Totals of metrics::Totals: |py, totals| {
        counts: Py<Counts> = Py::new(py, Counts::of(&totals.sums.counts))?,
        waits: Vec<u64> = totals.waits.to_vec(),
        workers: Vec<Py<WorkerTotals>> =
            totals.sums.workers.iter().map(|worker| worker_totals(py, worker)).collect::<PyResult<_>>()?,
        slowest: Vec<Py<SlowTask>> =
            totals.slowest.iter().map(|task| SlowTask::of(py, task)).collect::<PyResult<_>>()?,
        blocking: Vec<Py<SlowTask>> =
            totals.blocking.iter().map(|task| SlowTask::of(py, task)).collect::<PyResult<_>>()?,
        half: Option<(Py<Counts>, Vec<Py<WorkerTotals>>)> = totals.half().map(|half| sums(py, half)).transpose()?,
        recent: Vec<f64> = totals.recent_us.iter().map(|&us| f64::from(us) / 1e6).collect(),
        leased: u64 = totals.usage.leased,
        warm: u64 = totals.usage.warm,
        blocks: u64 = totals.usage.blocks,
        high_water: u64 = totals.high_water,
        pin_threads: u32 = totals.pin_threads,
        ready: u64 = totals.ready,
    }
}

record! {
    ObservedWorker of observe::ObservedWorker: |py, worker| {
        totals: Py<WorkerTotals> = worker_totals(py, &worker.totals)?,
        state: &'static str = worker.state.name(),
        seconds_in_state: f64 = seconds(worker.in_state_ns),
        batch: Option<u64> = worker.batch,
        seconds_at_batch: f64 = seconds(worker.at_batch_ns),
        index: Option<String> = worker.index.clone(),
        queued: u32 = worker.queued,
        ready: u32 = worker.ready,
        warm: u64 = worker.warm,
    }
}

record! {
    Observed of observe::Observed: |py, it| {
        now: f64 = seconds(it.now_ns),
        pid: u32 = it.pid,
        name: String = it.name.clone(),
        state: &'static str = it.state.name(),
        seconds_in_state: f64 = seconds(it.in_state_ns),
        started: f64 = seconds(it.now_ns.saturating_sub(it.age_ns)),
        stopping: bool = it.stopping,
        prefetch_factor: u32 = it.prefetch_factor,
        in_order: bool = it.in_order,
        persistent: bool = it.persistent,
        pinning: bool = it.pinning,
        remote: bool = it.remote,
        epoch_batches: u64 = it.epoch_batches,
        counts: Py<Counts> = Py::new(py, Counts::of(&it.counts))?,
        workers: Vec<Py<ObservedWorker>> =
            it.workers.iter().map(|worker| ObservedWorker::of(py, worker)).collect::<PyResult<_>>()?,
        leased: u64 = it.usage.leased,
        warm: u64 = it.usage.warm,
        high_water: u64 = it.usage.high_water,
        blocks: u64 = it.usage.blocks,
    }
}

/// The counters of one iterator, which stay readable after it has ended, or the sums over a loader's ended iterators.
#[pyclass(frozen, name = "Meter", module = "rustloader._core")]
pub struct PyMeter {
    meter: Arc<Meter>,
    handle: Weak<Handle>,
}

impl PyMeter {
    pub fn of(handle: &Arc<Handle>) -> Self {
        Self { meter: handle.meter.clone(), handle: Arc::downgrade(handle) }
    }

    fn totals(&self) -> metrics::Totals {
        self.handle.upgrade().map_or_else(|| self.meter.totals(), |handle| handle.totals())
    }
}

#[pymethods]
impl PyMeter {
    #[new]
    fn new() -> Self {
        Self { meter: Arc::default(), handle: Weak::new() }
    }

    #[getter]
    fn ended(&self) -> bool {
        self.handle.upgrade().is_none_or(|handle| handle.has_ended())
    }

    /// Counts a fetch of an iterator without workers. Threads call this one after another, because they hold the GIL.
    fn note_fetch(&self, step: Option<u64>, fetch: u64, has_batch: bool) {
        self.meter.note_fetch(step.map(Duration::from_nanos), Duration::from_nanos(fetch), has_batch);
    }

    /// Removes the meters of ended iterators from a list and adds their counters to this meter. A single call does
    /// both, so that a reader in another thread neither misses a meter nor counts it twice.
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

#[pyfunction]
pub fn figures(py: Python<'_>, meters: Vec<PyRef<'_, PyMeter>>) -> PyResult<Py<Totals>> {
    let mut totals = metrics::Totals::default();
    meters.iter().for_each(|meter| totals.add(&meter.totals()));
    Totals::of(py, &totals)
}

#[pyfunction]
pub fn inspect_arena(py: Python<'_>, fd: i32) -> PyResult<Option<Py<Observed>>> {
    if fd < 0 {
        return Err(PyValueError::new_err(format!("{fd} is not a descriptor")));
    }
    // SAFETY: the caller keeps the descriptor open during the call; if it is closed, the reads fail.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    py.detach(|| observe::observe(fd))?.map(|it| Observed::of(py, &it)).transpose()
}
