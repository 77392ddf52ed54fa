//! Fast paths of `default_collate`. Whatever is not covered here is torch's: `None` says so.

use pyo3::ffi;
use pyo3::prelude::*;

use super::memory::{Heap, Memory};
use super::tensor::{Bridge, items};
use super::view::{StackPlan, TensorView};
use crate::config::{INLINE_LIMIT, STREAM_FROM};
use crate::copy::copy;
use crate::tree::dtype::Dtype;
use crate::tree::layout::is_contiguous;

/// `torch.stack` of a list or tuple of plain tensors of one dtype and shape: a contiguous tensor of shape
/// `(len(batch), *shape)`. Its memory comes from `alloc` from [`INLINE_LIMIT`] bytes on (ordinary memory where
/// that gives none).
pub fn stack<M: Memory>(
    py: Python<'_>,
    bridge: &Bridge,
    batch: &Bound<'_, PyAny>,
    alloc: &mut dyn FnMut(usize) -> PyResult<Option<M>>,
) -> PyResult<Option<Py<PyAny>>> {
    // The items are held: other threads may change the list while the GIL is released.
    let Some(items) = items(batch) else { return Ok(None) };
    let Some(first) = items.first().and_then(|item| bridge.view(item)) else { return Ok(None) };
    if !items.iter().all(|item| bridge.is_tensor(item)) || bridge.has_modes(py)? {
        return Ok(None);
    }
    let Some(plan) = StackPlan::new(items.len(), &first.shape, first.dtype) else { return Ok(None) };
    let StackPlan { shape, strides, each, total } = plan;
    // To look at every item costs more than torch needs for all of a small batch.
    let sources = if total < STREAM_FROM {
        None
    } else {
        match sources(bridge, &items, &first) {
            None => return Ok(None),
            found => found,
        }
    };
    let leased = if total >= INLINE_LIMIT { alloc(total)? } else { None };
    let (ptr, tensor) = match leased.filter(|lease| lease.len() >= total) {
        Some(lease) => (lease.ptr(), bridge.tensor(py, lease, 0, first.dtype, &shape, &strides)?),
        None => {
            let heap = Heap::new(total)?;
            (heap.ptr(), bridge.tensor(py, heap, 0, first.dtype, &shape, &strides)?)
        }
    };
    match sources {
        // What torch refuses, its own function refuses as well, in its own words.
        None => Ok(bridge.stack_into(batch, &tensor).is_ok().then_some(tensor)),
        Some(sources) => {
            let to = ptr as usize;
            py.detach(move || {
                for (i, from) in sources.into_iter().enumerate() {
                    // SAFETY: each source is a live contiguous tensor of `each` bytes; the target has room for
                    // all of them.
                    unsafe { copy(from as *const u8, (to + i * each) as *mut u8, each, true) };
                }
            });
            Ok(Some(tensor))
        }
    }
}

/// Where the elements of each item lie, if all are contiguous and as the first.
fn sources(bridge: &Bridge, items: &[Bound<'_, PyAny>], first: &TensorView<'_>) -> Option<Vec<usize>> {
    let source = |item| {
        let view = bridge.view(item)?;
        let alike = view.dtype == first.dtype && *view.shape == *first.shape;
        (alike && is_contiguous(&view.shape, &view.strides)).then_some(view.ptr as usize)
    };
    items.iter().map(source).collect()
}

/// `torch.tensor` of a list or tuple of floats (float64) or of ints (int64), of exactly these types.
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
            // SAFETY: an exact float; reading it cannot fail.
            let value = unsafe { ffi::PyFloat_AsDouble(item.as_ptr()) };
            bytes.extend_from_slice(&value.to_ne_bytes());
        } else {
            let mut overflow = 0;
            // SAFETY: an exact int; out of range is told by `overflow`.
            let value = unsafe { ffi::PyLong_AsLongLongAndOverflow(item.as_ptr(), &mut overflow) };
            if overflow != 0 {
                return Ok(None);
            }
            bytes.extend_from_slice(&value.to_ne_bytes());
        }
    }
    if bridge.has_modes(py)? || !bridge.default_is_cpu(py)? {
        return Ok(None);
    }
    let dtype = if floats { Dtype::FLOAT64 } else { Dtype::INT64 };
    bridge.tensor_copied(py, &bytes, dtype, &[items.len() as i64], &[1]).map(Some)
}
