//! A shared dict: rows of keys alternate with rows of values.

use std::sync::Arc;

use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;

use super::items::SharedIterator;
use super::store::SharedStore;
use crate::codec::rows::{self, Rows};

/// The base class of `SharedDict`, with the methods that read pairs.
#[pyclass(frozen, subclass, module = "rustloader._core")]
pub struct SharedPairs {
    pairs: Arc<Rows>,
    #[pyo3(get)]
    store: Py<SharedStore>,
}

impl SharedPairs {
    fn len(&self) -> u64 {
        self.pairs.rows() / 2
    }

    fn iterator(&self, first: i64, step: i64) -> SharedIterator {
        SharedIterator::new(Arc::clone(&self.pairs), first, step, self.len())
    }
}

#[pymethods]
impl SharedPairs {
    #[new]
    fn new(store: Bound<'_, SharedStore>) -> Self {
        Self { pairs: Arc::clone(&store.get().store), store: store.unbind() }
    }

    fn __len__(&self) -> usize {
        self.len() as usize
    }

    fn __getitem__<'py>(&self, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        match rows::find_key(&self.pairs, key)? {
            Some(row) => rows::value(key.py(), &self.pairs, row + 1),
            None => Err(PyKeyError::new_err((key.clone().unbind(),))),
        }
    }

    #[pyo3(signature = (key, default = None, /))]
    fn get<'py>(
        &self,
        key: &Bound<'py, PyAny>,
        default: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        match rows::find_key(&self.pairs, key)? {
            Some(row) => rows::value(key.py(), &self.pairs, row + 1).map(Some),
            None => Ok(default),
        }
    }

    fn __contains__(&self, key: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(rows::find_key(&self.pairs, key)?.is_some())
    }

    fn __iter__(&self) -> SharedIterator {
        self.iterator(0, 2)
    }

    fn __reversed__(&self) -> SharedIterator {
        self.iterator(self.len() as i64 * 2 - 2, -2)
    }

    /// Returns an iterator over the values, in the order of the keys or in reverse.
    fn iterate_values(&self, is_reversed: bool) -> SharedIterator {
        if is_reversed { self.iterator(self.len() as i64 * 2 - 1, -2) } else { self.iterator(1, 2) }
    }
}
