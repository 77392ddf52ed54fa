//! The codec in ordinary memory, for copies and for tests. `_core.pyi` documents the functions.

use pyo3::prelude::*;

use super::rows::loads;
use super::{Hold, Sink, Source, decode, decode_indices, encode, encode_indices};
use crate::error::Error;
use crate::interop::memory::{Heap, Memory};
use crate::interop::tensor::Bridge;

type Decoded = Option<Py<PyAny>>;

/// Leaves in ordinary memory.
#[derive(Default)]
struct HeapLeaves {
    leaves: Vec<Option<Heap>>,
    /// If set, every leaf is adopted as a part of a larger leaf, at this offset.
    adopt: Option<usize>,
    keeps_state: bool,
}

// SAFETY: the leaves own the reserved memory.
unsafe impl Sink for HeapLeaves {
    fn reserve(&mut self, len: usize) -> Result<(u32, *mut u8), Error> {
        let heap = Heap::new(len)?;
        let memory = heap.ptr();
        self.leaves.push(Some(heap));
        Ok((self.leaves.len() as u32 - 1, memory))
    }

    fn keeps_state(&self) -> bool {
        self.keeps_state
    }

    unsafe fn adopt(&mut self, ptr: *const u8, len: usize, _: Hold) -> Option<(u32, u64)> {
        let offset = self.adopt?;
        let (leaf, memory) = self.reserve(offset + len).ok()?;
        // SAFETY: the batch keeps the bytes alive; the same number of bytes was reserved after the
        // offset.
        unsafe { memory.add(offset).copy_from_nonoverlapping(ptr, len) };
        Some((leaf, offset as u64))
    }
}

impl Source for HeapLeaves {
    type Memory = Heap;

    fn leaf(&mut self, index: u32) -> Result<Heap, Error> {
        let leaf = self.leaves.get_mut(index as usize).and_then(Option::take);
        leaf.ok_or_else(|| Error::corrupt(format!("leaf {index} does not exist, or was already taken")))
    }
}

#[pyfunction]
pub fn copy_of<'py>(sample: &Bound<'py, PyAny>, dumps: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let (py, mut tree) = (sample.py(), Vec::new());
    let mut leaves = HeapLeaves { keeps_state: true, ..HeapLeaves::default() };
    if encode(Bridge::get(py)?, sample, &mut tree, &mut leaves)? {
        return Ok(decode(py, Bridge::get(py)?, &tree, &mut leaves)?.into_bound(py));
    }
    loads(py)?.call1((dumps.call1((sample,))?,))
}

#[pyfunction]
#[pyo3(signature = (obj, *, exchange = true, damage = Vec::new(), indices = false, raw = false, adopt = None))]
pub fn _roundtrip(
    py: Python<'_>,
    obj: &Bound<'_, PyAny>,
    exchange: bool,
    damage: Vec<(usize, u8)>,
    indices: bool,
    raw: bool,
    adopt: Option<usize>,
) -> PyResult<(bool, Decoded)> {
    let own;
    let bridge = if exchange {
        Bridge::get(py)?
    } else {
        own = Bridge::new(py, false)?;
        &own
    };
    let (mut payload, mut leaves) = (Vec::new(), HeapLeaves { adopt, ..HeapLeaves::default() });
    if raw {
        leaves.leaves.push(Some(Heap::new(1 << 20)?));
        let back = decode(py, bridge, obj.extract()?, &mut leaves)?;
        return Ok((true, Some(back)));
    }
    let plain = match indices {
        true => encode_indices(obj, &mut payload),
        false => encode(bridge, obj, &mut payload, &mut leaves)?,
    };
    if !plain {
        return Ok((false, None));
    }
    for (at, byte) in damage {
        match payload.get_mut(at) {
            Some(slot) => *slot = byte,
            None => drop(payload.pop()),
        }
    }
    let back = match indices {
        true => decode_indices(py, &payload)?,
        false => decode(py, bridge, &payload, &mut leaves)?,
    };
    Ok((true, Some(back)))
}

#[pyfunction]
pub fn _collate(py: Python<'_>, batch: &Bound<'_, PyAny>) -> PyResult<(Decoded, Decoded)> {
    let bridge = Bridge::get(py)?;
    let stacked = crate::interop::collate::stack(py, bridge, batch, &mut |len| Ok(Heap::new(len).ok()))?;
    Ok((stacked, crate::interop::collate::numbers(py, bridge, batch)?))
}
