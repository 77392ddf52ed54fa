//! Fast paths of `default_collate`. Whatever is not covered here is torch's: `None` says so.

use pyo3::ffi;
use pyo3::prelude::*;

use super::codec::{DETACH_FROM, INLINE_LIMIT};
use super::dlpack::{Heap, Lease};
use super::tensor::{Bridge, items};
use crate::copy::{STREAM_FROM, copy};
use crate::tree::dtype::Dtype;
use crate::tree::layout::{Dims, is_contiguous};

/// `torch.stack` of a list or tuple of plain contiguous tensors of one dtype and shape: a contiguous tensor
/// of shape `(len(batch), *shape)`. Its memory comes from `alloc` from [`INLINE_LIMIT`] bytes on (ordinary
/// memory where that gives none).
pub fn stack<L: Lease>(
    py: Python<'_>,
    bridge: &Bridge,
    batch: &Bound<'_, PyAny>,
    alloc: &mut dyn FnMut(usize) -> PyResult<Option<L>>,
) -> PyResult<Option<Py<PyAny>>> {
    // The items are held: other threads may change the list while the GIL is released.
    let Some(items) = items(batch) else { return Ok(None) };
    let Some(first) = items.first().and_then(|item| bridge.view(item)) else { return Ok(None) };
    if bridge.has_modes(py)? {
        return Ok(None);
    }
    let Some(shape) = Dims::new(&[&[items.len() as i64], &*first.shape].concat()) else { return Ok(None) };
    let Some(strides) = Dims::contiguous(&shape) else { return Ok(None) };
    let mut sources = Vec::with_capacity(items.len());
    for item in &items {
        match bridge.view(item) {
            Some(view)
                if view.dtype == first.dtype
                    && *view.shape == *first.shape
                    && is_contiguous(&view.shape, &view.strides) =>
            {
                sources.push(view.ptr as usize);
            }
            _ => return Ok(None),
        }
    }
    let elements = first.shape.iter().try_fold(1usize, |n, &size| n.checked_mul(usize::try_from(size).ok()?));
    let each = elements.and_then(|n| n.checked_mul(first.dtype.itemsize()));
    let Some((each, total)) = each.and_then(|each| Some((each, each.checked_mul(sources.len())?))) else {
        return Ok(None);
    };
    let fill = |to: *mut u8| {
        let to = to as usize;
        let run = move || {
            for (i, from) in sources.iter().enumerate() {
                if each > 0 {
                    // SAFETY: each source is a live contiguous tensor of `each` bytes; the target has room
                    // for all of them.
                    unsafe {
                        copy(*from as *const u8, (to + i * each) as *mut u8, each, total >= STREAM_FROM)
                    };
                }
            }
        };
        if total >= DETACH_FROM { py.detach(run) } else { run() }
    };
    let leased = if total >= INLINE_LIMIT { alloc(total)? } else { None };
    let tensor = match leased.filter(|lease| lease.len() >= total) {
        Some(lease) => {
            fill(lease.ptr());
            bridge.tensor(py, lease, 0, first.dtype, &shape, &strides)?
        }
        None => {
            let heap = Heap::new(total)?;
            fill(heap.ptr());
            bridge.tensor(py, heap, 0, first.dtype, &shape, &strides)?
        }
    };
    Ok(Some(tensor))
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
