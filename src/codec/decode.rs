//! Decoding of a payload and its leaves into a batch.

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyComplex, PyDict, PyFloat, PyString};

use super::pinned::Pinned;
use super::pinning::Copies;
use super::{Source, within};
use crate::config::DETACH_FROM;
use crate::error::Error;
use crate::interop::memory::{Heap, Memory};
use crate::interop::tensor::{Bridge, SharedStorage};
use crate::interop::view::Form;
use crate::tree::{Atom, Build, Group, Kind, Leaf, Place, Storage, walk};

/// Builds the batch that a payload describes, taking its large leaves from `source`. Trusts nothing in the payload:
/// returns [`Error::Corrupt`] if it is damaged.
pub fn decode<S: Source>(py: Python<'_>, bridge: &Bridge, payload: &[u8], source: &mut S) -> PyResult<Py<PyAny>> {
    Decoder::new(py, Some(bridge), source).build(payload)
}

/// Decodes as [`decode`] does, but builds the tensors in pinned memory. The large tensors are filled only when the
/// returned copies run.
pub fn decode_pinned<'py, S: Source>(
    bridge: &Bridge,
    payload: &[u8],
    source: &mut S,
    pinned: Pinned<'py, S::Memory>,
    py: Python<'py>,
) -> PyResult<(Py<PyAny>, Copies<S::Memory>)> {
    let mut decoder = Decoder::new(py, Some(bridge), source);
    decoder.pinned = Some(pinned);
    let batch = decoder.build(payload)?;
    Ok((batch, decoder.pinned.map_or_else(Copies::new, |pinned| pinned.copies)))
}

/// Builds the index batch that [`super::encode_indices`] wrote.
pub fn decode_indices(py: Python<'_>, payload: &[u8]) -> PyResult<Py<PyAny>> {
    Decoder::new(py, None, &mut NoLeaves).build(payload)
}

/// The source of a payload without leaves.
struct NoLeaves;

impl Source for NoLeaves {
    type Memory = Heap;

    fn leaf(&mut self, index: u32) -> Result<Heap, Error> {
        Err(Error::corrupt(format!("an index batch refers to leaf {index}")))
    }
}

struct Decoder<'a, 'py, S: Source> {
    py: Python<'py>,
    bridge: Option<&'a Bridge>,
    source: &'a mut S,
    stack: Vec<Bound<'py, PyAny>>,
    /// Objects to which the payload may refer again, indexed by their marks; `None` until they are complete.
    kept: Vec<Option<Bound<'py, PyAny>>>,
    storages: Vec<SharedStorage>,
    /// Pinned memory for the tensors; `None` without pinning.
    pinned: Option<Pinned<'py, S::Memory>>,
}

impl<S: Source> Build for Decoder<'_, '_, S> {
    type Error = PyErr;

    #[inline]
    fn atom(&mut self, atom: Atom<'_>) -> PyResult<()> {
        let py = self.py;
        let value = match atom {
            Atom::Leaf(leaf) => self.leaf(leaf)?.into_bound(py),
            Atom::Back(index) => match self.kept.get(index) {
                Some(Some(object)) => object.clone(),
                _ => return Err(Error::corrupt(format!("object {index} of a batch is missing or incomplete")).into()),
            },
            Atom::Int(value) => int(py, value)?,
            Atom::Str(value) => PyString::new(py, value).into_any(),
            Atom::Float(value) => PyFloat::new(py, value).into_any(),
            Atom::None => py.None().into_bound(py),
            Atom::Bool(value) => PyBool::new(py, value).to_owned().into_any(),
            Atom::Complex(re, im) => PyComplex::from_doubles(py, re, im).into_any(),
            Atom::Bytes(value) => PyBytes::new(py, value).into_any(),
            Atom::BytesOutside { len, leaf, offset } => self.bytes(len, leaf, offset)?,
            Atom::Ints(group, values) => sequence(
                py,
                self.pinned.as_ref().map_or(group, |pinned| pinned.group(group)),
                values.len(),
                values.iter().map(|&value| int(py, i64::from_le_bytes(value))),
            )?,
        };
        self.stack.push(value);
        Ok(())
    }

    fn close(&mut self, group: Group, count: usize) -> PyResult<()> {
        let py = self.py;
        let values = if group == Group::Dict { count * 2 } else { count };
        // A bug in `walk` leads to an error here, not to a panic.
        let start = self.stack.len().checked_sub(values).ok_or_else(|| PyRuntimeError::new_err("unbalanced batch"))?;
        let mut values = self.stack.drain(start..);
        let value = if group == Group::Dict {
            let dict = PyDict::new(py);
            while let (Some(key), Some(value)) = (values.next(), values.next()) {
                dict.set_item(key, value)?;
            }
            // If a key occurred twice, a tensor that was replaced would be freed before the copies fill its memory.
            if dict.len() != count {
                return Err(Error::corrupt("a dict has the same key twice").into());
            }
            dict.into_any()
        } else {
            let group = self.pinned.as_ref().map_or(group, |pinned| pinned.group(group));
            sequence(py, group, count, values.by_ref().map(Ok))?
        };
        drop(values);
        self.stack.push(value);
        Ok(())
    }

    fn keep(&mut self, index: usize) -> PyResult<()> {
        if self.kept.len() <= index {
            self.kept.resize_with(index + 1, || None);
        }
        self.kept[index] = self.stack.last().cloned();
        Ok(())
    }

    fn storage(&mut self, storage: &Storage<'_>) -> PyResult<()> {
        let (py, bridge) = (self.py, self.bridge()?);
        let object = match storage.place {
            Place::Inline(bytes) => bridge.storage_copied(py, bytes)?,
            Place::Outside { leaf, offset } => {
                let lease = self.source.leaf(leaf)?;
                let offset = within(&lease, leaf, offset, storage.len, 1)?;
                bridge.storage(py, lease, offset, storage.len)?
            }
            Place::Shared { .. } | Place::Empty { .. } => {
                return Err(Error::corrupt("a storage is inside another storage").into());
            }
        };
        self.storages.push(object);
        Ok(())
    }
}

#[inline]
fn int(py: Python<'_>, value: i64) -> PyResult<Bound<'_, PyAny>> {
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyLong_FromLongLong(value)) }
}

/// Makes a new array read-only.
fn read_only(py: Python<'_>, array: Py<PyAny>) -> PyResult<Py<PyAny>> {
    array.bind(py).getattr(intern!(py, "flags"))?.setattr(intern!(py, "writeable"), false)?;
    Ok(array)
}

/// Builds a list or tuple of `len` values.
fn sequence<'py>(
    py: Python<'py>,
    group: Group,
    len: usize,
    values: impl Iterator<Item = PyResult<Bound<'py, PyAny>>>,
) -> PyResult<Bound<'py, PyAny>> {
    let size = len as ffi::Py_ssize_t;
    // SAFETY: new references, or null with an exception set. Slots are null until they are set, which both types
    // tolerate when they are freed; the object is returned only after all slots are set.
    let object = unsafe {
        let object = if group == Group::List { ffi::PyList_New(size) } else { ffi::PyTuple_New(size) };
        Bound::from_owned_ptr_or_err(py, object)?
    };
    let mut set = 0;
    for value in values {
        let (at, value) = (set as ffi::Py_ssize_t, value?.into_ptr());
        // SAFETY: a new list or tuple; the call steals the reference, and refuses an index that is out of range.
        let failed = unsafe {
            if group == Group::List {
                ffi::PyList_SetItem(object.as_ptr(), at, value)
            } else {
                ffi::PyTuple_SetItem(object.as_ptr(), at, value)
            }
        };
        if failed != 0 {
            return Err(PyErr::fetch(py));
        }
        set += 1;
    }
    if set == len { Ok(object) } else { Err(PyRuntimeError::new_err("unbalanced batch")) }
}

impl<'a, 'py, S: Source> Decoder<'a, 'py, S> {
    fn new(py: Python<'py>, bridge: Option<&'a Bridge>, source: &'a mut S) -> Self {
        Self { py, bridge, source, stack: Vec::new(), kept: Vec::new(), storages: Vec::new(), pinned: None }
    }

    fn bridge(&self) -> PyResult<&'a Bridge> {
        let message = "an index batch contains a tensor or an array";
        Ok(self.bridge.ok_or_else(|| Error::corrupt(message))?)
    }

    fn build(&mut self, payload: &[u8]) -> PyResult<Py<PyAny>> {
        walk(payload, self)?;
        match (self.stack.pop(), self.stack.is_empty()) {
            (Some(batch), true) => Ok(batch.unbind()),
            _ => Err(PyRuntimeError::new_err("unbalanced batch")),
        }
    }

    fn bytes(&mut self, len: usize, leaf: u32, offset: u64) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        let lease = self.source.leaf(leaf)?;
        let offset = within(&lease, leaf, offset, len, 1)?;
        // SAFETY: a new bytes object of `len` unwritten bytes, or null with an exception set.
        let object = unsafe {
            let object = ffi::PyBytes_FromStringAndSize(std::ptr::null(), len as ffi::Py_ssize_t);
            Bound::from_owned_ptr_or_err(py, object)?
        };
        // SAFETY: `object` is a bytes object.
        let to = unsafe { ffi::PyBytes_AsString(object.as_ptr()) } as usize;
        let from = lease.ptr() as usize + offset;
        // SAFETY: `within` checked the source, which the lease keeps alive; no other code has a reference to the object
        // yet.
        let copy = || unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, len) };
        if len >= DETACH_FROM {
            py.detach(copy);
        } else {
            copy();
        }
        Ok(object)
    }

    fn leaf(&mut self, leaf: &Leaf<'_>) -> PyResult<Py<PyAny>> {
        let py = self.py;
        let bridge = self.bridge()?;
        let Leaf { kind, dtype, shape, strides, extent, place } = leaf;
        let form = Form { dtype: *dtype, shape, strides };
        match *place {
            Place::Inline(bytes) => match (kind, &mut self.pinned) {
                // A tensor without elements has no memory to pin.
                (Kind::Tensor, Some(pinned)) if !bytes.is_empty() => {
                    let (storage, at) = pinned.small(bytes)?;
                    bridge.tensor_shared(py, storage, at, form)
                }
                (Kind::Tensor, _) => bridge.tensor_copied(py, bytes, form),
                (Kind::Array, _) => bridge.ndarray_copied(py, bytes, form),
                (Kind::ReadOnlyArray, _) => read_only(py, bridge.ndarray_copied(py, bytes, form)?),
            },
            Place::Outside { leaf, offset } => {
                let lease = self.source.leaf(leaf)?;
                let offset = within(&lease, leaf, offset, *extent, dtype.align())?;
                match (kind, &mut self.pinned) {
                    (Kind::Tensor, Some(pinned)) => {
                        let storage = pinned.large(lease, offset, *extent)?;
                        bridge.tensor_shared(py, &storage, 0, form)
                    }
                    (Kind::Tensor, None) => bridge.tensor(py, lease, offset, form),
                    (Kind::Array, _) => bridge.ndarray(py, lease, offset, form),
                    (Kind::ReadOnlyArray, _) => read_only(py, bridge.ndarray(py, lease, offset, form)?),
                }
            }
            Place::Shared { storage, offset } => {
                let place = self.storages.get(storage).zip(usize::try_from(offset).ok());
                let missing = || Error::corrupt(format!("storage {storage} is missing, or has no byte {offset}"));
                let (storage, offset) = place.ok_or_else(missing)?;
                bridge.tensor_shared(py, storage, offset, form)
            }
            Place::Empty { offset } => bridge.tensor_empty(py, offset, form),
        }
    }
}
