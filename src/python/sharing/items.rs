//! A shared list or tuple.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::exceptions::{PyIndexError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyList, PySlice, PyString, PyTuple};

use super::store::SharedStore;
use crate::codec::rows::{self, Rows};

/// The base class of `SharedList` and `SharedTuple`, with the methods that read items.
#[pyclass(frozen, subclass, module = "rustloader._core")]
pub struct SharedItems {
    items: Arc<Rows>,
    #[pyo3(get)]
    store: Py<SharedStore>,
    is_tuple: bool,
}

impl SharedItems {
    fn len(&self) -> u64 {
        self.items.rows()
    }

    fn name(&self) -> &'static str {
        if self.is_tuple { "tuple" } else { "list" }
    }

    /// Returns true if a row equals `other` in the sense of the operator `in`. `text` is the text of `other`, if
    /// `other` is an exact str.
    fn is_equal(&self, row: u64, other: &Bound<'_, PyAny>, text: Option<&str>) -> PyResult<bool> {
        match text.and_then(|text| rows::is_text(&self.items, row, text)) {
            Some(known) => Ok(known),
            None => rows::value(other.py(), &self.items, row)?.eq(other),
        }
    }

    /// Returns the first row in `range` that is equal to `other`.
    fn find(&self, range: std::ops::Range<u64>, other: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
        let text = other.cast_exact::<PyString>().ok().and_then(|text| text.to_str().ok());
        for row in range {
            if self.is_equal(row, other, text)? {
                return Ok(Some(row));
            }
        }
        Ok(None)
    }

    #[cold]
    fn get_other<'py>(&self, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = key.py();
        let Ok(slice) = key.cast::<PySlice>() else {
            let kind = key.get_type();
            let (name, other) = (self.name(), kind.name()?);
            let text = format!("{name} indices must be integers or slices, not {other}");
            return Err(PyTypeError::new_err(text));
        };
        let slice = slice.indices(self.len() as isize)?;
        let rows = (0..slice.slicelength).map(|n| (slice.start + n as isize * slice.step) as u64);
        let values = rows.map(|row| rows::value(py, &self.items, row)).collect::<PyResult<Vec<_>>>()?;
        Ok(if self.is_tuple { PyTuple::new(py, values)?.into_any() } else { PyList::new(py, values)?.into_any() })
    }
}

/// Converts an int, or an object with an `__index__` method, to an index, as Python's sequences do. Returns `None` for
/// any other object.
#[inline]
fn index_of(key: &Bound<'_, PyAny>) -> PyResult<Option<isize>> {
    // SAFETY: the object is alive; a call that fails returns -1 and sets an exception.
    let index = unsafe {
        if ffi::PyIndex_Check(key.as_ptr()) == 0 {
            return Ok(None);
        }
        ffi::PyNumber_AsSsize_t(key.as_ptr(), ffi::PyExc_IndexError)
    };
    match if index == -1 { PyErr::take(key.py()) } else { None } {
        Some(error) => Err(error),
        None => Ok(Some(index)),
    }
}

/// The argument `start` or `stop` of `index`. As in Python's sequences, a number that does not fit into a machine word
/// is clamped.
struct Bounded(isize);

impl FromPyObject<'_, '_> for Bounded {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        // SAFETY: the object is alive; a call that fails returns -1 and sets an exception. Large numbers are clamped
        // instead.
        let bound = unsafe { ffi::PyNumber_AsSsize_t(object.as_ptr(), std::ptr::null_mut()) };
        match if bound == -1 { PyErr::take(object.py()) } else { None } {
            Some(error) => Err(error),
            None => Ok(Self(bound)),
        }
    }
}

#[pymethods]
impl SharedItems {
    #[new]
    #[pyo3(signature = (store, is_tuple))]
    fn new(store: Bound<'_, SharedStore>, is_tuple: bool) -> Self {
        Self { items: Arc::clone(&store.get().store), store: store.unbind(), is_tuple }
    }

    fn __len__(&self) -> usize {
        self.len() as usize
    }

    #[inline]
    fn __getitem__<'py>(&self, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let Some(index) = index_of(key)? else { return self.get_other(key) };
        let len = self.len();
        let row = if index < 0 { (len as i64).wrapping_add(index as i64) as u64 } else { index as u64 };
        if row >= len {
            return Err(PyIndexError::new_err(format!("{} index out of range", self.name())));
        }
        rows::value(key.py(), &self.items, row)
    }

    fn __iter__(&self) -> SharedIterator {
        SharedIterator::new(Arc::clone(&self.items), 0, 1, self.len())
    }

    fn __reversed__(&self) -> SharedIterator {
        SharedIterator::new(Arc::clone(&self.items), self.len() as i64 - 1, -1, self.len())
    }

    fn __contains__(&self, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(self.find(0..self.len(), value)?.is_some())
    }

    #[pyo3(signature = (value, start = Bounded(0), stop = Bounded(isize::MAX), /))]
    #[pyo3(text_signature = "($self, value, start=0, stop=9223372036854775807, /)")]
    fn index(&self, value: &Bound<'_, PyAny>, start: Bounded, stop: Bounded) -> PyResult<u64> {
        let (len, Bounded(start), Bounded(stop)) = (self.len() as isize, start, stop);
        let bound = |at: isize| (if at < 0 { at.saturating_add(len).max(0) } else { at.min(len) }) as u64;
        let missing = || match self.is_tuple {
            true => PyValueError::new_err("tuple.index(x): x not in tuple"),
            false => match value.repr() {
                Ok(repr) => PyValueError::new_err(format!("{repr} is not in list")),
                Err(error) => error,
            },
        };
        self.find(bound(start)..bound(stop), value)?.ok_or_else(missing)
    }

    #[pyo3(signature = (value, /))]
    fn count(&self, value: &Bound<'_, PyAny>) -> PyResult<u64> {
        let (mut count, mut from) = (0, 0);
        while let Some(row) = self.find(from..self.len(), value)? {
            (count, from) = (count + 1, row + 1);
        }
        Ok(count)
    }

    /// Returns true if `other` has the same length and equal items.
    fn equals(&self, other: &Bound<'_, PyAny>) -> PyResult<bool> {
        if other.len()? as u64 != self.len() {
            return Ok(false);
        }
        for (row, item) in other.try_iter()?.enumerate() {
            let item = item?;
            let text = item.cast_exact::<PyString>().ok().and_then(|text| text.to_str().ok());
            if row as u64 >= self.len() || !self.is_equal(row as u64, &item, text)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// An iterator over `count` rows: `first`, `first + step`, and so on.
#[pyclass(frozen, module = "rustloader._core")]
pub struct SharedIterator {
    store: Arc<Rows>,
    first: i64,
    step: i64,
    count: u64,
    done: AtomicU64,
}

impl SharedIterator {
    pub fn new(store: Arc<Rows>, first: i64, step: i64, count: u64) -> Self {
        Self { store, first, step, count, done: AtomicU64::new(0) }
    }
}

#[pymethods]
impl SharedIterator {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        // A separate load and store are enough, because the GIL is held.
        let done = self.done.load(Ordering::Relaxed);
        if done >= self.count {
            return Ok(None);
        }
        self.done.store(done + 1, Ordering::Relaxed);
        rows::value(py, &self.store, (self.first + done as i64 * self.step) as u64).map(Some)
    }

    fn __length_hint__(&self) -> u64 {
        self.count - self.done.load(Ordering::Relaxed).min(self.count)
    }
}
