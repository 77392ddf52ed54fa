//! The table of cached samples. `_core.pyi` documents the class.

use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::{PyException, PyIndexError, PyMemoryError, PyOSError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::cache::{Batch, Cache, Closed, Head, Lookup, Put, Record, Usage};
use crate::codec::rows::Scratch;
use crate::codec::samples;
use crate::interop::collate::exact_int;
use crate::sys::files;

/// A mapped table.
#[pyclass(frozen, weakref, name = "CacheTable", module = "rustloader._core")]
pub struct PyCache {
    cache: Cache,
    /// Buffers that are reused from sample to sample.
    scratch: Mutex<Scratch>,
}

impl From<Cache> for PyCache {
    fn from(cache: Cache) -> Self {
        Self { cache, scratch: Mutex::default() }
    }
}

impl PyCache {
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    fn row(&self, row: u64) -> PyResult<u64> {
        if row < self.cache.rows() {
            return Ok(row);
        }
        Err(PyIndexError::new_err(format!("the cache has no row {row}")))
    }

    /// Returns the sample of a row's record; `None` if it cannot be loaded.
    fn sample<'py>(&self, py: Python<'py>, row: u64, record: Record<'_>) -> PyResult<Option<Bound<'py, PyAny>>> {
        match samples::value(py, record) {
            // The sample's class has moved, or its pickle cannot be loaded for another reason.
            Err(error) if error.is_instance_of::<PyException>(py) && !error.is_instance_of::<PyMemoryError>(py) => {
                self.cache.never(row);
                Ok(None)
            }
            read => read.map(Some),
        }
    }
}

/// The header of a file: version, rows, limit and meta.
type HeadTuple<'py> = (u64, u64, u64, Bound<'py, PyBytes>);

/// The samples of indices, and the positions of those that are missing.
type FoundTuple<'py> = (Vec<Bound<'py, PyAny>>, Vec<usize>);

/// Borrows a descriptor from the caller, or fails if it is negative.
fn borrowed(fd: &i32) -> PyResult<BorrowedFd<'_>> {
    if *fd < 0 {
        return Err(PyOSError::new_err((libc::EBADF, "a cache needs a descriptor")));
    }
    // SAFETY: the caller has opened the descriptor, and keeps it open during the call.
    Ok(unsafe { BorrowedFd::borrow_raw(*fd) })
}

#[pymethods]
impl PyCache {
    /// Maps a table that another process created or opened, and takes ownership of the descriptor.
    #[new]
    #[pyo3(signature = (fd, opening = 0))]
    fn new(py: Python<'_>, fd: i32, opening: u32) -> PyResult<Self> {
        borrowed(&fd)?;
        // SAFETY: the caller passes ownership of the descriptor, which is open.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(py.detach(|| Cache::open(fd, opening))?.into())
    }

    #[staticmethod]
    fn create(py: Python<'_>, rows: u64, limit: u64) -> PyResult<Self> {
        Ok(py.detach(|| Cache::create(rows, limit))?.into())
    }

    /// Formats a file of `limit` zero bytes as an empty table.
    #[staticmethod]
    fn format(fd: i32, rows: u64, limit: u64, meta: &[u8]) -> PyResult<()> {
        Ok(Cache::format(borrowed(&fd)?, rows, limit, meta)?)
    }

    /// Returns the header of a file, or None if the file is not a table.
    #[staticmethod]
    fn head<'py>(py: Python<'py>, fd: i32) -> PyResult<Option<HeadTuple<'py>>> {
        let head = Head::read(borrowed(&fd)?)?;
        Ok(head.map(|Head { version, rows, limit, meta, .. }| (version, rows, limit, PyBytes::new(py, &meta))))
    }

    /// Maps a table in a file, through a duplicate of the descriptor. [`Cache::open_file`] explains the arguments.
    #[staticmethod]
    fn open_file(py: Python<'_>, fd: i32, whole: u64, token: u64) -> PyResult<Self> {
        let fd = borrowed(&fd)?.try_clone_to_owned()?;
        Ok(py.detach(|| Cache::open_file(fd, whole, token))?.into())
    }

    #[staticmethod]
    fn overhead(rows: u64) -> u64 {
        Cache::overhead(rows)
    }

    fn grow(&self, limit: u64) {
        self.cache.grow(limit);
    }

    fn reopen(&self) {
        self.cache.reopen();
    }

    #[getter]
    fn rows(&self) -> u64 {
        self.cache.rows()
    }

    #[getter]
    fn opening(&self) -> u32 {
        self.cache.opening()
    }

    #[getter]
    fn limit(&self) -> u64 {
        self.cache.limit()
    }

    /// Returns the reason why the table takes no more samples, or None while it still takes samples.
    #[getter]
    fn closed(&self) -> Option<&'static str> {
        match self.cache.closed() {
            Closed::Open => None,
            Closed::Full => Some("full"),
            Closed::NoRoom => Some("no room"),
        }
    }

    fn fileno(&self) -> PyResult<i32> {
        let closed = || {
            let text = "the descriptor of this cache was closed by other code, so the cache cannot be sent to another \
                        process";
            PyOSError::new_err((libc::EBADF, text))
        };
        Ok(self.cache.fd().ok_or_else(closed)?.as_raw_fd())
    }

    /// Returns the sample of an index, or `missing`. Only exact ints are looked up, because converting any other index
    /// may run user code.
    fn get<'py>(&self, index: &Bound<'py, PyAny>, missing: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let row = exact_int(index).and_then(|index| u64::try_from(index).ok());
        let Some(row) = row.filter(|row| *row < self.cache.rows()) else { return Ok(missing) };
        let sample = match self.cache.lookup(row) {
            Lookup::Whole(record) => self.sample(missing.py(), row, record)?,
            Lookup::Due(_) => return Ok(missing),
            Lookup::Absent | Lookup::Never => None,
        };
        if sample.is_some() {
            self.cache.count_hits(1);
        }
        Ok(sample.unwrap_or(missing))
    }

    /// Returns the samples of indices, with `missing` in place of each sample that `get` would not return, and the
    /// positions of these. Returns None if an index is not an exact int, or has no row. Counts nothing.
    fn get_all<'py>(
        &self,
        indices: &Bound<'py, PyList>,
        missing: &Bound<'py, PyAny>,
    ) -> PyResult<Option<FoundTuple<'py>>> {
        let row = |index: Bound<'py, PyAny>| u64::try_from(exact_int(&index)?).ok();
        let rows = indices.iter().map(|index| row(index).filter(|row| *row < self.cache.rows()));
        let Some(rows) = rows.collect::<Option<Vec<_>>>() else { return Ok(None) };
        let (mut samples, mut absent) = (Vec::with_capacity(rows.len()), Vec::new());
        for (position, row) in rows.into_iter().enumerate() {
            let sample = match self.cache.lookup(row) {
                Lookup::Whole(record) => self.sample(missing.py(), row, record)?,
                _ => None,
            };
            absent.extend(sample.is_none().then_some(position));
            samples.push(sample.unwrap_or_else(|| missing.clone()));
        }
        Ok(Some((samples, absent)))
    }

    /// Returns true if the sample of a row must be compared with the dataset before it is used, or if the file is known
    /// to belong to another dataset.
    fn is_due(&self, row: u64) -> PyResult<bool> {
        let row = self.row(row)?;
        Ok(self.cache.differing_row().is_some() || matches!(self.cache.lookup(row), Lookup::Due(_)))
    }

    /// Returns the sample of a row, even if it must be compared first, or `missing`. Counts nothing.
    fn peek<'py>(&self, row: u64, missing: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let sample = match self.cache.lookup(self.row(row)?) {
            Lookup::Whole(record) | Lookup::Due(record) => self.sample(missing.py(), row, record)?,
            Lookup::Absent | Lookup::Never => None,
        };
        Ok(sample.unwrap_or(missing))
    }

    fn compared(&self, row: u64, is_equal: bool, seconds: f64) -> PyResult<()> {
        self.cache.compared(self.row(row)?, is_equal, (seconds * 1e9) as u64);
        Ok(())
    }

    #[getter]
    fn differing_row(&self) -> Option<u64> {
        self.cache.differing_row()
    }

    /// Returns true if it is worth passing the sample of a row to `put`: the row has neither a record nor the mark that
    /// `never` sets, and the cache takes samples.
    fn takes(&self, row: u64) -> PyResult<bool> {
        let is_open = self.cache.closed() == Closed::Open;
        Ok(is_open && self.cache.lookup(self.row(row)?) == Lookup::Absent)
    }

    /// Stores a sample. Returns the reason if this call closes the cache, and None otherwise.
    fn put(&self, row: u64, sample: &Bound<'_, PyAny>, dumps: &Bound<'_, PyAny>) -> PyResult<Option<&'static str>> {
        let row = self.row(row)?;
        // The lock is not held during the call: user code that runs while the sample is pickled may call this method
        // again, and another thread may fill the cache at the same time.
        let mut scratch = std::mem::take(&mut *self.scratch.lock().unwrap_or_else(PoisonError::into_inner));
        let put = samples::put(&self.cache, row, sample, dumps, &mut scratch);
        *self.scratch.lock().unwrap_or_else(PoisonError::into_inner) = scratch;
        Ok(if put? == Put::Closed(true) { self.closed() } else { None })
    }

    fn never(&self, row: u64) -> PyResult<()> {
        self.cache.never(self.row(row)?);
        Ok(())
    }

    fn count(&self, hits: u64, misses: u64) {
        self.cache.count_hits(hits);
        self.cache.count_misses(misses);
    }

    fn take_probe(&self) -> bool {
        self.cache.take_probe()
    }

    fn first_time(&self, event: u64) -> bool {
        self.cache.first_time(event)
    }

    fn has_happened(&self, event: u64) -> bool {
        self.cache.has_happened(event)
    }

    fn usage<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        usage_dict(py, self.cache.usage())
    }

    /// Returns the usage that is recorded in the first [`HEADER`](crate::cache::HEADER) bytes of a file, or None if the
    /// file is not a table of this version.
    #[staticmethod]
    fn usage_of_header<'py>(py: Python<'py>, header: &[u8]) -> PyResult<Option<Bound<'py, PyDict>>> {
        Usage::of_header(header).map(|usage| usage_dict(py, usage)).transpose()
    }
}

/// Small samples that are written to a table together.
#[pyclass(frozen, name = "CacheBatch", module = "rustloader._core")]
pub struct PyBatch {
    table: Py<PyCache>,
    batch: Mutex<Batch>,
}

#[pymethods]
impl PyBatch {
    #[new]
    fn new(table: Py<PyCache>) -> Self {
        Self { table, batch: Mutex::default() }
    }

    /// Adds a copy of a sample that is plain and small. Returns the number of bytes in the batch; 0 if the sample is
    /// not added, so that `CacheTable.put` must be called.
    fn add(&self, row: u64, sample: &Bound<'_, PyAny>) -> PyResult<usize> {
        if !self.table.get().takes(row)? {
            return Ok(0);
        }
        let mut batch = self.batch.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(if samples::add(&mut batch, row, sample)? { batch.size() } else { 0 })
    }

    /// Stores the samples. Returns the reason if this call closes the cache, and None otherwise.
    fn write(&self) -> PyResult<Option<&'static str>> {
        let mut batch = self.batch.lock().unwrap_or_else(PoisonError::into_inner);
        let table = self.table.get();
        Ok(if table.cache.put_all(&mut batch)? { table.closed() } else { None })
    }
}

/// Returns the keyword arguments of Python's `CacheUsage`.
fn usage_dict(py: Python<'_>, usage: Usage) -> PyResult<Bound<'_, PyDict>> {
    let numbers = [
        ("hits", usage.hits),
        ("misses", usage.misses),
        ("lifetime_hits", usage.lifetime_hits),
        ("lifetime_misses", usage.lifetime_misses),
        ("samples_bytes", usage.stored),
        ("bytes_left", usage.left),
        ("bytes_unused", usage.unused),
        ("refused", usage.refused),
        ("damaged", usage.damaged),
        ("limit", usage.limit),
    ];
    let dict = PyDict::new(py);
    for (name, number) in numbers {
        dict.set_item(name, number)?;
    }
    Ok(dict)
}

/// Gives a file in a folder another name there. Returns false if that name exists.
#[pyfunction]
pub fn rename_to_new(folder: i32, from: &[u8], to: &[u8]) -> PyResult<bool> {
    let [from, to] = [from, to].map(|name| [name, b"\0"].concat());
    let [from, to] = [&from, &to].map(|name| CStr::from_bytes_until_nul(name).unwrap_or_default());
    Ok(files::rename_to_new(borrowed(&folder)?, from, to)?)
}
