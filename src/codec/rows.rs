//! Conversion of Python values to the rows of a shared object, and back.
//!
//! A row of bytes is the tree of a plain value, or begins with a byte that cannot begin a tree. That byte is followed
//! by a pickle, by a tree and its leaves, or by the values of a dict. The keys of such dicts are in the image's
//! metadata, encoded as a list of tuples.

use std::ops::Deref;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyBytes, PyComplex, PyDict, PyFloat, PyInt, PyList, PyNone, PyString, PyTuple, PyType};

use super::shapes::Shapes;
use super::{Hold, Sink, Source, decode, encode, shrink};
use crate::config::BUFFER_KEPT;
use crate::error::Result;
use crate::interop::memory::{Heap, Memory};
use crate::interop::tensor::Bridge;
use crate::store::{Builder, Row, Store, damaged, hash};
use crate::tree::text;

/// The first byte of a row that contains a pickle, which follows.
pub(super) const PICKLE: u8 = 0xf0;
/// The first byte of a row that contains a tree with leaves. It is followed by the tree's length, the number of leaves
/// and the length of each leaf, all u64, and then by the tree and the leaves.
pub(super) const LEAVES: u8 = 0xf1;
/// The first byte of a row that contains a dict with a shape. It is followed by the shape's number, a u32, and by the
/// tuple of the values, a tree with or without leaves.
const SHAPED: u8 = 0xf2;

/// A mapped image of rows.
pub struct Rows {
    store: Store,
    /// The keys of each shape, indexed by the shape's number; decoded when they are first needed.
    shapes: PyOnceLock<Vec<Py<PyTuple>>>,
}

impl From<Store> for Rows {
    fn from(store: Store) -> Self {
        Self { store, shapes: PyOnceLock::new() }
    }
}

impl Deref for Rows {
    type Target = Store;

    fn deref(&self) -> &Store {
        &self.store
    }
}

impl Rows {
    /// Returns the keys of a shape.
    fn keys<'py>(&self, py: Python<'py>, number: u32) -> PyResult<&Bound<'py, PyTuple>> {
        let shapes = self.shapes.get_or_try_init(py, || {
            let list = decode_plain(py, self.meta())?;
            let list = list.cast::<PyList>().map_err(|_| damaged("the keys of its dicts are not a list"))?;
            let tuples = list.iter().map(|keys| keys.cast_into::<PyTuple>().map(Bound::unbind));
            let tuples = tuples.collect::<std::result::Result<Vec<_>, _>>();
            PyResult::Ok(tuples.map_err(|_| damaged("the keys of a dict are not a tuple"))?)
        })?;
        Ok(shapes.get(number as usize).ok_or_else(|| damaged("the keys of a dict are missing"))?.bind(py))
    }
}

/// Memory that is reused from value to value. If each value got a new large allocation, the allocator would return the
/// pages to the system after each value, and they would have to be faulted in again.
#[derive(Default)]
pub struct Scratch {
    tree: Vec<u8>,
    leaves: Vec<Heap>,
}

/// The leaves of a value, each of 16 KiB or more, in ordinary memory until the row is written.
struct Leaves {
    /// The leaves, each with the number of its bytes in use.
    filled: Vec<(Heap, usize)>,
    spare: Vec<Heap>,
}

impl Leaves {
    fn slices(&self) -> impl Iterator<Item = &[u8]> {
        // SAFETY: the encoder has filled the `len` bytes of each leaf.
        self.filled.iter().map(|(leaf, len)| unsafe { std::slice::from_raw_parts(leaf.ptr(), *len) })
    }

    /// Returns up to [`BUFFER_KEPT`] bytes of the memory for reuse, and frees the rest.
    fn into_spare(self) -> Vec<Heap> {
        let mut budget = BUFFER_KEPT;
        let all = self.filled.into_iter().map(|(leaf, _)| leaf).chain(self.spare);
        all.take_while(|leaf| budget.checked_sub(leaf.len()).inspect(|remaining| budget = *remaining).is_some())
            .collect()
    }
}

// SAFETY: the leaves own the reserved memory.
unsafe impl Sink for Leaves {
    fn reserve(&mut self, len: usize) -> Result<(u32, *mut u8)> {
        let fits = self.spare.iter().position(|leaf| leaf.len() >= len);
        let heap = fits.map_or_else(|| Heap::new(len), |at| Ok(self.spare.swap_remove(at)))?;
        let memory = heap.ptr();
        self.filled.push((heap, len));
        Ok((self.filled.len() as u32 - 1, memory))
    }

    fn keeps_state(&self) -> bool {
        true
    }

    unsafe fn adopt(&mut self, _ptr: *const u8, _len: usize, _hold: Hold) -> Option<(u32, u64)> {
        None
    }
}

/// Appends a value as a row. `dumps` pickles a value that is not a plain tree.
pub fn push(
    builder: &mut Builder,
    shapes: &mut Shapes,
    value: &Bound<'_, PyAny>,
    dumps: &Bound<'_, PyAny>,
    scratch: &mut Scratch,
) -> PyResult<()> {
    if let Ok(number) = value.cast_exact::<PyFloat>() {
        return Ok(builder.float(number.value())?);
    }
    if let Ok(number) = value.cast_exact::<PyInt>()
        && let Ok(number) = number.extract::<i64>()
    {
        return Ok(builder.int(number)?);
    }
    let shaped = shapes.split(value)?;
    let mut prefix = Vec::new();
    if let Some((number, _)) = &shaped {
        prefix.push(SHAPED);
        prefix.extend_from_slice(&number.to_le_bytes());
    }
    let tree = shaped.as_ref().map_or(value, |(_, values)| values.as_any());
    let pickle = || dumps.call1((value,));
    with_parts(tree, pickle, scratch, |is_pickle, parts| {
        let mut all: Vec<&[u8]> = if is_pickle { Vec::new() } else { vec![&prefix] };
        all.extend_from_slice(parts);
        Ok(builder.record(&all)?)
    })
}

/// Encodes a value and calls `done(is_pickle, parts)`. `is_pickle` is true if the value had to be pickled; the
/// concatenated `parts` are the bytes of the row.
pub fn with_parts<'py, T>(
    value: &Bound<'py, PyAny>,
    pickle: impl FnOnce() -> PyResult<Bound<'py, PyAny>>,
    scratch: &mut Scratch,
    done: impl FnOnce(bool, &[&[u8]]) -> PyResult<T>,
) -> PyResult<T> {
    shrink(&mut scratch.tree);
    scratch.tree.clear();
    let mut leaves = Leaves { filled: Vec::new(), spare: std::mem::take(&mut scratch.leaves) };
    if !encode(Bridge::get(value.py())?, value, &mut scratch.tree, &mut leaves)? {
        let pickle = pickle()?;
        let pickle = pickle.cast::<PyBytes>()?;
        return done(true, &[&[PICKLE], pickle.as_bytes()]);
    }
    if leaves.filled.is_empty() {
        scratch.leaves = leaves.spare;
        return done(false, &[&scratch.tree]);
    }
    let lengths = leaves.filled.iter().map(|(_, len)| *len);
    let head = [scratch.tree.len(), leaves.filled.len()].into_iter().chain(lengths);
    let head: Vec<u8> = head.flat_map(|number| (number as u64).to_le_bytes()).collect();
    let mut parts: Vec<&[u8]> = vec![&[LEAVES], &head, &scratch.tree];
    parts.extend(leaves.slices());
    let result = done(false, &parts);
    scratch.leaves = leaves.into_spare();
    result
}

/// The leaves of a row.
struct Parts<'a>(Vec<Option<&'a [u8]>>);

impl Source for Parts<'_> {
    type Memory = Heap;

    fn leaf(&mut self, index: u32) -> Result<Heap> {
        let leaf = self.0.get_mut(index as usize).and_then(Option::take);
        let leaf = leaf.ok_or_else(|| damaged(&format!("leaf {index} of a row is missing")))?;
        let heap = Heap::new(leaf.len())?;
        // SAFETY: the new memory has room for these bytes.
        unsafe { heap.ptr().copy_from_nonoverlapping(leaf.as_ptr(), leaf.len()) };
        Ok(heap)
    }
}

/// Returns the tree and the leaves of a row that begins with [`LEAVES`]; `None` if it is damaged. `bytes` are the row's
/// bytes after that first byte.
fn split(bytes: &[u8]) -> Option<(&[u8], Parts<'_>)> {
    let (head, rest) = bytes.split_first_chunk::<16>()?;
    let number = |bytes: &[u8]| usize::try_from(u64::from_le_bytes(*bytes.first_chunk()?)).ok();
    let (tree, count) = (number(head)?, number(&head[8..])?);
    let (lengths, rest) = rest.split_at_checked(count.checked_mul(8)?)?;
    let (tree, mut rest) = rest.split_at_checked(tree)?;
    let mut leaves = Vec::with_capacity(count);
    for len in lengths.as_chunks::<8>().0 {
        let (leaf, after) = rest.split_at_checked(number(len)?)?;
        leaves.push(Some(leaf));
        rest = after;
    }
    Some((tree, Parts(leaves)))
}

/// Returns the value of a row as a new object.
#[inline]
pub fn value<'py>(py: Python<'py>, rows: &Rows, row: u64) -> PyResult<Bound<'py, PyAny>> {
    let bytes = match rows.row(row)? {
        Row::Int(value) => return Ok(value.into_pyobject(py)?.into_any()),
        Row::Float(value) => return Ok(PyFloat::new(py, value).into_any()),
        Row::Record(bytes) => bytes,
    };
    if let Some(text) = text(bytes) {
        return Ok(PyString::new(py, text).into_any());
    }
    match bytes.split_first() {
        Some((&PICKLE, pickle)) => loads(py)?.call1((PyBytes::new(py, pickle),)),
        Some((&SHAPED, rest)) => decode_shaped(py, rows, rest),
        _ => decode_plain(py, bytes),
    }
}

/// Returns the value of a tree with or without leaves.
fn decode_plain<'py>(py: Python<'py>, bytes: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    let value = match bytes.split_first() {
        Some((&LEAVES, rest)) => {
            let (tree, mut leaves) = split(rest).ok_or_else(|| damaged("a row has invalid leaves"))?;
            decode(py, Bridge::get(py)?, tree, &mut leaves)?
        }
        _ => decode(py, Bridge::get(py)?, bytes, &mut Parts(Vec::new()))?,
    };
    Ok(value.into_bound(py))
}

/// Returns the dict of a row that begins with [`SHAPED`]. `rest` are the row's bytes after that first byte.
fn decode_shaped<'py>(py: Python<'py>, rows: &Rows, rest: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    let wrong = || damaged("the values of a dict are invalid");
    let (number, rest) = rest.split_first_chunk::<4>().ok_or_else(wrong)?;
    let keys = rows.keys(py, u32::from_le_bytes(*number))?;
    let values = decode_plain(py, rest)?;
    let values = values.cast::<PyTuple>().map_err(|_| wrong())?;
    if values.len() != keys.len() {
        return Err(wrong().into());
    }
    let dict = PyDict::new(py);
    for (key, value) in keys.iter_borrowed().zip(values.iter_borrowed()) {
        dict.set_item(key, value)?;
    }
    Ok(dict.into_any())
}

/// Returns `pickle.loads`.
pub(super) fn loads(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
    static LOADS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    Ok(LOADS.get_or_try_init(py, || py.import("pickle")?.getattr("loads").map(Bound::unbind))?.bind(py))
}

/// Returns whether the value of a row equals the str `wanted`; `None` if the value must be decoded and compared.
#[inline]
pub fn is_text(store: &Store, row: u64, wanted: &str) -> Option<bool> {
    match store.row(row) {
        Ok(Row::Record(bytes)) => match text(bytes) {
            Some(text) => Some(text == wanted),
            // An object of another class may be equal to a str.
            None if bytes.first() == Some(&PICKLE) => None,
            None => Some(false),
        },
        Ok(_) => Some(false),
        Err(_) => None,
    }
}

/// Appends bytes to `out` that identify a key in every process: equal keys have equal bytes. Returns false if the key
/// has no such bytes, in which case `out` may end with a part of them.
///
/// Strings, bytes, None, numbers and (nested) tuples of these have such bytes. The hashes of other objects may differ
/// between processes.
pub fn key(value: &Bound<'_, PyAny>, out: &mut Vec<u8>, depth: usize) -> PyResult<bool> {
    let py = value.py();
    if let Ok(text) = value.cast::<PyString>() {
        // A subclass may define its own equality and hash.
        if value.cast_exact::<PyString>().is_err() && !hashes_like(value, &py.get_type::<PyString>())? {
            return Ok(false);
        }
        let Ok(text) = text.to_str() else { return Ok(false) };
        out.push(b's');
        out.extend_from_slice(text.as_bytes());
        // This byte never occurs in UTF-8. It ends the string, so that ("ab", "c") and ("a", "bc") have different
        // bytes.
        out.push(0xff);
    } else if value.cast_exact::<PyInt>().is_ok()
        || value.cast_exact::<PyFloat>().is_ok()
        || value.cast_exact::<PyBool>().is_ok()
        || value.cast_exact::<PyComplex>().is_ok()
        || is_number(value)?
    {
        out.push(b'i');
        out.extend_from_slice(&value.hash()?.to_le_bytes());
    } else if let Ok(bytes) = value.cast_exact::<PyBytes>() {
        out.push(b'b');
        out.extend_from_slice(&bytes.as_bytes().len().to_le_bytes());
        out.extend_from_slice(bytes.as_bytes());
    } else if value.cast_exact::<PyNone>().is_ok() {
        out.push(b'n');
    } else if let Ok(tuple) = value.cast_exact::<PyTuple>()
        && depth < 8
    {
        out.push(b't');
        out.extend_from_slice(&tuple.len().to_le_bytes());
        for item in tuple {
            if !key(&item, out, depth + 1)? {
                return Ok(false);
            }
        }
    } else {
        return Ok(false);
    }
    Ok(true)
}

/// Returns true if an object is a number whose hash is the same in every process: a number from NumPy or the standard
/// library, or one with the hash and the equality of int, float or complex.
fn is_number(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    static NUMBER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = value.py();
    for base in [py.get_type::<PyInt>(), py.get_type::<PyFloat>(), py.get_type::<PyComplex>()] {
        if value.is_instance(&base)? && hashes_like(value, &base)? {
            return Ok(true);
        }
    }
    let module = value.get_type().module()?;
    let package = module.to_str()?.split('.').next();
    let find = || py.import("numbers")?.getattr("Number").map(Bound::unbind);
    let number = NUMBER.get_or_try_init(py, find)?;
    Ok(matches!(package, Some("numpy" | "decimal" | "fractions")) && value.is_instance(number.bind(py))?)
}

/// Returns true if the class of `value` has the `__hash__` and `__eq__` of `base`.
fn hashes_like(value: &Bound<'_, PyAny>, base: &Bound<'_, PyType>) -> PyResult<bool> {
    let (py, kind) = (value.py(), value.get_type());
    for name in [intern!(py, "__hash__"), intern!(py, "__eq__")] {
        if !kind.getattr(name)?.is(base.getattr(name)?) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns the hash of a key; `None` if its hash may differ between processes. Overwrites `buffer`.
pub fn key_hash(value: &Bound<'_, PyAny>, buffer: &mut Vec<u8>) -> PyResult<Option<u64>> {
    buffer.clear();
    Ok(key(value, buffer, 0)?.then(|| hash(buffer)))
}

/// Returns the row of a key in a store whose rows alternate between keys and values; `None` if there is no such key.
pub fn find_key(store: &Rows, wanted: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    let py = wanted.py();
    let mut buffer = Vec::new();
    let hash = key_hash(wanted, &mut buffer)?;
    let text = wanted.cast_exact::<PyString>().ok().map(|text| text.to_str()).and_then(std::result::Result::ok);
    let is_key = |row: u64| -> PyResult<bool> {
        match text.and_then(|text| is_text(store, row, text)) {
            Some(is_equal) => Ok(is_equal),
            None => value(py, store, row)?.eq(wanted),
        }
    };
    if let Some(hash) = hash {
        for row in store.candidates(hash) {
            if is_key(row)? {
                return Ok(Some(row));
            }
        }
    } else {
        // Raises Python's TypeError for an unhashable object.
        wanted.hash()?;
    }
    let rows: Box<dyn Iterator<Item = u64>> = match hash {
        Some(_) => Box::new(store.unhashed()),
        // Without a hash, the hash table is of no use, so every key is compared.
        None => Box::new((0..store.rows()).step_by(2)),
    };
    for row in rows {
        let key = value(py, store, row)?;
        if key.hash()? == wanted.hash()? && key.eq(wanted)? {
            return Ok(Some(row));
        }
    }
    Ok(None)
}
