//! A batch becomes bytes and leaves.

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyComplex, PyComplexMethods, PyFloat, PyList, PyString, PyTuple};

use super::seen::Seen;
use super::{DETACH_FROM, INLINE_LIMIT, Sink};
use crate::python::tensor::Bridge;
use crate::tree::dtype::Dtype;
use crate::tree::layout::{Plan, Style};
use crate::tree::{Group, Kind, MAX_DEPTH, Slot, Writer};

/// Why an encoder stops before the end: the batch is no plain tree.
struct NotPlain;

type Plain = Result<(), NotPlain>;

/// A leaf that is copied when the whole batch is known to be plain.
struct Job<'py> {
    /// Keeps the memory alive while the GIL is released.
    _owner: Bound<'py, PyAny>,
    slot: Slot,
    first: *const u8,
    plan: Plan,
}

struct Encoder<'a, 'py> {
    /// None: tensors and arrays are not plain.
    bridge: Option<&'a Bridge>,
    out: Writer<'a>,
    seen: Seen,
    jobs: Vec<Job<'py>>,
}

/// Appends `batch` to `out`, and puts its large leaves into `sink`. `Ok(false)`: it is not a plain tree,
/// `out` is as it was, and the whole batch is to be pickled.
///
/// # Errors
/// What the sink says.
pub fn encode<S: Sink>(
    py: Python<'_>,
    bridge: &Bridge,
    batch: &Bound<'_, PyAny>,
    out: &mut Vec<u8>,
    sink: &mut S,
) -> PyResult<bool> {
    let before = out.len();
    let mut encoder =
        Encoder { bridge: Some(bridge), out: Writer::new(out), seen: Seen::new(), jobs: Vec::new() };
    if encoder.value(batch, 0).is_err() || encoder.seen.overlaps() {
        encoder.out.truncate(before);
        return Ok(false);
    }
    let Encoder { mut out, jobs, .. } = encoder;
    for job in jobs {
        if let Err(error) = job.run(py, &mut out, sink) {
            out.truncate(before);
            return Err(error);
        }
    }
    Ok(true)
}

/// Appends an index batch to `out`. False: it is to be pickled, and `out` is as it was.
pub fn encode_indices(_py: Python<'_>, index: &Bound<'_, PyAny>, out: &mut Vec<u8>) -> bool {
    let before = out.len();
    let mut encoder = Encoder { bridge: None, out: Writer::new(out), seen: Seen::new(), jobs: Vec::new() };
    let plain = encoder.value(index, 0).is_ok();
    if !plain {
        encoder.out.truncate(before);
    }
    plain
}

impl Job<'_> {
    fn run<S: Sink>(self, py: Python<'_>, out: &mut Writer<'_>, sink: &mut S) -> PyResult<()> {
        let Self { slot, first, plan, .. } = &self;
        if plan.gather.is_none()
            && let Some((leaf, offset)) = sink.adopt(*first, plan.bytes)
        {
            out.fill(*slot, leaf, offset);
            return Ok(());
        }
        let (leaf, target) = sink.reserve(plan.bytes)?;
        let (from, to) = (*first as usize, target as usize);
        // SAFETY: `from` is the first element of the view that the plan was made of, which `_owner` keeps
        // alive; `to` points to as many fresh bytes as the plan writes.
        let copy = || unsafe { plan.copy(from as *const u8, to as *mut u8) };
        if plan.bytes >= DETACH_FROM {
            py.detach(copy)
        } else {
            copy()
        }
        out.fill(*slot, leaf, 0);
        Ok(())
    }
}

/// The value as an exact int; `Err` if it is one that does not fit.
#[inline]
fn as_i64(value: &Bound<'_, PyAny>) -> Result<i64, NotPlain> {
    let mut overflow = 0;
    // SAFETY: an int (the callers look at its type); the GIL is held.
    let number = unsafe { ffi::PyLong_AsLongLongAndOverflow(value.as_ptr(), &mut overflow) };
    if overflow == 0 { Ok(number) } else { Err(NotPlain) }
}

#[inline]
fn is_int(value: &Bound<'_, PyAny>) -> bool {
    value.get_type_ptr() == &raw mut ffi::PyLong_Type
}

impl<'py> Encoder<'_, 'py> {
    fn value(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> Plain {
        let kind = value.get_type_ptr();
        // Exact types, by the address of the type object. These statics are never written by us.
        if self.bridge.is_some_and(|bridge| bridge.is_tensor(value)) {
            return self.tensor(value);
        }
        if kind == &raw mut ffi::PyLong_Type {
            self.out.int(as_i64(value)?);
        } else if kind == &raw mut ffi::PyUnicode_Type {
            let text = value.cast_exact::<PyString>().map_err(|_| NotPlain)?;
            self.out.str(text.to_str().map_err(|_| NotPlain)?);
        } else if kind == &raw mut ffi::PyFloat_Type {
            self.out.float(value.cast_exact::<PyFloat>().map_err(|_| NotPlain)?.value());
        } else if kind == &raw mut ffi::PyList_Type {
            let list = value.cast_exact::<PyList>().map_err(|_| NotPlain)?;
            self.sequence(value, Group::List, list.len(), |i| list.get_item(i), depth)?;
        } else if kind == &raw mut ffi::PyTuple_Type {
            let tuple = value.cast_exact::<PyTuple>().map_err(|_| NotPlain)?;
            self.sequence(value, Group::Tuple, tuple.len(), |i| tuple.get_item(i), depth)?;
        } else if kind == &raw mut ffi::PyDict_Type {
            self.dict(value, depth)?;
        } else if value.is_none() {
            self.out.none();
        } else if kind == &raw mut ffi::PyBool_Type {
            self.out.bool(value.is_truthy().map_err(|_| NotPlain)?);
        } else if kind == &raw mut ffi::PyBytes_Type {
            self.out.bytes(value.cast_exact::<PyBytes>().map_err(|_| NotPlain)?.as_bytes());
        } else if kind == &raw mut ffi::PyComplex_Type {
            let number = value.cast_exact::<PyComplex>().map_err(|_| NotPlain)?;
            self.out.complex(number.real(), number.imag());
        } else if self.bridge.is_some_and(|bridge| bridge.is_array(value)) {
            return self.array(value);
        } else {
            return Err(NotPlain);
        }
        Ok(())
    }

    fn object(&mut self, value: &Bound<'py, PyAny>) -> Plain {
        if self.seen.object(value.as_ptr() as usize) { Ok(()) } else { Err(NotPlain) }
    }

    /// Notes a container that lies `depth` deep.
    fn enter(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> Plain {
        if depth >= MAX_DEPTH {
            return Err(NotPlain);
        }
        self.object(value)
    }

    fn sequence(
        &mut self,
        value: &Bound<'py, PyAny>,
        group: Group,
        len: usize,
        get: impl Fn(usize) -> PyResult<Bound<'py, PyAny>>,
        depth: usize,
    ) -> Plain {
        // Python has one empty tuple only.
        if group == Group::List || len > 0 {
            self.enter(value, depth)?;
        }
        let item = |i| get(i).map_err(|_| NotPlain);
        let start = self.out.len();
        let mut first = 0;
        if len > 0 && is_int(&item(0)?) {
            self.out.open_ints(group, len);
            while first < len {
                let item = item(first)?;
                if !is_int(&item) {
                    break;
                }
                self.out.next_int(as_i64(&item)?);
                first += 1;
            }
            if first == len {
                return Ok(());
            }
            self.out.truncate(start);
        }
        self.out.open(group, len);
        for i in 0..len {
            self.value(&item(i)?, depth + 1)?;
        }
        Ok(())
    }

    fn dict(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> Plain {
        self.enter(value, depth)?;
        // SAFETY: an exact dict (the caller looked at its type); the GIL is held.
        let len = unsafe { ffi::PyDict_Size(value.as_ptr()) };
        let len = usize::try_from(len).map_err(|_| NotPlain)?;
        self.out.open(Group::Dict, len);
        let (mut position, mut found) = (0, 0);
        loop {
            let (mut key, mut item) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: an exact dict; a change of the dict meanwhile makes the walk miss entries, never
            // invalid. The borrowed references are made owned before anything else runs.
            let (key, item) = unsafe {
                if ffi::PyDict_Next(value.as_ptr(), &mut position, &mut key, &mut item) == 0 {
                    break;
                }
                (Bound::from_borrowed_ptr(value.py(), key), Bound::from_borrowed_ptr(value.py(), item))
            };
            found += 1;
            if found > len {
                return Err(NotPlain);
            }
            self.value(&key, depth + 1)?;
            self.value(&item, depth + 1)?;
        }
        if found == len { Ok(()) } else { Err(NotPlain) }
    }

    fn tensor(&mut self, value: &Bound<'py, PyAny>) -> Plain {
        let view = self.bridge.and_then(|bridge| bridge.view(value)).ok_or(NotPlain)?;
        let item = view.dtype.itemsize() as i64;
        let mut bytes = view.strides;
        for stride in bytes.as_mut_slice() {
            *stride = stride.checked_mul(item).ok_or(NotPlain)?;
        }
        self.leaf(value, Kind::Tensor, view.dtype, &view.shape, &bytes, view.ptr)
    }

    fn array(&mut self, value: &Bound<'py, PyAny>) -> Plain {
        let view = self.bridge.and_then(|bridge| bridge.array_view(value)).ok_or(NotPlain)?;
        self.leaf(value, Kind::Array, view.dtype, &view.shape, &view.byte_strides, view.ptr)
    }

    fn leaf(
        &mut self,
        value: &Bound<'py, PyAny>,
        kind: Kind,
        dtype: Dtype,
        shape: &[i64],
        byte_strides: &[i64],
        first: *const u8,
    ) -> Plain {
        let style = if kind == Kind::Tensor { Style::Tensor } else { Style::Array };
        let plan = Plan::new(shape, byte_strides, dtype.itemsize(), style).ok_or(NotPlain)?;
        if plan.span == 0 {
            // Without memory that would show it, the same object may come twice.
            self.object(value)?;
        } else {
            self.seen.memory(first.wrapping_offset(plan.low) as usize, plan.span);
        }
        if plan.bytes < INLINE_LIMIT {
            // SAFETY: torch or NumPy described this view just now; the batch keeps it alive.
            unsafe { self.out.inline(kind, dtype, shape, &plan, first) };
        } else {
            let slot = self.out.outside(kind, dtype, shape, &plan);
            self.jobs.push(Job { _owner: value.clone(), slot, first, plan });
        }
        Ok(())
    }
}
