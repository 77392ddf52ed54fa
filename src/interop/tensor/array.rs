//! NumPy arrays.

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::Bridge;
use crate::interop::dlpack::buffer::LeaseBuffer;
use crate::interop::memory::{Heap, Memory};
use crate::interop::view::{Order, check_view};
use crate::tree::dtype::Dtype;
use crate::tree::layout::{Dims, extent, is_contiguous};

/// NumPy's objects.
pub struct Numpy {
    ndarray: Py<PyAny>,
    /// NumPy's built-in dtypes, aliases (`longlong`) among them, and ours.
    known: Vec<(Py<PyAny>, Dtype)>,
    /// By the codes of our dtypes, those that arrays are delivered with.
    delivered: Vec<Option<Py<PyAny>>>,
}

/// A plain array, as memory.
pub struct ArrayView {
    /// The first element.
    pub ptr: *const u8,
    /// The element type.
    pub dtype: Dtype,
    /// The sizes.
    pub shape: Dims,
    /// The strides, in bytes.
    pub byte_strides: Dims,
}

/// Every built-in type of kinds b, i, u, f, c by its letter.
const LETTERS: &str = "?bBhHiIlLqQefdgFDG";

impl Numpy {
    /// NumPy's objects, if NumPy is there.
    pub fn find(py: Python<'_>) -> Option<Self> {
        Self::look_up(py).ok()
    }

    fn look_up(py: Python<'_>) -> PyResult<Self> {
        let numpy = py.import("numpy")?;
        let make = numpy.getattr("dtype")?;
        let delivered: Vec<Option<Py<PyAny>>> =
            Dtype::all().map(|dtype| make.call1((dtype.numpy_name()?,)).ok().map(Bound::unbind)).collect();
        let mut known = Vec::new();
        for letter in LETTERS.chars() {
            let found = make.call1((letter.to_string(),))?;
            for dtype in Dtype::all() {
                if let Some(delivered) = &delivered[usize::from(dtype.code())]
                    && found.eq(delivered)?
                {
                    known.push((found.clone().unbind(), dtype));
                }
            }
        }
        Ok(Self { ndarray: numpy.getattr("ndarray")?.unbind(), known, delivered })
    }

    #[inline]
    pub fn is_array(&self, obj: &Bound<'_, PyAny>) -> bool {
        obj.get_type_ptr().cast() == self.ndarray.as_ptr()
    }

    fn dtype_of(&self, array: &Bound<'_, PyAny>) -> PyResult<Option<Dtype>> {
        let py = array.py();
        let dtype = array.getattr(intern!(py, "dtype"))?;
        if let Some((_, found)) = self.known.iter().find(|(known, _)| known.is(&dtype)) {
            return Ok(Some(*found));
        }
        // Unpickled arrays carry copies of the built-in dtypes. `==` tells byte orders and fields apart,
        // metadata not.
        if !dtype.getattr(intern!(py, "metadata"))?.is_none() {
            return Ok(None);
        }
        for (known, found) in &self.known {
            if dtype.eq(known)? {
                return Ok(Some(*found));
            }
        }
        Ok(None)
    }
}

impl Bridge {
    /// The memory of a plain array. `None`: it is not exactly an `ndarray`, or not of a native dtype of kinds
    /// b, i, u, f, c.
    pub fn array_view(&self, obj: &Bound<'_, PyAny>) -> Option<ArrayView> {
        let numpy = self.numpy.as_ref().filter(|numpy| numpy.is_array(obj))?;
        let dtype = match numpy.dtype_of(obj) {
            Ok(dtype) => dtype?,
            Err(_) => return None,
        };
        let export = Export::of(obj, ffi::PyBUF_STRIDES).ok()?;
        let view = &export.0;
        let count = usize::try_from(view.ndim).ok()?;
        let dims = |from: *const isize| {
            if count == 0 {
                return Some(Dims::EMPTY);
            }
            // SAFETY: an export with strides points to `ndim` numbers of either kind.
            Dims::new(unsafe { std::slice::from_raw_parts(from.cast::<i64>(), count) })
        };
        if view.itemsize != dtype.itemsize() as isize {
            return None;
        }
        let ptr = view.buf.cast_const().cast();
        Some(ArrayView { ptr, dtype, shape: dims(view.shape)?, byte_strides: dims(view.strides)? })
    }

    fn numpy(&self, dtype: Dtype) -> PyResult<(&Numpy, &Py<PyAny>)> {
        let numpy = self
            .numpy
            .as_ref()
            .ok_or_else(|| PyRuntimeError::new_err("a batch holds an array, but NumPy is missing"))?;
        let found = numpy.delivered[usize::from(dtype.code())].as_ref();
        Ok((numpy, found.ok_or_else(|| PyValueError::new_err("NumPy has no such dtype"))?))
    }

    /// An array over leased memory, writeable. Sizes and strides count elements; the first one lies at
    /// `byte_offset`.
    pub fn ndarray<M: Memory>(
        &self,
        py: Python<'_>,
        lease: M,
        byte_offset: usize,
        dtype: Dtype,
        shape: &[i64],
        strides: &[i64],
    ) -> PyResult<Py<PyAny>> {
        check_view(&lease, byte_offset, dtype, shape, strides).map_err(PyValueError::new_err)?;
        let (numpy, own) = self.numpy(dtype)?;
        let buffer = Py::new(py, LeaseBuffer::new(lease))?;
        let shape_tuple = PyTuple::new(py, shape)?;
        if is_contiguous(shape, strides) {
            let array = numpy.ndarray.bind(py).call1((shape_tuple, own, buffer, byte_offset))?;
            return Ok(array.unbind());
        }
        let bytes =
            PyTuple::new(py, strides.iter().map(|stride| stride.wrapping_mul(dtype.itemsize() as i64)))?;
        Ok(numpy.ndarray.bind(py).call1((shape_tuple, own, buffer, byte_offset, bytes))?.unbind())
    }

    /// An array that owns a copy of `bytes`, which are its extent.
    pub fn ndarray_copied(
        &self,
        py: Python<'_>,
        bytes: &[u8],
        dtype: Dtype,
        shape: &[i64],
        strides: &[i64],
    ) -> PyResult<Py<PyAny>> {
        if extent(shape, strides, dtype.itemsize()) != Some(bytes.len()) {
            return Err(PyValueError::new_err("the bytes of an array do not fit its sizes and strides"));
        }
        let order = Order::of(shape, strides);
        if order == Order::Other {
            // NumPy makes such arrays only over memory that it does not own.
            let heap = Heap::new(bytes.len())?;
            // SAFETY: just as many bytes were allocated, and nobody else knows them.
            unsafe { heap.ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            return self.ndarray(py, heap, 0, dtype, shape, strides);
        }
        let (numpy, own) = self.numpy(dtype)?;
        let (ndarray, shape) = (numpy.ndarray.bind(py), PyTuple::new(py, shape)?);
        let array = match order {
            Order::C => ndarray.call1((shape, own))?,
            _ => ndarray.call1((shape, own, py.None(), 0, py.None(), "F"))?,
        };
        let export = Export::of(&array, ffi::PyBUF_STRIDES | ffi::PyBUF_WRITABLE)?;
        if export.0.len != bytes.len() as isize {
            return Err(PyRuntimeError::new_err("NumPy made an array of another size"));
        }
        // SAFETY: a new dense array of just as many bytes, whose order the bytes follow.
        unsafe { export.0.buf.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        drop(export);
        Ok(array.unbind())
    }
}

/// An export of an array's memory.
struct Export<'a, 'py>(ffi::Py_buffer, std::marker::PhantomData<&'a Bound<'py, PyAny>>);

impl<'a, 'py> Export<'a, 'py> {
    fn of(obj: &'a Bound<'py, PyAny>, flags: std::ffi::c_int) -> PyResult<Self> {
        let mut view = ffi::Py_buffer::new();
        // SAFETY: the structure is filled by the call, or left alone when it fails.
        if unsafe { ffi::PyObject_GetBuffer(obj.as_ptr(), &mut view, flags) } != 0 {
            return Err(PyErr::fetch(obj.py()));
        }
        Ok(Self(view, std::marker::PhantomData))
    }
}

impl Drop for Export<'_, '_> {
    fn drop(&mut self) {
        // SAFETY: filled by a successful call, released once; the GIL is held, as for the array itself.
        unsafe { ffi::PyBuffer_Release(&mut self.0) }
    }
}

const _: () = assert!(size_of::<isize>() == size_of::<i64>());
