//! Arrays that are delivered as tensors.

use pyo3::intern;
use pyo3::prelude::*;

use super::tensor::Bridge;
use super::view::LeafView;
use crate::tree::Kind;
use crate::tree::layout::Dims;

/// An array of a batch, to be delivered as the tensor that `torch.as_tensor` would return for it. The worker
/// does not create that tensor, because the tensor would hide the array, and with it any other references to the
/// memory.
#[pyclass(frozen, module = "rustloader._core")]
pub struct ArrayTensor {
    /// The array. This object keeps it alive, as the tensor would.
    array: Py<PyAny>,
}

impl ArrayTensor {
    /// Wraps an array. [`Bridge::view_as_tensor`] returns the view of its memory as a tensor.
    pub fn new(array: &Bound<'_, PyAny>) -> Self {
        Self { array: array.clone().unbind() }
    }

    /// Returns a new reference to the array.
    pub fn array<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        self.array.bind(py).clone()
    }
}

#[pymethods]
impl ArrayTensor {
    fn tensor<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import(intern!(py, "torch"))?.call_method1(intern!(py, "as_tensor"), (&self.array,))
    }
}

impl Bridge {
    /// Returns a view of a plain array's memory as the tensor that `torch.as_tensor` would return for it. Returns
    /// `None` if the array is not plain, or if torch would warn or fail.
    pub fn view_as_tensor(&self, array: &Bound<'_, PyAny>) -> Option<LeafView> {
        let py = array.py();
        let view = self.array_view(array)?;
        let flags = array.getattr(intern!(py, "flags")).ok()?;
        if view.dtype.torch_name().is_none() || !flags.getattr(intern!(py, "writeable")).ok()?.is_truthy().ok()? {
            return None;
        }
        // torch keeps the array's strides. In a buffer export, a dimension of size 1 may have another stride.
        let strides: Vec<i64> = array.getattr(intern!(py, "strides")).ok()?.extract().ok()?;
        let item = view.dtype.itemsize() as i64;
        let fits = strides.iter().all(|&stride| stride >= 0 && stride % item == 0);
        let strides = Dims::new(&strides).filter(|_| fits)?;
        Some(LeafView { kind: Kind::Tensor, byte_strides: strides, ..view })
    }
}
