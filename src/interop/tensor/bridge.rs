//! The objects of torch and NumPy that the crate uses, and the functions that read torch tensors and create them over
//! memory.

use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{IntoPyDict, PyBool, PyList, PyTuple};

use super::numpy::Numpy;
use crate::interop::dlpack::abi::CPU;
use crate::interop::dlpack::block::Block;
use crate::interop::dlpack::exchange::{Exchange, Importer};
use crate::interop::memory::{Heap, Memory};
use crate::interop::view::{Form, TensorView};
use crate::tree::dtype::Dtype;
use crate::tree::layout::{Dims, numel};

static BRIDGE: PyOnceLock<Bridge> = PyOnceLock::new();

/// A new Python object, or the error with which its creation failed.
pub type Made = PyResult<Py<PyAny>>;

/// The objects of torch and NumPy that the crate uses, looked up once per process.
pub struct Bridge {
    tensor: Py<PyAny>,
    exchange: Option<Exchange>,
    importer: Importer,
    is_neg: Py<PyAny>,
    is_conj: Py<PyAny>,
    /// The method that recognizes named tensors, which torch refuses to send. `None` in newer versions of torch, which
    /// lack it.
    has_names: Option<Py<PyAny>>,
    strided: Py<PyAny>,
    stack: Py<PyAny>,
    /// Pairs of a torch dtype and the corresponding dtype of this crate.
    dtypes: Vec<(Py<PyAny>, Dtype)>,
    /// torch's functions that return the number of function modes, the number of dispatch modes, and the default
    /// device.
    defaults: [Py<PyAny>; 3],
    pub(super) numpy: Option<Numpy>,
}

impl Bridge {
    /// Imports torch and, if possible, NumPy. If `exchange` is false, torch's C functions for DLPack are not used, as
    /// with versions of torch before 2.10.
    pub fn new(py: Python<'_>, exchange: bool) -> PyResult<Self> {
        let torch = py.import("torch")?;
        let tensor = torch.getattr("Tensor")?;
        let c = torch.getattr("_C")?;
        let of_c = |name: &str| c.getattr(name).map(Bound::unbind);
        let exchange = if exchange { Exchange::of(&tensor) } else { None };
        let importer = match exchange {
            Some(exchange) => Importer::Exchange(exchange),
            None => Importer::Capsule(of_c("_from_dlpack")?),
        };
        // Older versions of torch have dtypes that their DLPack does not support.
        let makes = |dtype| {
            let empty = Block::<Heap>::copied(&[], Form::empty(dtype));
            empty.ok().flatten().is_some_and(|block| importer.import(py, block).is_ok())
        };
        let dtypes = Dtype::all().filter_map(|dtype| {
            let torch_dtype = torch.getattr(dtype.torch_name()?).ok()?;
            makes(dtype).then(|| (torch_dtype.unbind(), dtype))
        });
        Ok(Self {
            exchange,
            is_neg: tensor.getattr("is_neg")?.unbind(),
            is_conj: tensor.getattr("is_conj")?.unbind(),
            has_names: tensor.getattr("has_names").ok().map(Bound::unbind),
            strided: torch.getattr("strided")?.unbind(),
            stack: torch.getattr("stack")?.unbind(),
            dtypes: dtypes.collect(),
            importer,
            defaults: [
                of_c("_len_torch_function_stack")?,
                of_c("_len_torch_dispatch_stack")?,
                of_c("_get_default_device")?,
            ],
            numpy: Numpy::find(py).ok(),
            tensor: tensor.unbind(),
        })
    }

    /// Returns the bridge of this process, which is created on first use.
    pub fn get(py: Python<'_>) -> PyResult<&'static Self> {
        BRIDGE.get_or_try_init(py, || Self::new(py, true))
    }

    /// Returns true if an object is exactly a `torch.Tensor`, not an instance of a subclass.
    #[inline]
    pub fn is_tensor(&self, obj: &Bound<'_, PyAny>) -> bool {
        obj.get_type_ptr().cast() == self.tensor.as_ptr()
    }

    /// Returns true if an object is exactly a `numpy.ndarray`, not an instance of a subclass.
    #[inline]
    pub fn is_array(&self, obj: &Bound<'_, PyAny>) -> bool {
        self.numpy.as_ref().is_some_and(|numpy| numpy.is_array(obj))
    }

    /// Returns a view of a plain tensor's memory. Returns `None` if the object is not exactly a `torch.Tensor`. Also
    /// returns `None` if the tensor is not on the CPU, is not strided, requires grad, has names or a dtype that DLPack
    /// lacks, or is a lazy conjugate, a lazy negation or a zero tensor.
    pub fn view<'a>(&self, obj: &'a Bound<'_, PyAny>) -> Option<TensorView<'a>> {
        if !self.is_tensor(obj) {
            return None;
        }
        let py = obj.py();
        let view = self.read(obj);
        if view.is_none() {
            // A tensor that torch cannot describe is not plain, which is not an error.
            drop(PyErr::take(py));
        }
        view
    }

    #[inline]
    fn read<'a>(&self, obj: &'a Bound<'_, PyAny>) -> Option<TensorView<'a>> {
        let py = obj.py();
        let is_false = |value: PyResult<Bound<'_, PyAny>>| value.is_ok_and(|v| v.is(PyBool::new(py, false)));
        if !is_false(obj.getattr(intern!(py, "requires_grad"))) {
            return None;
        }
        if let Some(has_names) = &self.has_names
            && !is_false(has_names.bind(py).call1((obj,)))
        {
            return None;
        }
        let view = match &self.exchange {
            Some(exchange) => self.read_exchange(exchange, obj)?,
            None => self.read_attributes(obj)?,
        };
        // A functional or zero tensor has elements but no memory.
        if view.ptr().is_null() && numel(view.shape()) != Some(0) {
            return None;
        }
        if view.dtype().may_be_neg() && !is_false(self.is_neg.bind(py).call1((obj,))) {
            return None;
        }
        if view.dtype().is_complex() && !is_false(self.is_conj.bind(py).call1((obj,))) {
            return None;
        }
        Some(view)
    }

    #[inline]
    fn read_exchange<'a>(&self, exchange: &Exchange, obj: &'a Bound<'_, PyAny>) -> Option<TensorView<'a>> {
        let tensor = exchange.read(obj)?;
        if tensor.device.device_type != CPU {
            return None;
        }
        let dtype = Dtype::from_dl(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)?;
        if dtype == Dtype::UINT8 || dtype == Dtype::INT8 {
            // torch describes other dtypes to DLPack in the same way: uint1 to uint7, bit, and int1 to int7.
            let torch_dtype = obj.getattr(intern!(obj.py(), "dtype")).ok()?;
            if self.dtype_of(&torch_dtype) != Some(dtype) {
                return None;
            }
        }
        let dims = |from: *const i64| match tensor.ndim {
            0 => Some(Dims::EMPTY),
            // SAFETY: `from` points to `ndim` numbers inside the tensor, and no Python code runs before they are
            // copied.
            n => Dims::new(unsafe { std::slice::from_raw_parts(from, usize::try_from(n).ok()?) }),
        };
        let ptr = tensor.data.cast_const().cast::<u8>().wrapping_add(tensor.byte_offset as usize);
        // SAFETY: torch describes this tensor, which `obj` keeps alive.
        Some(unsafe { TensorView::new(ptr, dtype, dims(tensor.shape)?, dims(tensor.strides)?) })
    }

    /// Reads a tensor without torch's C functions.
    fn read_attributes<'a>(&self, obj: &'a Bound<'_, PyAny>) -> Option<TensorView<'a>> {
        let py = obj.py();
        if !obj.getattr(intern!(py, "layout")).ok()?.is(&self.strided)
            || obj.getattr(intern!(py, "is_nested")).ok()?.is_truthy().ok()?
            || !obj.getattr(intern!(py, "is_cpu")).ok()?.is_truthy().ok()?
        {
            return None;
        }
        let dtype = self.dtype_of(&obj.getattr(intern!(py, "dtype")).ok()?)?;
        let dims = |name| -> Option<Dims> { Dims::new(&obj.call_method0(name).ok()?.extract::<Vec<i64>>().ok()?) };
        let (shape, strides) = (dims(intern!(py, "size"))?, dims(intern!(py, "stride"))?);
        let ptr = obj.call_method0(intern!(py, "data_ptr")).ok()?.extract::<usize>().ok()? as *const u8;
        // SAFETY: torch describes this tensor, which `obj` keeps alive.
        Some(unsafe { TensorView::new(ptr, dtype, shape, strides) })
    }

    fn dtype_of(&self, dtype: &Bound<'_, PyAny>) -> Option<Dtype> {
        self.dtypes.iter().find(|(known, _)| known.is(dtype)).map(|(_, dtype)| *dtype)
    }

    /// Creates a tensor over leased memory, with its first element at byte `offset`. The tensor is not a view, its
    /// storage ends with its last element, and the lease is dropped with the last tensor on that storage. Raises
    /// ValueError if the form does not fit, or if torch has no such dtype.
    pub fn tensor<M: Memory>(&self, py: Python<'_>, lease: M, offset: usize, form: Form<'_>) -> Made {
        let block = Block::leased(lease, offset, form).map_err(PyValueError::new_err)?;
        self.importer.import(py, block.ok_or_else(|| creation_error(form.dtype))?)
    }

    /// Creates a tensor that owns a copy of `bytes`, which must have the length of the form's extent.
    pub fn tensor_copied(&self, py: Python<'_>, bytes: &[u8], form: Form<'_>) -> Made {
        let block = Block::<Heap>::copied(bytes, form).map_err(PyValueError::new_err)?;
        self.importer.import(py, block.ok_or_else(|| creation_error(form.dtype))?)
    }

    /// Calls `torch.stack(batch, 0, out=out)`. Returns `out`, unless the program has replaced `torch.stack`.
    pub fn stack_into(&self, batch: &Bound<'_, PyAny>, out: &Py<PyAny>) -> PyResult<Py<PyAny>> {
        let py = batch.py();
        let options = [(intern!(py, "out"), out)].into_py_dict(py)?;
        self.stack.bind(py).call((batch, 0), Some(&options)).map(Bound::unbind)
    }

    /// Returns true if a function mode (such as that of a default device) or a dispatch mode is active, which may
    /// change the results of torch's operators.
    pub fn has_modes(&self, py: Python<'_>) -> PyResult<bool> {
        let [functions, dispatch, _] = &self.defaults;
        Ok(functions.call0(py)?.is_truthy(py)? || dispatch.call0(py)?.is_truthy(py)?)
    }

    /// Returns true if torch creates tensors on the CPU by default. `torch.set_default_tensor_type` may change this.
    pub fn default_is_cpu(&self, py: Python<'_>) -> PyResult<bool> {
        self.defaults[2].bind(py).call0()?.eq(intern!(py, "cpu"))
    }
}

#[pyfunction]
pub fn is_plain_leaf(py: Python<'_>, obj: &Bound<'_, PyAny>) -> PyResult<bool> {
    let bridge = Bridge::get(py)?;
    Ok(bridge.view(obj).is_some() || bridge.array_view(obj).is_some())
}

/// Returns the items of an exact list or tuple. Returns `None` for any other object.
pub fn items<'py>(batch: &Bound<'py, PyAny>) -> Option<Vec<Bound<'py, PyAny>>> {
    if let Ok(list) = batch.cast_exact::<PyList>() {
        Some(list.iter().collect())
    } else {
        batch.cast_exact::<PyTuple>().ok().map(|tuple| tuple.iter().collect())
    }
}

#[cold]
fn creation_error(dtype: Dtype) -> PyErr {
    match dtype.dl() {
        Some(_) => PyMemoryError::new_err("no memory for a tensor"),
        None => PyValueError::new_err("torch has no such dtype"),
    }
}
