//! Batches of a TensorDataset: rows of its tensors, gathered in one pass instead of sample by sample.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use super::collate::exact_int;
use super::tensor::Bridge;
use super::tensor::moved::reading;
use super::view::{StackPlan, TensorView};
use crate::config::DETACH_FROM;
use crate::tree::layout::is_contiguous;

/// A tensor to write to: the address of its first byte, and the tensor.
type Target = (*mut u8, Py<PyAny>);

/// A function that creates the target for a source tensor and its plan, with room for all bytes of the plan. It returns
/// `None` to leave the batch to torch.
type Make<'a, 'py> = dyn FnMut(&Bound<'py, PyAny>, &StackPlan) -> PyResult<Option<Target>> + 'a;

/// Gathers the rows `index` of a TensorDataset's tensors into the batch that `default_collate` would make from these
/// samples: a list of the stacked rows of each tensor. Leaves the batch to torch and returns `None` if an index is not
/// an exact int in range, if a tensor is not plain or its rows are not contiguous, if a mode of torch is active, or if
/// `make` returns `None`.
pub fn gather<'py>(
    bridge: &Bridge,
    tensors: &Bound<'py, PyAny>,
    index: &Bound<'py, PyAny>,
    make: &mut Make<'_, 'py>,
) -> PyResult<Option<Bound<'py, PyList>>> {
    let py = index.py();
    let (Ok(tensors), Some((rows, end))) = (tensors.cast_exact::<PyTuple>(), rows(index)) else {
        return Ok(None);
    };
    if tensors.is_empty() || bridge.has_modes(py)? {
        return Ok(None);
    }
    let planned = |tensor: &Bound<'py, PyAny>| {
        let view = bridge.view(tensor)?;
        Some((plan(&view, rows.len(), end)?, view.ptr() as usize, view.strides()[0] as usize * view.dtype().itemsize()))
    };
    let plans = tensors.iter().map(|tensor| planned(&tensor));
    let Some(plans) = plans.collect::<Option<Vec<_>>>() else { return Ok(None) };
    let mut targets = Vec::with_capacity(plans.len());
    for (tensor, (plan, ..)) in tensors.iter().zip(&plans) {
        let Some(target) = make(&tensor, plan)? else { return Ok(None) };
        targets.push(target);
    }
    let batch = PyList::empty(py);
    for ((tensor, (plan, from, step)), (to, made)) in tensors.iter().zip(plans).zip(targets) {
        // Keep the storage, because other threads may give the tensor another one while the GIL is released.
        let _storage = match plan.total {
            DETACH_FROM.. => Some(tensor.call_method0(intern!(py, "untyped_storage"))?),
            _ => None,
        };
        let _reading = reading(tensor.py());
        // Python code that has run since the plan was made may have changed the tensor.
        if planned(&tensor) != Some((plan, from, step)) {
            return Ok(None);
        }
        let to = to as usize;
        let copy = || {
            for (place, row) in rows.iter().enumerate() {
                let (from, to) = ((from + row * step) as *const u8, (to + place * plan.each) as *mut u8);
                // SAFETY: the rows are in range, so each is in the tensor's memory, which the GIL or `_storage` keeps
                // alive. The target is new memory with room for each row. (A program that resizes the storage in
                // another thread meanwhile would also break torch.stack.)
                unsafe { to.copy_from_nonoverlapping(from, plan.each) };
            }
        };
        match plan.total {
            0 => {}
            DETACH_FROM.. => py.detach(copy),
            _ => copy(),
        }
        batch.append(made)?;
    }
    Ok(Some(batch))
}

/// Returns the plan for stacking `count` rows of a tensor. Returns `None` if the tensor has fewer than `end` rows, or
/// if its rows are not contiguous.
fn plan(view: &TensorView<'_>, count: usize, end: usize) -> Option<StackPlan> {
    let (&length, row) = view.shape().split_first()?;
    let (&step, strides) = view.strides().split_first()?;
    let exists = usize::try_from(length).is_ok_and(|length| end <= length) && step >= 0;
    (exists && is_contiguous(row, strides)).then(|| StackPlan::new(count, row, view.dtype()))?
}

/// Returns the row numbers in a non-empty list of exact, non-negative ints, and the largest of them plus 1. Returns
/// `None` for anything else.
pub fn rows(index: &Bound<'_, PyAny>) -> Option<(Vec<usize>, usize)> {
    let row = |item| usize::try_from(exact_int(&item)?).ok();
    let rows = index.cast_exact::<PyList>().ok()?.iter().map(row).collect::<Option<Vec<_>>>()?;
    let end = rows.iter().max()?.checked_add(1)?;
    Some((rows, end))
}

/// Calls [`gather`] with targets that torch allocates. `_core.pyi` documents this function.
#[pyfunction(name = "gather")]
pub fn gather_in_torch<'py>(
    tensors: &Bound<'py, PyAny>,
    index: &Bound<'py, PyAny>,
) -> PyResult<Option<Bound<'py, PyList>>> {
    let bridge = Bridge::get(index.py())?;
    gather(bridge, tensors, index, &mut |tensor, plan| {
        let made = tensor.call_method1(intern!(tensor.py(), "new_empty"), (&plan.shape[..],))?;
        // Check the result, because a program may have replaced the method.
        let fits = |view: &TensorView<'_>| {
            view.dtype() == plan.dtype && *view.shape() == plan.shape && *view.strides() == plan.strides
        };
        let ptr = bridge.view(&made).filter(fits).map(|view| view.ptr().cast_mut());
        Ok(ptr.map(|ptr| (ptr, made.unbind())))
    })
}
