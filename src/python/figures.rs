//! Counters as frozen Python objects: those of this process's iterators, and those in another process's arena.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::engine::Handle;
use crate::metrics::{self, Count, Meter, Unit};
use crate::observe;
use crate::shm::layout::WorkerState;

pub(super) fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// Defines a class that shows a value of the Rust core. Each property is computed when it is read.
macro_rules! view {
    ($class:ident of $source:ty: |$py:ident, $it:ident| { $($field:ident: $type:ty = $value:expr,)* }
     $($method:tt)*) => {
        #[pyclass(frozen, module = "rustloader._core")]
        pub struct $class($source);

        #[pymethods]
        impl $class {
            $(
                #[getter]
                #[allow(unused_variables, reason = "few properties need the interpreter")]
                fn $field(&self, $py: Python<'_>) -> PyResult<$type> {
                    let $it = &self.0;
                    Ok($value)
                }
            )*
            $($method)*
        }
    };
}

/// Returns the counters of the main process by name. The name of a time ends in "_seconds".
fn named(py: Python<'_>, counts: &[u64; Count::LEN]) -> PyResult<Py<PyDict>> {
    let dict = PyDict::new(py);
    for (count, name, unit) in Count::ALL {
        let value = counts[count as usize];
        match unit {
            Unit::Number => dict.set_item(name, value)?,
            Unit::Time => dict.set_item(format!("{name}_seconds"), seconds(value))?,
        }
    }
    Ok(dict.unbind())
}

fn spent(worker: &metrics::WorkerTotals, states: &[WorkerState]) -> f64 {
    states.iter().map(|&state| seconds(worker.spent_ns[state as usize])).sum()
}

view! {
    WorkerTotals of metrics::WorkerTotals: |py, it| {
        pid: u32 = it.pid,
        alive: bool = it.alive,
        start_cpu: f64 = seconds(it.start_cpu_ns),
        start_queued: f64 = seconds(it.start_queued_ns),
        tasks: u64 = it.tasks,
        adopted: u64 = it.adopted,
        adopted_bytes: u64 = it.adopted_bytes,
        starting_seconds: f64 = spent(it, &[WorkerState::Starting]),
        idle_seconds: f64 = spent(it, &[WorkerState::Idle]),
        fetch_seconds: f64 = spent(it, &[WorkerState::Fetch]),
        collate_seconds: f64 = spent(it, &[WorkerState::Collate]),
        pack_seconds: f64 = spent(it, &[WorkerState::Pack, WorkerState::Publish]),
        busy_seconds: f64 =
            spent(it, &[WorkerState::Fetch, WorkerState::Collate, WorkerState::Pack, WorkerState::Publish]),
        left_seconds: f64 = spent(it, &[WorkerState::Left]),
        fetch_cpu_seconds: f64 = seconds(it.fetch_cpu_ns),
        fetch_measured_seconds: f64 = seconds(it.fetch_measured_ns),
    }
}

view! {
    SlowTask of metrics::SlowTask: |py, it| {
        index: String = it.index.clone(),
        worker: u32 = it.worker,
        fetch: f64 = f64::from(it.timings.fetch_us) / 1e6,
        collate: f64 = f64::from(it.timings.collate_us) / 1e6,
        pack: f64 = f64::from(it.timings.pack_us) / 1e6,
        blocked: f64 = it.blocked_us as f64 / 1e6,
    }
}

view! {
    Totals of metrics::Totals: |py, it| {
        counts: Py<PyDict> = named(py, &it.sums.counts)?,
        waits: Vec<u64> = it.waits.to_vec(),
        workers: Vec<WorkerTotals> = it.sums.workers.iter().copied().map(WorkerTotals).collect(),
        slowest: Vec<SlowTask> = it.slowest.iter().cloned().map(SlowTask).collect(),
        blocking: Vec<SlowTask> = it.blocking.iter().cloned().map(SlowTask).collect(),
        half: Option<Totals> = it.first_half().map(Totals),
        recent: Vec<f64> = it.recent_us.iter().map(|&us| f64::from(us) / 1e6).collect(),
        leased: u64 = it.usage.leased,
        warm: u64 = it.usage.warm,
        blocks: u64 = it.usage.blocks,
        high_water: u64 = it.high_water,
        pin_threads: u32 = it.pin_threads,
        ready: u64 = it.ready,
    }

    fn since(&self, earlier: &Self) -> Self {
        Self(self.0.since(&earlier.0))
    }
}

view! {
    ObservedWorker of observe::ObservedWorker: |py, it| {
        state: &'static str = it.state.name(),
        seconds_in_state: f64 = seconds(it.in_state_ns),
        batch: Option<u64> = it.batch,
        seconds_at_batch: f64 = seconds(it.at_batch_ns),
        index: Option<String> = it.index.clone(),
        queued: u32 = it.queued,
        ready: u32 = it.ready,
        warm: u64 = it.warm,
    }
}

view! {
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
        totals: Totals = Totals(it.totals()),
        workers: Vec<ObservedWorker> = it.workers.iter().cloned().map(ObservedWorker).collect(),
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
pub fn figures(meters: Vec<PyRef<'_, PyMeter>>) -> Totals {
    let mut totals = metrics::Totals::default();
    meters.iter().for_each(|meter| totals.add(&meter.totals()));
    Totals(totals)
}

#[pyfunction]
pub fn inspect_arena(py: Python<'_>, fd: i32) -> PyResult<Option<Observed>> {
    if fd < 0 {
        return Err(PyValueError::new_err(format!("{fd} is not a descriptor")));
    }
    // SAFETY: the caller keeps the descriptor open during the call; if it is closed, the reads fail.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    Ok(py.detach(|| observe::observe(fd))?.map(Observed))
}
