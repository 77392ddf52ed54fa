//! The mapped image of a shared object (see `crate::store`) with its descriptor, and the image's raw data.

use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use pyo3::exceptions::{PyBufferError, PyOSError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::codec::rows::Rows;
use crate::interop::buffer::LeaseBuffer;
use crate::interop::memory::Memory;
use crate::store::Store;
use crate::sys::owned::KnownFd;
use crate::sys::sealed::{SealedMap, seal_all};

/// A mapped image. As a Python buffer, it exports the whole image.
#[pyclass(frozen, module = "rustloader._core")]
pub struct SharedStore {
    pub store: Arc<Rows>,
    /// The descriptor of the image, which is sent to other processes.
    fd: KnownFd,
}

impl SharedStore {
    /// Maps an image, and keeps the descriptor.
    pub fn open(fd: OwnedFd) -> PyResult<Self> {
        let store = Store::open(fd.as_fd())?;
        Ok(Self { store: Arc::new(store.into()), fd: KnownFd::new(fd) })
    }
}

/// Fills in `view` as a read-only buffer of the given bytes.
///
/// # Safety
/// `view` is null or a structure that Python passes to be filled in; the bytes stay valid while `owner` lives.
unsafe fn export(
    owner: &Bound<'_, PyAny>,
    view: *mut ffi::Py_buffer,
    bytes: (*mut u8, usize),
    flags: c_int,
) -> PyResult<()> {
    if view.is_null() {
        return Err(PyBufferError::new_err("no buffer structure was given"));
    }
    // SAFETY: `view` is Python's structure, and the caller keeps the bytes valid. Python refuses a writable view of a
    // read-only buffer.
    match unsafe { ffi::PyBuffer_FillInfo(view, owner.as_ptr(), bytes.0.cast(), bytes.1 as isize, 1, flags) } {
        0 => Ok(()),
        _ => Err(PyErr::fetch(owner.py())),
    }
}

#[pymethods]
impl SharedStore {
    #[new]
    fn new(py: Python<'_>, fd: i32) -> PyResult<Self> {
        if fd < 0 {
            return Err(PyOSError::new_err((libc::EBADF, "a shared object needs a descriptor")));
        }
        // SAFETY: the caller passes ownership of the descriptor, which is open.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        py.detach(|| Self::open(fd))
    }

    #[staticmethod]
    fn sealed(py: Python<'_>, fd: i32) -> PyResult<Self> {
        if fd < 0 {
            return Err(PyOSError::new_err((libc::EBADF, "a shared object needs a descriptor")));
        }
        // SAFETY: the caller has opened the descriptor, and keeps it open during the call.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let store = py.detach(|| {
            seal_all(fd)?;
            Store::open(fd)
        })?;
        // SAFETY: the caller passes ownership of the descriptor. Nothing below may fail, because the descriptor still
        // belongs to the caller after an error.
        let fd = unsafe { OwnedFd::from_raw_fd(fd.as_raw_fd()) };
        Ok(Self { store: Arc::new(store.into()), fd: KnownFd::new(fd) })
    }

    #[getter]
    fn kind(&self) -> u64 {
        self.store.kind
    }

    #[getter]
    fn rows(&self) -> u64 {
        self.store.rows()
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.store.bytes().len()
    }

    #[getter]
    fn meta<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.store.meta())
    }

    fn fileno(&self) -> PyResult<i32> {
        if self.fd.is_intact() {
            return Ok(self.fd.as_fd().as_raw_fd());
        }
        Err(PyOSError::new_err((
            libc::EBADF,
            "the descriptor of this shared object was closed by other code, so the object cannot be sent to another \
             process",
        )))
    }

    fn data(slf: Bound<'_, Self>) -> PyResult<SharedData> {
        let this = slf.get();
        let map = slf.py().detach(|| SealedMap::new(this.fd.as_fd(), true))?;
        let (at, len) = this.store.data();
        if at.checked_add(len).is_none_or(|end| end > map.len()) {
            return Err(crate::error::Error::foreign("its descriptor now refers to another file").into());
        }
        Ok(SharedData { store: slf.unbind(), bytes: PrivateBytes { map: Arc::new(map), at, len } })
    }

    /// # Safety
    /// Only Python may call this, with a structure to fill in.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let bytes = slf.get().store.bytes();
        // SAFETY: as above; the export keeps `slf` alive, and with it the mapping.
        unsafe { export(slf.as_any(), view, (bytes.as_ptr().cast_mut(), bytes.len()), flags) }
    }
}

/// The raw data of an image in a private mapping: writes change only this process's copy.
#[derive(Clone)]
struct PrivateBytes {
    map: Arc<SealedMap>,
    at: usize,
    len: usize,
}

// SAFETY: the bytes are part of the map.
unsafe impl Memory for PrivateBytes {
    fn ptr(&self) -> *mut u8 {
        self.map.as_ptr().wrapping_add(self.at)
    }

    fn len(&self) -> usize {
        self.len
    }
}

/// The raw data of an image as a read-only buffer, and as a torch storage.
#[pyclass(frozen, module = "rustloader._core")]
pub struct SharedData {
    #[pyo3(get)]
    store: Py<SharedStore>,
    bytes: PrivateBytes,
}

#[pymethods]
impl SharedData {
    #[getter]
    fn address(&self) -> usize {
        self.bytes.ptr() as usize
    }

    fn storage(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        LeaseBuffer::new(self.bytes.clone()).storage(py)
    }

    fn __len__(&self) -> usize {
        self.bytes.len
    }

    /// # Safety
    /// Only Python may call this, with a structure to fill in.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let bytes = &slf.get().bytes;
        // SAFETY: as above; the export keeps `slf` alive, and with it the mapping.
        unsafe { export(slf.as_any(), view, (bytes.ptr(), bytes.len), flags) }
    }
}
