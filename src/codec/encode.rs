//! A batch becomes bytes and leaves.

use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyComplex, PyComplexMethods, PyFloat, PyList, PyString, PyTuple};

use super::Sink;
use super::aliases::resolve;
use super::seen::{Again, Met, Seen};
use crate::config::{DETACH_FROM, INLINE_LIMIT, MAX_DEPTH};
use crate::interop::tensor::Bridge;
use crate::tree::dtype::Dtype;
use crate::tree::layout::{Dims, Plan, Style, extent, numel};
use crate::tree::{Group, Kind, Slot, Writer};

/// Why an encoder stops before the end: the batch is no plain tree.
pub struct NotPlain;

pub type Plain = Result<(), NotPlain>;

/// A leaf that is copied when the whole batch is known to be plain.
pub struct Job<'py> {
    /// Keeps the memory alive while the GIL is released.
    _owner: Bound<'py, PyAny>,
    /// Where its number goes.
    pub slot: Slot,
    first: *const u8,
    plan: Plan,
}

struct Encoder<'a, 'py> {
    /// None: tensors and arrays are not plain.
    bridge: Option<&'a Bridge>,
    out: Writer<'a>,
    seen: Seen<'py>,
    /// Addresses of the containers around the value that is being written.
    open: Vec<usize>,
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
    let Ok(jobs) = plain(Some(bridge), batch, out) else {
        out.truncate(before);
        return Ok(false);
    };
    let mut out = Writer::new(out);
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
    let plain = plain(None, index, out).is_ok();
    if !plain {
        out.truncate(before);
    }
    plain
}

/// Writes a plain tree; the copies that are still to be made. Where it is none, `out` is left with a part.
fn plain<'py>(
    bridge: Option<&Bridge>,
    value: &Bound<'py, PyAny>,
    out: &mut Vec<u8>,
) -> Result<Vec<Job<'py>>, NotPlain> {
    let from = out.len();
    let (seen, writer) = (Seen::new(), Writer::new(out));
    let mut encoder = Encoder { bridge, out: writer, seen, open: Vec::new(), jobs: Vec::new() };
    encoder.value(value, 0)?;
    let Encoder { seen, jobs, .. } = encoder;
    match seen.tangled() {
        Some(extents) => resolve(bridge, &seen, &extents, out, from, jobs),
        None => Ok(jobs),
    }
}

impl<'py> Job<'py> {
    /// The copy of `len` bytes from `first` on, which `owner` keeps alive.
    pub fn of_bytes(owner: Bound<'py, PyAny>, slot: Slot, first: *const u8, len: usize) -> Self {
        Self { _owner: owner, slot, first, plan: Plan::bytes(len) }
    }

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

/// Where in its storage a tensor begins, if not at its first element.
fn storage_offset(value: &Bound<'_, PyAny>, kind: Kind) -> Result<Option<u64>, NotPlain> {
    if kind == Kind::Array {
        return Ok(None);
    }
    let offset = value.call_method0(intern!(value.py(), "storage_offset"));
    let offset = offset.and_then(|offset| offset.extract::<u64>()).map_err(|_| NotPlain)?;
    Ok((offset > 0).then_some(offset))
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
            self.bytes(value)?;
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

    fn bytes(&mut self, value: &Bound<'py, PyAny>) -> Plain {
        let bytes = value.cast_exact::<PyBytes>().map_err(|_| NotPlain)?.as_bytes();
        if self.bridge.is_none() || bytes.len() < INLINE_LIMIT {
            self.out.bytes(bytes);
        } else if self.is_new(value)? {
            let slot = self.out.bytes_outside(bytes.len());
            self.jobs.push(Job::of_bytes(value.clone(), slot, bytes.as_ptr(), bytes.len()));
        }
        Ok(())
    }

    /// Notes an object. False: it came before, and what stands for it has been written.
    fn is_new(&mut self, value: &Bound<'py, PyAny>) -> Result<bool, NotPlain> {
        let (address, at) = (value.as_ptr() as usize, self.out.len());
        let Some(first) = self.seen.object(address, at) else { return Ok(true) };
        if self.open.contains(&address) {
            return Err(NotPlain);
        }
        self.seen.again.push(Again { at, first });
        self.out.gap();
        Ok(false)
    }

    /// Notes a container that lies `depth` deep; false as for [`Self::is_new`].
    fn enter(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> Result<bool, NotPlain> {
        if depth >= MAX_DEPTH {
            return Err(NotPlain);
        }
        let new = self.is_new(value)?;
        if new {
            self.open.push(value.as_ptr() as usize);
        }
        Ok(new)
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
        let has_identity = group == Group::List || len > 0;
        if has_identity && !self.enter(value, depth)? {
            return Ok(());
        }
        self.items(group, len, get, depth)?;
        if has_identity {
            self.open.pop();
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
        if !self.enter(value, depth)? {
            return Ok(());
        }
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
        self.open.pop();
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
        let at = self.out.len();
        let Some(plan) = Plan::new(shape, byte_strides, dtype.itemsize(), style) else {
            return self.window(value, kind, dtype, shape, byte_strides, first);
        };
        if plan.span == 0 {
            // Without memory the object alone shows that it came before.
            if !self.is_new(value)? {
                return Ok(());
            }
            if let Some(offset) = storage_offset(value, kind)? {
                self.out.empty(dtype, shape, &plan, offset);
                return Ok(());
            }
        }
        if plan.bytes < INLINE_LIMIT {
            // SAFETY: torch or NumPy described this view just now; the batch keeps it alive.
            unsafe { self.out.inline(kind, dtype, shape, &plan, first) };
        } else {
            let slot = self.out.outside(kind, dtype, shape, &plan);
            self.jobs.push(Job { _owner: value.clone(), slot, first, plan });
        }
        if plan.span > 0 {
            let start = first.wrapping_offset(plan.low) as usize;
            let end = start.saturating_add(plan.span);
            let written = (at, self.out.len());
            self.seen.leaf(Met { object: value.clone(), kind, window: false, written, start, end });
        }
        Ok(())
    }

    /// Notes a tensor whose elements share memory; what it becomes is written when all others are known.
    fn window(
        &mut self,
        value: &Bound<'py, PyAny>,
        kind: Kind,
        dtype: Dtype,
        shape: &[i64],
        byte_strides: &[i64],
        first: *const u8,
    ) -> Plain {
        let item = dtype.itemsize() as i64;
        let mut strides = Dims::new(byte_strides).ok_or(NotPlain)?;
        strides.as_mut_slice().iter_mut().for_each(|stride| *stride /= item);
        let count = numel(shape).filter(|count| count.checked_mul(item).is_some());
        let span = extent(shape, &strides, dtype.itemsize()).filter(|&span| span > 0);
        let (Kind::Tensor, Some(_), Some(span)) = (kind, count, span) else { return Err(NotPlain) };
        let at = self.out.len();
        self.out.gap();
        self.seen.windows = true;
        let (start, end) = (first as usize, (first as usize).saturating_add(span));
        let written = (at, self.out.len());
        self.seen.leaf(Met { object: value.clone(), kind, window: true, written, start, end });
        Ok(())
    }
}
