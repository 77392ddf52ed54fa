//! Encoding of a batch as bytes and leaves.

use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyComplex, PyComplexMethods, PyFloat, PyList, PyString, PyTuple};

use super::Sink;
use super::aliases::{Tensors, resolve};
use super::draft::{Draft, NotPlain, PendingCopy, Plain};
use super::seen::Object;
use crate::config::{ARRAY_MIN, DETACH_FROM, INLINE_LIMIT, ONCE_FROM};
use crate::interop::array_tensor::ArrayTensor;
use crate::interop::tensor::Bridge;
use crate::interop::tensor::moved::reading;
use crate::interop::view::{LeafView, TensorView};
use crate::tree::layout::numel;
use crate::tree::{Group, Kind, Writer};

impl Object for Bound<'_, PyAny> {
    #[inline]
    fn address(&self) -> usize {
        self.as_ptr() as usize
    }
}

/// The tensors of a batch, for alias resolution.
struct BatchTensors<'a, 'py> {
    py: Python<'py>,
    bridge: Option<&'a Bridge>,
}

impl<'py> Tensors for BatchTensors<'_, 'py> {
    type Object = Bound<'py, PyAny>;

    fn view<'t>(&self, tensor: &'t Self::Object) -> Option<TensorView<'t>> {
        self.bridge?.view(tensor)
    }

    fn keep_alive(&self, tensors: Vec<&Self::Object>) -> Option<Self::Object> {
        PyList::new(self.py, tensors).ok().map(Bound::into_any)
    }
}

struct Encoder<'a, 'py> {
    /// `None` for an index batch, in which tensors and arrays do not count as plain.
    bridge: Option<&'a Bridge>,
    draft: Draft<'a, Bound<'py, PyAny>>,
    /// True if each container around the current value has only one reference, so that all of them are freed with the
    /// batch.
    is_sole: bool,
    /// See [`Sink::keeps_state`].
    keeps_state: bool,
    /// True if the current value is a key of a dict, or a part of one.
    is_key: bool,
}

/// Appends the encoding of `batch` to `out`, and passes its large leaves to `sink`. Returns false if the batch is not a
/// plain tree and must be pickled. In that case, and after an error, `out` is unchanged.
pub fn encode<S: Sink>(bridge: &Bridge, batch: &Bound<'_, PyAny>, out: &mut Vec<u8>, sink: &mut S) -> PyResult<bool> {
    let before = out.len();
    // Other threads must not move a storage between the recording of its address and the copy.
    let _reading = reading(batch.py());
    let Ok(copies) = write_plain(Some(bridge), batch, out, sink.takes_arrays(), sink.keeps_state()) else {
        out.truncate(before);
        return Ok(false);
    };
    let mut out = Writer::new(out);
    for copy in copies {
        let done = copy.run(&mut out, sink, |copy| match copy.bytes() {
            DETACH_FROM.. => batch.py().detach(|| copy.perform()),
            _ => copy.perform(),
        });
        if let Err(error) = done {
            out.truncate(before);
            return Err(error.into());
        }
    }
    Ok(true)
}

/// Appends an index batch to `out`. If it must be pickled instead, returns false and leaves `out` unchanged.
pub fn encode_indices(index: &Bound<'_, PyAny>, out: &mut Vec<u8>) -> bool {
    let before = out.len();
    let is_plain = write_plain(None, index, out, false, false).is_ok();
    if !is_plain {
        out.truncate(before);
    }
    is_plain
}

/// Writes a plain tree and returns the pending copies. If `takes_arrays` is true, the sink may adopt arrays to which
/// only the batch refers; otherwise all arrays are copied. For `keeps_state`, see [`Sink::keeps_state`]. After an error,
/// the caller must remove the part of the tree in `out`.
fn write_plain<'py>(
    bridge: Option<&Bridge>,
    value: &Bound<'py, PyAny>,
    out: &mut Vec<u8>,
    takes_arrays: bool,
    keeps_state: bool,
) -> Plain<Vec<PendingCopy<Bound<'py, PyAny>>>> {
    let from = out.len();
    let mut encoder = Encoder { bridge, draft: Draft::new(out), is_sole: takes_arrays, keeps_state, is_key: false };
    encoder.value(value, 0)?;
    let (seen, copies) = encoder.draft.finish();
    match seen.aliased_extents() {
        Some(extents) => resolve(&BatchTensors { py: value.py(), bridge }, &seen, &extents, out, from, copies),
        None => Ok(copies),
    }
}

/// Returns the value of an exact int, or an error if it needs more than 64 bits.
#[inline]
fn as_i64(value: &Bound<'_, PyAny>) -> Plain<i64> {
    let mut overflow = 0;
    // SAFETY: an int (the callers check its type); the GIL is held.
    let number = unsafe { ffi::PyLong_AsLongLongAndOverflow(value.as_ptr(), &mut overflow) };
    if overflow == 0 { Ok(number) } else { Err(NotPlain) }
}

/// Returns the offset of a tensor in its storage, in elements; `None` if it is 0.
fn storage_offset(value: &Bound<'_, PyAny>) -> Plain<Option<u64>> {
    let offset = value.call_method0(intern!(value.py(), "storage_offset"));
    let offset = offset.and_then(|offset| offset.extract::<u64>()).map_err(|_| NotPlain)?;
    Ok((offset > 0).then_some(offset))
}

/// Returns true if a tensor has Python attributes. Unlike `__dict__`, `__getstate__` does not create an empty dict.
fn has_attributes(tensor: &Bound<'_, PyAny>) -> Plain<bool> {
    let state = tensor.call_method0(intern!(tensor.py(), "__getstate__")).map_err(|_| NotPlain)?;
    Ok(!state.is_none())
}

/// Returns true if an array cannot be written to.
fn is_read_only(array: &Bound<'_, PyAny>) -> Plain<bool> {
    let flags = array.getattr(intern!(array.py(), "flags"));
    let writeable = flags.and_then(|flags| flags.getattr(intern!(array.py(), "writeable"))?.is_truthy());
    writeable.map(|writeable| !writeable).map_err(|_| NotPlain)
}

/// Returns true if an object has exactly two references: `value`, and the one in its container (for the batch: in the
/// list that holds it).
#[inline]
fn is_sole(value: &Bound<'_, PyAny>) -> bool {
    // SAFETY: a live object; the GIL is held.
    unsafe { ffi::Py_REFCNT(value.as_ptr()) == 2 }
}

#[inline]
fn is_int(value: &Bound<'_, PyAny>) -> bool {
    value.get_type_ptr() == &raw mut ffi::PyLong_Type
}

impl<'py> Encoder<'_, 'py> {
    fn value(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> Plain {
        let kind = value.get_type_ptr();
        // Subclasses are not plain, so the addresses of the type objects are compared.
        if self.bridge.is_some_and(|bridge| bridge.is_tensor(value)) {
            // A tensor's `__hash__` is a Python function, in which a signal handler may raise. Decoding a plain batch
            // must not run any Python code.
            return if self.is_key { Err(NotPlain) } else { self.tensor(value) };
        }
        if kind == &raw mut ffi::PyLong_Type {
            self.draft.out.int(as_i64(value)?);
        } else if kind == &raw mut ffi::PyUnicode_Type {
            let text = value.cast_exact::<PyString>().map_err(|_| NotPlain)?;
            let text = text.to_str().map_err(|_| NotPlain)?;
            if text.len() < ONCE_FROM || self.draft.record(value)? {
                self.draft.out.str(text);
            }
        } else if kind == &raw mut ffi::PyFloat_Type {
            self.draft.out.float(value.cast_exact::<PyFloat>().map_err(|_| NotPlain)?.value());
        } else if kind == &raw mut ffi::PyList_Type {
            let list = value.cast_exact::<PyList>().map_err(|_| NotPlain)?;
            self.sequence(value, Group::List, list.len(), |i| list.get_item(i), depth)?;
        } else if kind == &raw mut ffi::PyTuple_Type {
            let tuple = value.cast_exact::<PyTuple>().map_err(|_| NotPlain)?;
            self.sequence(value, Group::Tuple, tuple.len(), |i| tuple.get_item(i), depth)?;
        } else if kind == &raw mut ffi::PyDict_Type {
            self.dict(value, depth)?;
        } else if value.is_none() {
            self.draft.out.none();
        } else if kind == &raw mut ffi::PyBool_Type {
            self.draft.out.bool(value.is_truthy().map_err(|_| NotPlain)?);
        } else if kind == &raw mut ffi::PyBytes_Type {
            self.bytes(value)?;
        } else if kind == &raw mut ffi::PyComplex_Type {
            let number = value.cast_exact::<PyComplex>().map_err(|_| NotPlain)?;
            self.draft.out.complex(number.real(), number.imag());
        } else if self.bridge.is_some_and(|bridge| bridge.is_array(value)) {
            return self.array(value);
        } else if let Ok(inner) = value.cast_exact::<ArrayTensor>() {
            return self.array_tensor(value, inner.get().array(value.py()));
        } else {
            return Err(NotPlain);
        }
        Ok(())
    }

    fn bytes(&mut self, value: &Bound<'py, PyAny>) -> Plain {
        let bytes = value.cast_exact::<PyBytes>().map_err(|_| NotPlain)?.as_bytes();
        if self.bridge.is_none() || bytes.len() < INLINE_LIMIT {
            if bytes.len() < ONCE_FROM || self.draft.record(value)? {
                self.draft.out.bytes(bytes);
            }
        } else {
            // SAFETY: `value` is the bytes object.
            unsafe { self.draft.bytes_outside(value, bytes) }?;
        }
        Ok(())
    }

    fn sequence(
        &mut self,
        value: &Bound<'py, PyAny>,
        group: Group,
        len: usize,
        get: impl Fn(usize) -> PyResult<Bound<'py, PyAny>>,
        depth: usize,
    ) -> Plain {
        // Python has only one empty tuple, so it may occur twice in a batch without being a repeated object.
        let has_identity = group == Group::List || len > 0;
        if has_identity && !self.draft.enter(value, depth)? {
            return Ok(());
        }
        let outer = self.is_sole;
        self.is_sole &= is_sole(value);
        self.items(group, len, get, depth)?;
        self.is_sole = outer;
        if has_identity {
            self.draft.leave();
        }
        Ok(())
    }

    fn items(
        &mut self,
        group: Group,
        len: usize,
        get: impl Fn(usize) -> PyResult<Bound<'py, PyAny>>,
        depth: usize,
    ) -> Plain {
        let item = |i| get(i).map_err(|_| NotPlain);
        let start = self.draft.out.len();
        let mut first = 0;
        if len > 0 && is_int(&item(0)?) {
            self.draft.out.open_ints(group, len);
            while first < len {
                let item = item(first)?;
                if !is_int(&item) {
                    break;
                }
                self.draft.out.next_int(as_i64(&item)?);
                first += 1;
            }
            if first == len {
                return Ok(());
            }
            self.draft.out.truncate(start);
        }
        self.draft.out.open(group, len);
        for i in 0..len {
            self.value(&item(i)?, depth + 1)?;
        }
        Ok(())
    }

    fn dict(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> Plain {
        if !self.draft.enter(value, depth)? {
            return Ok(());
        }
        // SAFETY: an exact dict (the caller checked its type); the GIL is held.
        let len = unsafe { ffi::PyDict_Size(value.as_ptr()) };
        let len = usize::try_from(len).map_err(|_| NotPlain)?;
        let outer = self.is_sole;
        self.is_sole &= is_sole(value);
        self.draft.out.open(Group::Dict, len);
        let (mut position, mut visited) = (0, 0);
        loop {
            let (mut key, mut item) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: an exact dict. A concurrent change can make the walk miss entries, but cannot make it invalid.
            // The borrowed references become owned before any other code runs.
            let (key, item) = unsafe {
                if ffi::PyDict_Next(value.as_ptr(), &mut position, &mut key, &mut item) == 0 {
                    break;
                }
                (Bound::from_borrowed_ptr(value.py(), key), Bound::from_borrowed_ptr(value.py(), item))
            };
            visited += 1;
            if visited > len {
                return Err(NotPlain);
            }
            let outer = std::mem::replace(&mut self.is_key, true);
            self.value(&key, depth + 1)?;
            self.is_key = outer;
            self.value(&item, depth + 1)?;
        }
        self.is_sole = outer;
        self.draft.leave();
        if visited == len { Ok(()) } else { Err(NotPlain) }
    }

    fn tensor(&mut self, value: &Bound<'py, PyAny>) -> Plain {
        if self.keeps_state && has_attributes(value)? {
            return Err(NotPlain);
        }
        let view = self.bridge.and_then(|bridge| bridge.view(value)).ok_or(NotPlain)?;
        let (first, dtype, shape, mut byte_strides) = (view.ptr(), view.dtype(), *view.shape(), *view.strides());
        let item = dtype.itemsize() as i64;
        for stride in byte_strides.as_mut_slice() {
            *stride = stride.checked_mul(item).ok_or(NotPlain)?;
        }
        let view = LeafView { kind: Kind::Tensor, dtype, shape, byte_strides, first };
        // SAFETY: torch has just described this view; the batch keeps the tensor alive.
        unsafe { self.draft.leaf(value, &view, false, || storage_offset(value)) }
    }

    fn array(&mut self, value: &Bound<'py, PyAny>) -> Plain {
        let bridge = self.bridge.ok_or(NotPlain)?;
        let mut view = bridge.array_view(value).ok_or(NotPlain)?;
        if self.keeps_state && is_read_only(value)? {
            view.kind = Kind::ReadOnlyArray;
        }
        let bytes = numel(&view.shape).and_then(|count| count.checked_mul(view.dtype.itemsize() as i64));
        let is_large = bytes.is_some_and(|bytes| bytes >= ARRAY_MIN as i64);
        let is_sole = self.is_sole && is_large && is_sole(value);
        // An error here does not fail the batch: the array is then copied.
        let is_sole = is_sole && bridge.is_unshared(value).unwrap_or(false);
        // SAFETY: NumPy has just described this view; the batch keeps the array alive.
        unsafe { self.draft.leaf(value, &view, is_sole, || Ok(None)) }
    }

    /// Encodes an `ArrayTensor`, which wraps `array`. If another leaf shares the memory, alias resolution returns an
    /// error, and the batch is pickled.
    fn array_tensor(&mut self, value: &Bound<'py, PyAny>, array: Bound<'py, PyAny>) -> Plain {
        let bridge = self.bridge.ok_or(NotPlain)?;
        let view = bridge.view_as_tensor(&array).ok_or(NotPlain)?;
        let is_sole = self.is_sole && is_sole(value) && is_sole(&array);
        let is_sole = is_sole && bridge.is_unshared(&array).unwrap_or(false);
        // SAFETY: NumPy has just described this view; the batch keeps the array alive.
        unsafe { self.draft.leaf(value, &view, is_sole, || Ok(None)) }
    }
}
