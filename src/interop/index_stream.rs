//! The index stream, which yields the same index batches as torch's samplers, but from arrays with 8 bytes per index
//! instead of lists.
//!
//! Python draws the permutations (`order/drawn.py`), and the index stream cuts them into batches. It runs no
//! Python code between taking indices from an array and returning them or storing them in `pending`, so neither a
//! signal handler nor another thread can lose or repeat an index.

use std::sync::{Mutex, MutexGuard};

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyRuntimeError, PyStopIteration, PyTypeError, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList, PyTuple};

use super::exit_guard::{call, next_item};

/// The iterator over the index batches, or the indices, of one epoch. `_core.pyi` documents it.
#[pyclass(frozen, module = "rustloader._core")]
pub struct IndexStream {
    /// torch's own iterator, which is used instead of arrays if `begin` returns `None`. It must not have been started.
    torch_iterator: Py<PyAny>,
    /// The BatchSampler. As in torch, its `batch_size` is read for each batch or, if an incomplete last batch is
    /// dropped, once at the start. `None` if single indices are yielded.
    batches: Option<Py<PyAny>>,
    begin: Py<PyAny>,
    size_of: Py<PyAny>,
    is_interrupt: Py<PyAny>,
    /// Locked while `next` runs. A second `next` then raises the error that a running generator raises.
    state: Mutex<StreamState>,
}

/// The source of the indices.
enum Source {
    /// `next` has not been called.
    Unstarted,
    /// A function that returns the next array, or `None` at the end.
    Arrays(Py<PyAny>),
    TorchIterator,
    Ended,
}

struct StreamState {
    source: Source,
    array: Option<PyBuffer<i64>>,
    /// The position of the next index in the array.
    at: usize,
    /// The size of every batch, if an incomplete last batch is dropped.
    full: Option<usize>,
    /// The first indices of a batch that continues in the next array.
    pending: Vec<i64>,
    /// Number of index batches still to skip, except those already converted into `skip_indices`.
    skip_batches: usize,
    /// Number of indices still to skip.
    skip_indices: usize,
}

impl StreamState {
    /// Ends the stream and frees its memory.
    fn end(&mut self) {
        self.source = Source::Ended;
        self.array = None;
        self.pending = Vec::new();
        (self.skip_batches, self.skip_indices) = (0, 0);
    }
}

#[pymethods]
impl IndexStream {
    #[new]
    fn new(
        torch_iterator: Py<PyAny>,
        batches: Option<Py<PyAny>>,
        begin: Py<PyAny>,
        size_of: Py<PyAny>,
        is_interrupt: Py<PyAny>,
    ) -> Self {
        let source = Source::Unstarted;
        let state = StreamState {
            source,
            array: None,
            at: 0,
            full: None,
            pending: Vec::new(),
            skip_batches: 0,
            skip_indices: 0,
        };
        Self { torch_iterator, batches, begin, size_of, is_interrupt, state: Mutex::new(state) }
    }

    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let mut state = self.lock()?;
        if let Source::Unstarted = state.source {
            self.start(py, &mut state)?;
        }
        if state.skip_batches > 0 || state.skip_indices > 0 {
            self.skip_requested(py, &mut state)?;
        }
        match state.source {
            Source::TorchIterator => next_item(self.torch_iterator.bind(py)),
            Source::Ended => Ok(None),
            _ => self.batch(py, &mut state),
        }
    }

    fn skip(&self, count: usize) -> PyResult<()> {
        let mut state = self.lock()?;
        let Source::Unstarted = state.source else {
            return Err(PyValueError::new_err("skip must be called before the first next of an index stream"));
        };
        state.skip_batches = state.skip_batches.saturating_add(count);
        Ok(())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for object in [&self.torch_iterator, &self.begin, &self.size_of, &self.is_interrupt] {
            visit.call(object)?;
        }
        visit.call(&self.batches)?;
        match self.state.try_lock().as_deref() {
            Ok(StreamState { source: Source::Arrays(next_array), .. }) => visit.call(next_array),
            _ => Ok(()),
        }
    }
}

impl IndexStream {
    fn lock(&self) -> PyResult<MutexGuard<'_, StreamState>> {
        self.state.try_lock().map_err(|_| PyValueError::new_err("generator already executing"))
    }

    fn start(&self, py: Python<'_>, state: &mut StreamState) -> PyResult<()> {
        let begun = self.ask(self.begin.bind(py), state)?;
        if begun.is_none() {
            state.source = Source::TorchIterator;
        } else {
            let (next_array, full) = begun.extract::<(Py<PyAny>, Option<usize>)>()?;
            state.source = Source::Arrays(next_array);
            state.full = full;
        }
        Ok(())
    }

    /// Skips the number of index batches that `skip` has requested, assuming the current batch size for all of them.
    /// After an interrupt, the next call continues.
    fn skip_requested(&self, py: Python<'_>, state: &mut StreamState) -> PyResult<()> {
        if let Source::TorchIterator = state.source {
            while state.skip_batches > 0 {
                let skipped = next_item(self.torch_iterator.bind(py))?;
                state.skip_batches = if skipped.is_some() { state.skip_batches - 1 } else { 0 };
            }
            return Ok(());
        }
        if state.skip_batches > 0 {
            let size = self.size(py, state)?;
            state.skip_indices = state.skip_batches.saturating_mul(size);
            state.skip_batches = 0;
        }
        while state.skip_indices > 0 {
            let taken = remaining(&state.array, state.at).len().min(state.skip_indices);
            state.at += taken;
            state.skip_indices -= taken;
            if taken == 0 && !self.refill(py, state)? {
                state.end();
            }
        }
        Ok(())
    }

    /// Returns the next index batch or, without a BatchSampler, the next index. Returns `None` at the end.
    fn batch<'py>(&self, py: Python<'py>, state: &mut StreamState) -> PyResult<Option<Bound<'py, PyAny>>> {
        let size = self.size(py, state)?;
        if size == 0 {
            state.end();
            return Ok(None);
        }
        if state.pending.is_empty()
            && let Some(indices) = remaining(&state.array, state.at).get(..size)
        {
            let batch = self.to_python(indices.iter().copied(), py)?;
            state.at += size;
            return Ok(Some(batch));
        }
        let mut ended = false;
        while !ended && state.pending.len() < size {
            let indices = remaining(&state.array, state.at);
            let taken = indices.len().min(size - state.pending.len());
            state.pending.extend(indices[..taken].iter().copied());
            state.at += taken;
            ended = taken == 0 && !self.refill(py, state)?;
        }
        let is_dropped = state.pending.is_empty() || (ended && state.full.is_some());
        let batch = if is_dropped { None } else { Some(self.to_python(state.pending.iter().copied(), py)?) };
        state.pending.clear();
        // An incomplete batch does not end the stream yet, because torch reads `batch_size` once more after it.
        if batch.is_none() {
            state.end();
        }
        Ok(batch)
    }

    /// Returns the size of the next batch.
    #[inline]
    fn size(&self, py: Python<'_>, state: &mut StreamState) -> PyResult<usize> {
        let Some(batches) = &self.batches else { return Ok(1) };
        if let Some(size) = state.full {
            return Ok(size);
        }
        let size = batches.bind(py).getattr(intern!(py, "batch_size"));
        let size = size.map_err(|error| self.failed(py, error, state))?;
        match size.cast_exact::<PyInt>().ok().and_then(|size| size.extract::<u32>().ok()) {
            Some(size) => Ok(size as usize),
            None => {
                let size_of = self.size_of.bind(py);
                self.ask_with(size_of, PyTuple::new(py, [size])?, state)?.extract()
            }
        }
    }

    /// Returns the indices as a list of ints or, without a BatchSampler, the single index.
    #[inline]
    fn to_python<'py>(
        &self,
        mut indices: impl ExactSizeIterator<Item = i64>,
        py: Python<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        match self.batches {
            Some(_) => Ok(PyList::new(py, indices)?.into_any()),
            None => Ok(indices.next().into_pyobject(py)?),
        }
    }

    /// Takes the next array. Returns false if there is none.
    fn refill(&self, py: Python<'_>, state: &mut StreamState) -> PyResult<bool> {
        let Source::Arrays(next_array) = &state.source else { return Ok(false) };
        let next_array = next_array.clone_ref(py);
        state.array = None;
        let array = self.ask(next_array.bind(py), state)?;
        if array.is_none() {
            return Ok(false);
        }
        let array = PyBuffer::<i64>::get(&array)?;
        if !array.is_c_contiguous() {
            return Err(PyTypeError::new_err("an index stream needs contiguous arrays"));
        }
        state.array = Some(array);
        state.at = 0;
        Ok(true)
    }

    fn ask<'py>(&self, function: &Bound<'py, PyAny>, state: &mut StreamState) -> PyResult<Bound<'py, PyAny>> {
        self.ask_with(function, PyTuple::empty(function.py()), state)
    }

    fn ask_with<'py>(
        &self,
        function: &Bound<'py, PyAny>,
        args: Bound<'py, PyTuple>,
        state: &mut StreamState,
    ) -> PyResult<Bound<'py, PyAny>> {
        call(function, args).map_err(|error| self.failed(function.py(), error, state))
    }

    /// Handles an error: ends the stream, as an error ends a generator, unless a signal handler raised it. Returns the
    /// error to raise.
    fn failed(&self, py: Python<'_>, error: PyErr, state: &mut StreamState) -> PyErr {
        // Do not use `error.value`, because that exception has no traceback.
        let value = error.clone_ref(py).into_value(py);
        let asked = PyTuple::new(py, [value]).and_then(|args| call(self.is_interrupt.bind(py), args));
        if asked.and_then(|answer| answer.is_truthy()).unwrap_or(true) {
            return error;
        }
        state.end();
        if !error.is_instance_of::<PyStopIteration>(py) {
            return error;
        }
        let raised = PyRuntimeError::new_err("generator raised StopIteration");
        raised.set_cause(py, Some(error));
        raised
    }
}

/// Returns the part of the array from `at` on. Returns an empty slice if there is no array.
#[inline]
fn remaining(array: &Option<PyBuffer<i64>>, at: usize) -> &[i64] {
    let Some(items) = array.as_ref().and_then(PyBuffer::as_slice_ptr) else { return &[] };
    // SAFETY: the buffer keeps its memory in place while it is borrowed. Nothing writes to the memory, because the
    // function that returned the array keeps no reference to it.
    unsafe { items.as_ref() }.get(at..).unwrap_or_default()
}
