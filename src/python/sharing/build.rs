//! The builder that makes images of Python objects.

use std::sync::Mutex;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;

use super::store::SharedStore;
use crate::codec::{Shapes, rows};
use crate::store::Builder;

/// An image that is being written. Only one call at a time may use it; any other call fails.
#[pyclass(frozen, module = "rustloader._core")]
pub struct ShareBuilder {
    builder: Mutex<Option<(Builder, Shapes)>>,
}

/// Number of rows, or pairs, between two checks for signals.
const SIGNALS_EVERY: u64 = 1024;

impl ShareBuilder {
    fn with<T>(&self, run: impl FnOnce(&mut Builder, &mut Shapes) -> PyResult<T>) -> PyResult<T> {
        let used = || PyRuntimeError::new_err("this shared object is finished, or another call is building it");
        // Do not wait for the lock, because user code that `run` executes may call a method of this object.
        let mut builder = self.builder.try_lock().map_err(|_| used())?;
        let (builder, shapes) = builder.as_mut().ok_or_else(used)?;
        run(builder, shapes)
    }
}

/// Adds to an error a note that names the failed item. Returns the error.
fn with_note(py: Python<'_>, error: PyErr, row: u64, part: &str) -> PyErr {
    let note = format!("rustloader.share() failed at {part} {row} (counted from 0)");
    // If the note cannot be added, the error is raised without it.
    let _ = error.value(py).call_method1("add_note", (note,));
    error
}

#[pymethods]
impl ShareBuilder {
    #[new]
    fn new() -> PyResult<Self> {
        Ok(Self { builder: Mutex::new(Some((Builder::new()?, Shapes::default()))) })
    }

    /// Appends each item of an iterable as a row.
    fn extend(&self, py: Python<'_>, items: &Bound<'_, PyAny>, dumps: &Bound<'_, PyAny>) -> PyResult<()> {
        self.with(|builder, shapes| {
            let mut scratch = rows::Scratch::default();
            for item in items.try_iter()? {
                let row = builder.rows();
                rows::push(builder, shapes, &item?, dumps, &mut scratch)
                    .map_err(|error| with_note(py, error, row, "item"))?;
                if row % SIGNALS_EVERY == 0 {
                    py.check_signals()?;
                }
            }
            Ok(())
        })
    }

    /// Appends the key and the value of each pair as two rows.
    fn update(&self, py: Python<'_>, pairs: &Bound<'_, PyAny>, dumps: &Bound<'_, PyAny>) -> PyResult<()> {
        self.with(|builder, shapes| {
            let (mut scratch, mut bytes) = (rows::Scratch::default(), Vec::new());
            for pair in pairs.try_iter()? {
                let (key, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = pair?.extract()?;
                let row = builder.rows() / 2;
                let failed = |error| with_note(py, error, row, "pair");
                let hash = rows::key_hash(&key, &mut bytes)?;
                rows::push(builder, shapes, &key, dumps, &mut scratch).map_err(failed)?;
                builder.key(hash);
                rows::push(builder, shapes, &value, dumps, &mut scratch).map_err(failed)?;
                if row % SIGNALS_EVERY == 0 {
                    py.check_signals()?;
                }
            }
            Ok(())
        })
    }

    fn expect(&self, py: Python<'_>, nbytes: u64) -> PyResult<()> {
        self.with(|builder, _| Ok(py.detach(|| builder.expect(nbytes))?))
    }

    fn raw(&self, py: Python<'_>, data: PyBuffer<u8>) -> PyResult<()> {
        if !data.is_c_contiguous() {
            return Err(PyTypeError::new_err("raw data must be contiguous"));
        }
        let (mut from, len) = (data.buf_ptr().cast_const().cast::<u8>(), data.len_bytes());
        if len == 0 {
            from = std::ptr::NonNull::dangling().as_ptr();
        }
        // SAFETY: these are the bytes of the buffer, which stay valid while `data` lives. A thread that changes them
        // races with the copy, as it would with any other reader.
        let bytes = unsafe { std::slice::from_raw_parts(from, len) };
        self.with(|builder, _| Ok(py.detach(|| builder.raw(bytes))?))
    }

    fn finish(&self, py: Python<'_>, kind: u64, meta: &[u8]) -> PyResult<SharedStore> {
        let taken = self.builder.try_lock().ok().and_then(|mut builder| builder.take());
        let (builder, shapes) = taken.ok_or_else(|| PyRuntimeError::new_err("this shared object is finished"))?;
        let shapes = shapes.finish();
        // Rows use their shapes as the meta. Raw data has no rows, and uses the caller's meta.
        let meta = if shapes.is_empty() { meta } else { &shapes };
        let fd = py.detach(|| builder.finish(kind, meta))?;
        SharedStore::open(fd)
    }
}
