//! The counters of iterators, as statistics read them.

use std::sync::{Arc, Weak};

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyList, PyString, PyTuple};

use crate::config::{INDICES_SHOWN, KEY_SHOWN};
use crate::engine::Handle;
use crate::metrics::{Count, Meter, SlowTask, Totals, WorkerTotals};
use crate::shm::layout::WorkerState;

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

    fn totals(&self) -> Totals {
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

    /// Takes those of ended iterators out of a list, and adds their figures. In one call, so that nobody who asks meanwhile
    /// misses them or counts them twice.
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

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn worker_dict<'py>(py: Python<'py>, worker: &WorkerTotals) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("pid", worker.pid)?;
    dict.set_item("alive", worker.alive)?;
    dict.set_item("tasks", worker.tasks)?;
    dict.set_item("start_cpu", seconds(worker.start_cpu_ns))?;
    dict.set_item("start_queued", seconds(worker.start_queued_ns))?;
    for (number, &ns) in worker.spent_ns.iter().enumerate() {
        dict.set_item(WorkerState::from_u32(number as u32).name(), seconds(ns))?;
    }
    Ok(dict)
}

fn slow_dict<'py>(py: Python<'py>, task: &SlowTask) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("index", &task.index)?;
    dict.set_item("worker", task.worker)?;
    dict.set_item("fetch", f64::from(task.timings.fetch_us) / 1e6)?;
    dict.set_item("collate", f64::from(task.timings.collate_us) / 1e6)?;
    dict.set_item("pack", f64::from(task.timings.pack_us) / 1e6)?;
    Ok(dict)
}

/// The figures of several iterators together, the latest last: counts by name (times in nanoseconds), workers, slowest tasks,
/// memory.
#[pyfunction]
pub fn figures<'py>(py: Python<'py>, meters: Vec<PyRef<'py, PyMeter>>) -> PyResult<Bound<'py, PyDict>> {
    let mut totals = Totals::default();
    meters.iter().for_each(|meter| totals.add(&meter.totals()));
    let dict = PyDict::new(py);
    for (count, name) in Count::ALL {
        dict.set_item(name, totals.counts[count as usize])?;
    }
    let workers = totals.workers.iter().map(|worker| worker_dict(py, worker));
    dict.set_item("workers", PyList::new(py, workers.collect::<PyResult<Vec<_>>>()?)?)?;
    let slowest = totals.slowest.iter().map(|task| slow_dict(py, task));
    dict.set_item("slowest", PyList::new(py, slowest.collect::<PyResult<Vec<_>>>()?)?)?;
    dict.set_item("leased", totals.usage.leased)?;
    dict.set_item("warm", totals.usage.warm)?;
    dict.set_item("blocks", totals.usage.blocks)?;
    dict.set_item("high_water", totals.high_water)?;
    dict.set_item("pin_threads", totals.pin_threads)?;
    Ok(dict)
}

/// An index, or an index batch, as a text; a short form of a large one. Runs no code of the user's, so that there is nothing
/// in it for an object that is neither number nor string but its type.
pub fn short_text(index: &Bound<'_, PyAny>) -> String {
    let (open, close) = if index.is_exact_instance_of::<PyList>() {
        ("[", "]")
    } else if index.is_exact_instance_of::<PyTuple>() {
        ("(", ")")
    } else {
        return item_text(index);
    };
    let Ok(len) = index.len() else { return item_text(index) };
    let shown = (0..len.min(INDICES_SHOWN)).filter_map(|at| index.get_item(at).ok());
    let mut text = shown.map(|item| item_text(&item)).collect::<Vec<_>>().join(", ");
    if len > INDICES_SHOWN {
        text += &format!(", ... {len} in all");
    }
    format!("{open}{text}{close}")
}

fn item_text(item: &Bound<'_, PyAny>) -> String {
    if item.is_none() {
        return "None".into();
    }
    if item.is_exact_instance_of::<PyInt>() {
        return item.extract::<i64>().map_or_else(|_| "a large int".into(), |number| number.to_string());
    }
    if let Ok(text) = item.cast_exact::<PyString>() {
        let text = text.to_string_lossy();
        let cut: String = text.chars().take(KEY_SHOWN).collect();
        let more = if cut.len() < text.len() { "..." } else { "" };
        return format!("{cut:?}{more}");
    }
    item.get_type().name().map_or_else(|_| "<object>".into(), |name| format!("<{name}>"))
}
