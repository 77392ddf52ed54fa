//! Conversion of samples to the records of a cache, and back. A record has the format of a row of [`super::rows`], but
//! its bytes are in memory that other processes also map, so they are copied before they are checked.

use std::ptr;

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::rows::{LEAVES, PICKLE, Scratch, loads, with_parts};
use super::{Hold, Sink, Source, decode, encode};
use crate::cache::{Batch, Cache, Put, Record};
use crate::error::{Error, Result};
use crate::interop::memory::{Heap, Memory};
use crate::interop::tensor::Bridge;

/// Stores a sample in the cache as row `row`. `dumps` pickles a sample that is not a plain tree.
pub fn put(
    cache: &Cache,
    row: u64,
    sample: &Bound<'_, PyAny>,
    dumps: &Bound<'_, PyAny>,
    scratch: &mut Scratch,
) -> PyResult<Put> {
    let pickle = || dumps.call1((sample,));
    with_parts(sample, pickle, scratch, |_, parts| {
        let len = parts.iter().map(|part| part.len()).sum::<usize>();
        // A large write may wait for the disk or for page faults, so it releases the GIL.
        if len < crate::config::DETACH_FROM {
            return Ok(cache.put(row, parts)?);
        }
        Ok(sample.py().detach(|| cache.put(row, parts))?)
    })
}

/// Adds the record of a sample that is plain and small to a batch. Returns false if the caller must call [`put`].
pub fn add(batch: &mut Batch, row: u64, sample: &Bound<'_, PyAny>) -> PyResult<bool> {
    let bridge = Bridge::get(sample.py())?;
    Ok(batch.push(row, |bytes| encode(bridge, sample, bytes, &mut NoLeaves).unwrap_or(false)))
}

/// The leaves of small samples, which have none.
struct NoLeaves;

// SAFETY: no memory is returned.
unsafe impl Sink for NoLeaves {
    fn reserve(&mut self, len: usize) -> Result<(u32, *mut u8)> {
        Err(Error::usage(format!("a small sample has no leaf of {len} bytes")))
    }

    fn keeps_state(&self) -> bool {
        true
    }

    unsafe fn adopt(&mut self, _ptr: *const u8, _len: usize, _hold: Hold) -> Option<(u32, u64)> {
        None
    }
}

/// Returns the sample of a record as a new object.
pub fn value<'py>(py: Python<'py>, record: Record<'_>) -> PyResult<Bound<'py, PyAny>> {
    let bridge = Bridge::get(py)?;
    match record.copy(0, 1).first() {
        Some(&PICKLE) => {
            let fill = |bytes: &mut [u8]| {
                // SAFETY: the record is one byte longer than the bytes object.
                unsafe { ptr::copy_nonoverlapping(record.as_ptr().add(1), bytes.as_mut_ptr(), bytes.len()) };
                Ok(())
            };
            loads(py)?.call1((PyBytes::new_with(py, record.len() - 1, fill)?,))
        }
        Some(&LEAVES) => {
            let (tree, mut leaves) = split(record).ok_or_else(|| Error::corrupt("a record has invalid leaves"))?;
            Ok(decode(py, bridge, &tree, &mut leaves)?.into_bound(py))
        }
        _ => Ok(decode(py, bridge, &record.copy(0, record.len()), &mut Parts::default())?.into_bound(py)),
    }
}

/// The leaves of a record.
#[derive(Default)]
pub struct Parts<'a>(pub Vec<Option<Record<'a>>>);

impl Source for Parts<'_> {
    type Memory = Heap;

    fn leaf(&mut self, index: u32) -> Result<Heap> {
        let leaf = self.0.get_mut(index as usize).and_then(Option::take);
        let leaf = leaf.ok_or_else(|| Error::corrupt(format!("leaf {index} of a record is missing")))?;
        let heap = Heap::new(leaf.len())?;
        // SAFETY: both have `leaf.len()` bytes, and the new memory does not overlap the record.
        unsafe { heap.ptr().copy_from_nonoverlapping(leaf.as_ptr(), leaf.len()) };
        Ok(heap)
    }
}

/// Returns the tree and the leaves of a record that begins with [`LEAVES`]; `None` if it is damaged.
pub fn split(record: Record<'_>) -> Option<(Vec<u8>, Parts<'_>)> {
    let number = |bytes: &[u8]| usize::try_from(u64::from_le_bytes(*bytes.first_chunk()?)).ok();
    let head = record.copy(1, 16);
    let (tree, count) = (number(&head)?, number(head.get(8..)?)?);
    let lengths = record.copy(17, count.checked_mul(8)?);
    let mut at = 17 + lengths.len();
    let tree = record.copy(at, tree);
    at += tree.len();
    let mut leaves = Vec::with_capacity(lengths.len() / 8);
    for len in lengths.as_chunks::<8>().0 {
        let leaf = record.part(at, number(len)?)?;
        leaves.push(Some(leaf));
        at += leaf.len();
    }
    Some((tree, Parts(leaves)))
}
