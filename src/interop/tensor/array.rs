//! Reading NumPy arrays, and creating them over memory.

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::bridge::{Bridge, Made};
use super::numpy::Numpy;
use crate::interop::buffer::LeaseBuffer;
use crate::interop::memory::{Heap, Memory};
use crate::interop::view::{Form, LeafView, Order};
use crate::tree::Kind;
use crate::tree::dtype::Dtype;
use crate::tree::layout::{Dims, is_contiguous};

impl Bridge {
    /// Returns a view of a plain array's memory. Returns `None` if the object is not exactly an `ndarray`, or if its
    /// dtype is not a built-in one of kind b, i, u, f or c in native byte order.
    pub fn array_view(&self, obj: &Bound<'_, PyAny>) -> Option<LeafView> {
        let numpy = self.numpy.as_ref().filter(|numpy| numpy.is_array(obj))?;
        let dtype = numpy.dtype_of(obj).ok()??;
        let export = Export::of(obj, ffi::PyBUF_STRIDES).ok()?;
        let view = &export.0;
        let count = usize::try_from(view.ndim).ok()?;
        let dims = |from: *const isize| {
            if count == 0 {
                return Some(Dims::EMPTY);
            }
            // SAFETY: an export with strides points to `ndim` sizes and `ndim` strides.
            Dims::new(unsafe { std::slice::from_raw_parts(from.cast::<i64>(), count) })
        };
        if view.itemsize != dtype.itemsize() as isize {
            return None;
        }
        let (shape, byte_strides) = (dims(view.shape)?, dims(view.strides)?);
        Some(LeafView { kind: Kind::Array, dtype, shape, byte_strides, first: view.buf.cast_const().cast() })
    }

    /// Returns true if nothing else refers to the array's memory. If the array is a view, the arrays under it must have
    /// no other references. None of these arrays may have weak references, whose callbacks could write to the memory
    /// when the array is freed.
    pub fn is_unshared(&self, array: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = array.py();
        let Some(numpy) = self.numpy.as_ref() else { return Ok(false) };
        let mut array = array.clone();
        loop {
            if !numpy.is_array(&array) || !numpy.weakrefs.bind(py).call1((&array,))?.eq(0)? {
                return Ok(false);
            }
            let base = array.getattr(intern!(py, "base"))?;
            if base.is_none() {
                return Ok(true);
            }
            // SAFETY: the object lives, and the GIL is held. The two references are those of the view and of `base`.
            if unsafe { ffi::Py_REFCNT(base.as_ptr()) } != 2 {
                return Ok(false);
            }
            array = base;
        }
    }

    fn numpy(&self, dtype: Dtype) -> PyResult<(&Numpy, &Py<PyAny>)> {
        let numpy = self
            .numpy
            .as_ref()
            .ok_or_else(|| PyRuntimeError::new_err("a batch contains an array, but NumPy cannot be imported"))?;
        let delivered = numpy.delivered[usize::from(dtype.code())].as_ref();
        Ok((numpy, delivered.ok_or_else(|| PyValueError::new_err("NumPy has no such dtype"))?))
    }

    /// Creates a writable array over leased memory, with its first element at byte `offset`. Raises ValueError if the
    /// form does not fit, or if NumPy has no such dtype.
    pub fn ndarray<M: Memory>(&self, py: Python<'_>, lease: M, offset: usize, form: Form<'_>) -> Made {
        form.check(&lease, offset).map_err(PyValueError::new_err)?;
        let Form { dtype, shape, strides } = form;
        let (numpy, numpy_dtype) = self.numpy(dtype)?;
        let buffer = Py::new(py, LeaseBuffer::new(lease))?;
        let shape_tuple = PyTuple::new(py, shape)?;
        if is_contiguous(shape, strides) {
            let array = numpy.ndarray.bind(py).call1((shape_tuple, numpy_dtype, buffer, offset))?;
            return Ok(array.unbind());
        }
        let bytes = PyTuple::new(py, strides.iter().map(|stride| stride.wrapping_mul(dtype.itemsize() as i64)))?;
        Ok(numpy.ndarray.bind(py).call1((shape_tuple, numpy_dtype, buffer, offset, bytes))?.unbind())
    }

    /// Creates an array that owns a copy of `bytes`, which must have the length of the form's extent.
    pub fn ndarray_copied(&self, py: Python<'_>, bytes: &[u8], form: Form<'_>) -> Made {
        if form.extent() != Some(bytes.len()) {
            return Err(PyValueError::new_err("the bytes of an array do not fit its sizes and strides"));
        }
        let order = Order::of(form.shape, form.strides);
        if order == Order::Other {
            // NumPy creates arrays with other strides only over existing memory.
            let heap = Heap::new(bytes.len())?;
            // SAFETY: `bytes.len()` bytes were just allocated, and only this function uses them.
            unsafe { heap.ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            return self.ndarray(py, heap, 0, form);
        }
        let (numpy, numpy_dtype) = self.numpy(form.dtype)?;
        let (ndarray, shape) = (numpy.ndarray.bind(py), PyTuple::new(py, form.shape)?);
        let array = match order {
            Order::C => ndarray.call1((shape, numpy_dtype))?,
            _ => ndarray.call1((shape, numpy_dtype, py.None(), 0, py.None(), "F"))?,
        };
        let export = Export::of(&array, ffi::PyBUF_STRIDES | ffi::PyBUF_WRITABLE)?;
        if export.0.len != bytes.len() as isize {
            return Err(PyRuntimeError::new_err("NumPy made an array of a different size"));
        }
        // SAFETY: the array is new and dense, and has `bytes.len()` bytes in the same order.
        unsafe { export.0.buf.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        drop(export);
        Ok(array.unbind())
    }
}

/// A buffer export of an array's memory.
struct Export<'a, 'py>(ffi::Py_buffer, std::marker::PhantomData<&'a Bound<'py, PyAny>>);

impl<'a, 'py> Export<'a, 'py> {
    fn of(obj: &'a Bound<'py, PyAny>, flags: std::ffi::c_int) -> PyResult<Self> {
        let mut view = ffi::Py_buffer::new();
        // SAFETY: the call fills the structure, or does not change it if it fails.
        if unsafe { ffi::PyObject_GetBuffer(obj.as_ptr(), &mut view, flags) } != 0 {
            return Err(PyErr::fetch(obj.py()));
        }
        Ok(Self(view, std::marker::PhantomData))
    }
}

impl Drop for Export<'_, '_> {
    fn drop(&mut self) {
        // SAFETY: a successful call filled the structure, which is released once. The GIL is held, because the borrowed
        // array is bound to it.
        unsafe { ffi::PyBuffer_Release(&mut self.0) }
    }
}

const _: () = assert!(size_of::<isize>() == size_of::<i64>());
