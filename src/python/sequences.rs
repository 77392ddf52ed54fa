//! Plans of batches for sequences. `_core.pyi` documents the classes.

use std::sync::{Mutex, PoisonError};

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use xxhash_rust::xxh3::Xxh3;

use crate::interop::collate;
use crate::interop::exit_guard::call;
use crate::interop::tensor::Bridge;
use crate::sequences::{self, Budget, Dealing, Order, Packs, Plan};

/// The lengths of the samples, in memory of the program.
enum Lengths {
    Int32(PyBuffer<i32>),
    Int64(PyBuffer<i64>),
}

/// The same, without the GIL.
#[derive(Clone, Copy)]
enum View<'a> {
    Int32(&'a [i32]),
    Int64(&'a [i64]),
}

fn view<T: pyo3::buffer::Element>(buffer: &PyBuffer<T>) -> PyResult<&[T]> {
    let items = buffer.as_slice_ptr().ok_or_else(|| PyTypeError::new_err("lengths must be contiguous"))?;
    // SAFETY: the buffer keeps its memory in place while it is borrowed. If the program writes to the array meanwhile,
    // any length that is read is as good as another: lengths are only compared and added.
    Ok(unsafe { items.as_ref() })
}

impl Lengths {
    fn of(array: &Bound<'_, PyAny>) -> PyResult<Self> {
        PyBuffer::get(array).map(Self::Int32).or_else(|_| PyBuffer::get(array).map(Self::Int64))
    }

    fn view(&self) -> PyResult<View<'_>> {
        Ok(match self {
            Self::Int32(buffer) => View::Int32(view(buffer)?),
            Self::Int64(buffer) => View::Int64(view(buffer)?),
        })
    }
}

impl View<'_> {
    fn len(self) -> usize {
        match self {
            Self::Int32(items) => items.len(),
            Self::Int64(items) => items.len(),
        }
    }

    #[inline]
    fn at(self, index: usize) -> i64 {
        match self {
            Self::Int32(items) => i64::from(items[index]),
            Self::Int64(items) => items[index],
        }
    }

    /// Returns a length, or the limit that is closest to it.
    #[inline]
    fn length(self, index: u32) -> u32 {
        self.at(index as usize).clamp(1, i64::from(u32::MAX)) as u32
    }
}

/// Number of bytes that are hashed together, a multiple of 8.
const HASHED_BYTES: usize = 1 << 13;

#[pyfunction]
pub fn summarize_lengths(py: Python<'_>, lengths: &Bound<'_, PyAny>) -> PyResult<(u64, usize, usize)> {
    let lengths = Lengths::of(lengths)?;
    let view = lengths.view()?;
    py.detach(|| {
        let (mut hash, mut bytes, mut shortest, mut longest) = (Xxh3::new(), Vec::new(), 0, 0);
        for index in 0..view.len() {
            let length = view.at(index);
            bytes.extend_from_slice(&length.to_le_bytes());
            if bytes.len() == HASHED_BYTES || index + 1 == view.len() {
                hash.update(&bytes);
                bytes.clear();
            }
            shortest = if length < view.at(shortest) { index } else { shortest };
            longest = if length > view.at(longest) { index } else { longest };
        }
        Ok((hash.digest(), shortest, longest))
    })
}

#[pyfunction]
pub fn int_tensor(py: Python<'_>, ints: &Bound<'_, PyAny>) -> PyResult<Option<Py<PyAny>>> {
    collate::numbers(py, Bridge::get(py)?, ints)
}

/// `shuffle`, `seed`, `epoch`, `window`.
type OrderTuple = (bool, u64, u64, usize);

fn planned(
    py: Python<'_>,
    lengths: &Bound<'_, PyAny>,
    (shuffle, seed, epoch, window): OrderTuple,
    plan: impl Fn(u32, View<'_>, &Order) -> Plan + Sync,
) -> PyResult<SequencePlan> {
    let lengths = Lengths::of(lengths)?;
    let (view, order) = (lengths.view()?, Order { shuffle, seed, epoch, window });
    Ok(SequencePlan(py.detach(|| plan(view.len() as u32, view, &order))))
}

#[pyclass(frozen, module = "rustloader._core")]
pub struct SequencePlan(Plan);

#[pymethods]
impl SequencePlan {
    #[staticmethod]
    fn budget(
        py: Python<'_>,
        lengths: &Bound<'_, PyAny>,
        order: OrderTuple,
        max_tokens: u64,
        max_samples: u64,
        multiple: u64,
    ) -> PyResult<Self> {
        let budget = Budget { max_tokens, max_samples, multiple };
        planned(py, lengths, order, |count, view, order| {
            sequences::budget(count, |index| view.length(index), order, &budget)
        })
    }

    #[staticmethod]
    fn packs(
        py: Python<'_>,
        lengths: &Bound<'_, PyAny>,
        order: OrderTuple,
        capacity: u32,
        per_batch: usize,
        skip_too_long: bool,
    ) -> PyResult<Self> {
        let packs = Packs { capacity, per_batch, skip_too_long };
        planned(py, lengths, order, |count, view, order| {
            sequences::packs(count, |index| view.length(index), order, &packs)
        })
    }

    fn __len__(&self) -> usize {
        self.0.batches()
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.0.bytes()
    }

    fn batch<'py>(&self, py: Python<'py>, number: usize) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.0.batch(number))
    }

    fn rounds(&self, consumed: usize, replicas: usize, drop_last: bool) -> usize {
        Dealing { batches: self.0.batches(), consumed, rank: 0, replicas, drop_last }.rounds()
    }
}

/// The index batches of one rank.
#[pyclass(frozen, module = "rustloader._core")]
pub struct SequenceBatches(Mutex<Batches>);

enum Batches {
    /// A function that returns the plan, and the arguments of `Dealing`, and the next round.
    Unstarted(Py<PyAny>),
    Started {
        plan: Py<SequencePlan>,
        dealing: Dealing,
        round: usize,
    },
}

#[pymethods]
impl SequenceBatches {
    #[new]
    fn new(begin: Py<PyAny>) -> Self {
        Self(Mutex::new(Batches::Unstarted(begin)))
    }

    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__<'py>(slf: &Bound<'py, Self>) -> PyResult<Option<Bound<'py, PyList>>> {
        let py = slf.py();
        let begin = match &*slf.get().lock() {
            Batches::Unstarted(begin) => Some(begin.clone_ref(py)),
            Batches::Started { .. } => None,
        };
        if let Some(begin) = begin {
            // An error, such as one that a signal handler raises, leaves the iterator as it was.
            let begun = call(begin.bind(py), PyTuple::new(py, [slf])?)?;
            let (plan, consumed, rank, replicas, drop_last, round) =
                begun.extract::<(Py<SequencePlan>, usize, usize, usize, bool, usize)>()?;
            let dealing = Dealing { batches: plan.get().0.batches(), consumed, rank, replicas, drop_last };
            *slf.get().lock() = Batches::Started { plan, dealing, round };
        }
        let mut batches = slf.get().lock();
        let Batches::Started { plan, dealing, round } = &mut *batches else { return Ok(None) };
        let Some(number) = dealing.batch(*round) else { return Ok(None) };
        let batch = plan.get().batch(py, number)?;
        *round += 1;
        Ok(Some(batch))
    }

    #[getter]
    fn round(&self) -> usize {
        match *self.lock() {
            Batches::Unstarted(_) => 0,
            Batches::Started { round, .. } => round,
        }
    }
}

impl SequenceBatches {
    fn lock(&self) -> std::sync::MutexGuard<'_, Batches> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
