//! Fast paths for `default_collate`. Where a function returns `None`, torch must collate the batch.

use pyo3::ffi;
use pyo3::prelude::*;

use super::memory::{Heap, Memory};
use super::tensor::moved::reading;
use super::tensor::{Bridge, items};
use super::view::{Form, StackPlan, TensorView};
use crate::config::{INLINE_LIMIT, STREAM_FROM};
use crate::copy::copy;
use crate::tree::dtype::Dtype;
use crate::tree::layout::is_contiguous;

/// Stacks, as `torch.stack` does, a list or tuple of plain tensors of the same dtype and shape into a contiguous tensor
/// of shape `(len(batch), *shape)`. If the result has at least [`INLINE_LIMIT`] bytes, its memory comes from `alloc`,
/// unless that returns `None`. Returns `None` for any other batch.
pub fn stack<M: Memory>(
    py: Python<'_>,
    bridge: &Bridge,
    batch: &Bound<'_, PyAny>,
    alloc: &mut dyn FnMut(usize) -> PyResult<Option<M>>,
) -> PyResult<Option<Py<PyAny>>> {
    // Hold references to the items, because other threads may change the list while the GIL is released.
    let Some(items) = items(batch) else { return Ok(None) };
    let Some(first) = items.first().and_then(|item| bridge.view(item)) else { return Ok(None) };
    if !items.iter().all(|item| bridge.is_tensor(item)) || bridge.has_modes(py)? {
        return Ok(None);
    }
    let Some(plan) = StackPlan::new(items.len(), first.shape(), first.dtype()) else { return Ok(None) };
    let StackPlan { each, total, .. } = plan;
    let _reading = reading(py);
    // For a small batch, calling torch is faster than reading every item.
    let sources = (total >= STREAM_FROM).then(|| sources(bridge, &items, &first));
    if matches!(sources, Some(None)) {
        return Ok(None);
    }
    let (ptr, tensor) = tensor_for(py, bridge, &plan, alloc)?;
    match sources.flatten() {
        // After an error, torch collates the batch again, and raises its own error.
        None => Ok(bridge.stack_into(batch, &tensor).ok()),
        Some(sources) => {
            let to = ptr as usize;
            py.detach(move || {
                for (i, from) in sources.into_iter().enumerate() {
                    // SAFETY: each source is a live contiguous tensor of `each` bytes; the target has room for all of
                    // them.
                    unsafe { copy(from as *const u8, (to + i * each) as *mut u8, each, true) };
                }
            });
            Ok(Some(tensor))
        }
    }
}

/// Creates an uninitialized tensor for a plan. Returns the address of its first byte, and the tensor. If the tensor has
/// at least [`INLINE_LIMIT`] bytes, its memory comes from `alloc`, unless that returns `None`.
pub fn tensor_for<M: Memory>(
    py: Python<'_>,
    bridge: &Bridge,
    plan: &StackPlan,
    alloc: &mut dyn FnMut(usize) -> PyResult<Option<M>>,
) -> PyResult<(*mut u8, Py<PyAny>)> {
    let (total, form) = (plan.total, plan.form());
    let leased = if total >= INLINE_LIMIT { alloc(total)? } else { None };
    match leased.filter(|lease| lease.len() >= total) {
        Some(lease) => Ok((lease.ptr(), bridge.tensor(py, lease, 0, form)?)),
        None => {
            let heap = Heap::new(total)?;
            Ok((heap.ptr(), bridge.tensor(py, heap, 0, form)?))
        }
    }
}

/// Returns the addresses of the items' data. Returns `None` unless all items are contiguous and have the dtype and
/// shape of the first one.
fn sources(bridge: &Bridge, items: &[Bound<'_, PyAny>], first: &TensorView<'_>) -> Option<Vec<usize>> {
    let source = |item| {
        let view = bridge.view(item)?;
        let alike = view.dtype() == first.dtype() && view.shape() == first.shape();
        (alike && is_contiguous(view.shape(), view.strides())).then_some(view.ptr() as usize)
    };
    items.iter().map(source).collect()
}

/// Creates a tensor from a list or tuple of exact floats (float64) or exact ints (int64), as `default_collate` does.
/// Returns `None` for any other batch.
pub fn numbers(py: Python<'_>, bridge: &Bridge, batch: &Bound<'_, PyAny>) -> PyResult<Option<Py<PyAny>>> {
    let Some(items) = items(batch) else { return Ok(None) };
    let Some(first) = items.first() else { return Ok(None) };
    let kind = first.get_type_ptr();
    let floats = kind == &raw mut ffi::PyFloat_Type;
    if !floats && kind != &raw mut ffi::PyLong_Type {
        return Ok(None);
    }
    let mut bytes = Vec::with_capacity(items.len() * 8);
    for item in &items {
        if item.get_type_ptr() != kind {
            return Ok(None);
        }
        if floats {
            // SAFETY: the item is an exact float, so reading it cannot fail.
            let value = unsafe { ffi::PyFloat_AsDouble(item.as_ptr()) };
            bytes.extend_from_slice(&value.to_ne_bytes());
        } else {
            let Some(value) = exact_int(item) else { return Ok(None) };
            bytes.extend_from_slice(&value.to_ne_bytes());
        }
    }
    if bridge.has_modes(py)? || !bridge.default_is_cpu(py)? {
        return Ok(None);
    }
    let dtype = if floats { Dtype::FLOAT64 } else { Dtype::INT64 };
    let form = Form { dtype, shape: &[items.len() as i64], strides: &[1] };
    bridge.tensor_copied(py, &bytes, form).map(Some)
}

/// Returns the value of an exact int. Returns `None` for any other object, and for a value that does not fit into 64
/// bits.
#[inline]
pub fn exact_int(item: &Bound<'_, PyAny>) -> Option<i64> {
    if item.get_type_ptr() != &raw mut ffi::PyLong_Type {
        return None;
    }
    let mut overflow = 0;
    // SAFETY: the item is an exact int; `overflow` reports a value out of range.
    let value = unsafe { ffi::PyLong_AsLongLongAndOverflow(item.as_ptr(), &mut overflow) };
    (overflow == 0).then_some(value)
}
