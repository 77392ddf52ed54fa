//! Collation of cached samples. The result equals that of default_collate, but no object is created per sample.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::rows::{LEAVES, PICKLE};
use super::samples::{Parts, split};
use crate::cache::{Cache, Lookup, Record};
use crate::config::{DETACH_FROM, STREAM_FROM};
use crate::copy::copy;
use crate::error::Error;
use crate::interop::tensor::Bridge;
use crate::interop::view::{Form, StackPlan};
use crate::tree::dtype::Dtype;
use crate::tree::layout::{Dims, is_contiguous};
use crate::tree::{Atom, Build, Group, Kind, Leaf, Place, Storage, walk};

/// A function that allocates the tensor that a plan describes. It returns the address of the tensor's memory, and the
/// tensor. The memory has room for the whole plan.
type Allocate<'a> = dyn FnMut(&StackPlan) -> PyResult<(*mut u8, Py<PyAny>)> + 'a;

/// One part of a sample.
#[derive(Clone, Copy)]
enum Part {
    /// A contiguous tensor: the address and the number of its bytes. They are in the cache's mapping, or in a tree that
    /// outlives this value.
    Tensor(*const u8, usize),
    Int(i64),
    Float(f64),
}

/// The type of a part of a sample. All samples of a batch must have the same columns.
#[derive(PartialEq)]
enum Column {
    Tensor(Dtype, Dims),
    Int,
    Float,
}

/// A sample that is a tensor, or a flat list, tuple or dict of tensors and numbers.
#[derive(Default)]
struct Sample<'a> {
    columns: Vec<Column>,
    parts: Vec<Part>,
    /// The keys of a dict.
    keys: Vec<String>,
    group: Option<Group>,
    leaves: Parts<'a>,
    /// True if the sample does not have this form.
    is_other: bool,
}

impl<'a> Sample<'a> {
    /// Reads a record into `tree`, which then contains the bytes of small tensors and must outlive the sample. Returns
    /// `None` if the sample does not have the form that [`Sample`] describes.
    fn of(record: Record<'a>, tree: &mut Vec<u8>) -> Result<Option<Self>, Error> {
        let mut sample = Self::default();
        match record.copy(0, 1).first() {
            None | Some(&PICKLE) => return Ok(None),
            Some(&LEAVES) => {
                let damaged = || Error::corrupt("a record has invalid leaves");
                (*tree, sample.leaves) = split(record).ok_or_else(damaged)?;
            }
            Some(_) => *tree = record.copy(0, record.len()),
        }
        walk(tree, &mut sample)?;
        let is_dict = sample.group == Some(Group::Dict);
        let is_whole = sample.parts.len() == sample.columns.len()
            && if is_dict { sample.keys.len() == sample.parts.len() } else { sample.keys.is_empty() };
        let is_one = sample.group.is_some() || sample.parts.len() == 1;
        Ok((!sample.is_other && is_whole && is_one && !sample.parts.is_empty()).then_some(sample))
    }

    /// Returns the address of a contiguous tensor's bytes; `None` if it is in a storage, has no elements but an offset,
    /// or reaches beyond the record.
    fn bytes(&self, leaf: &Leaf<'_>) -> Option<*const u8> {
        match leaf.place {
            Place::Inline(bytes) => Some(bytes.as_ptr()),
            Place::Outside { leaf: number, offset } => {
                let record = (*self.leaves.0.get(number as usize)?)?;
                Some(record.part(usize::try_from(offset).ok()?, leaf.extent)?.as_ptr())
            }
            Place::Shared { .. } | Place::Empty { .. } => None,
        }
    }
}

impl Build for Sample<'_> {
    type Error = Error;

    fn atom(&mut self, atom: Atom<'_>) -> Result<(), Error> {
        let (column, part) = match atom {
            Atom::Leaf(leaf) if leaf.kind == Kind::Tensor && is_contiguous(&leaf.shape, &leaf.strides) => {
                let Some(first) = self.bytes(leaf) else {
                    self.is_other = true;
                    return Ok(());
                };
                (Column::Tensor(leaf.dtype, leaf.shape), Part::Tensor(first, leaf.extent))
            }
            Atom::Int(value) => (Column::Int, Part::Int(value)),
            Atom::Float(value) => (Column::Float, Part::Float(value)),
            // A key of a dict. A string elsewhere is also taken for a key; `of` then finds that the number of keys is
            // wrong.
            Atom::Str(text) if self.keys.len() == self.parts.len() => {
                self.keys.push(text.to_owned());
                return Ok(());
            }
            _ => {
                self.is_other = true;
                return Ok(());
            }
        };
        self.columns.push(column);
        self.parts.push(part);
        Ok(())
    }

    fn close(&mut self, group: Group, _count: usize) -> Result<(), Error> {
        self.is_other |= self.group.replace(group).is_some();
        Ok(())
    }

    fn keep(&mut self, _index: usize) -> Result<(), Error> {
        self.is_other = true;
        Ok(())
    }

    fn storage(&mut self, _storage: &Storage<'_>) -> Result<(), Error> {
        self.is_other = true;
        Ok(())
    }
}

/// Collates the given rows as torch's default_collate does. Returns `None` if torch must collate them:
/// - a mode of torch is active, or torch's default device is not the CPU;
/// - a row is missing, damaged, or must first be compared with the dataset;
/// - the samples do not have the same form, or that form is neither a contiguous tensor nor a flat list, tuple or dict
///   (with strings as keys) of contiguous tensors, ints and floats.
pub fn gather(py: Python<'_>, cache: &Cache, rows: &[u64], allocate: &mut Allocate<'_>) -> PyResult<Option<Py<PyAny>>> {
    let bridge = Bridge::get(py)?;
    if bridge.has_modes(py)? || !bridge.default_is_cpu(py)? {
        return Ok(None);
    }
    let mut samples = Vec::with_capacity(rows.len());
    let mut trees = vec![Vec::new(); rows.len()];
    for (row, tree) in rows.iter().zip(&mut trees) {
        if *row >= cache.rows() {
            return Ok(None);
        }
        let Lookup::Whole(record) = cache.lookup(*row) else { return Ok(None) };
        // The code that then reads single samples also detects a damaged record, and makes the sample again.
        let Ok(Some(sample)) = Sample::of(record, tree) else { return Ok(None) };
        samples.push(sample);
    }
    let Some(first) = samples.first() else { return Ok(None) };
    let has_same_form = |sample: &Sample<'_>| {
        sample.group == first.group && sample.columns == first.columns && sample.keys == first.keys
    };
    if !samples.iter().all(has_same_form) {
        return Ok(None);
    }
    let mut stacked = Vec::with_capacity(first.columns.len());
    for (place, column) in first.columns.iter().enumerate() {
        let parts = samples.iter().map(|sample| sample.parts[place]);
        let numbers = |dtype| {
            let word = |part| match part {
                Part::Int(value) => value.to_ne_bytes(),
                Part::Float(value) => value.to_ne_bytes(),
                Part::Tensor(..) => [0; 8],
            };
            let bytes: Vec<u8> = parts.clone().flat_map(word).collect();
            bridge.tensor_copied(py, &bytes, Form { dtype, shape: &[rows.len() as i64], strides: &[1] })
        };
        stacked.push(match column {
            Column::Int => numbers(Dtype::INT64)?,
            Column::Float => numbers(Dtype::FLOAT64)?,
            Column::Tensor(dtype, shape) => {
                let Some(plan) = StackPlan::new(rows.len(), shape, *dtype) else { return Ok(None) };
                let sources = parts.map(|part| match part {
                    Part::Tensor(first, len) if len == plan.each => Some(first as usize),
                    _ => None,
                });
                let Some(sources) = sources.collect::<Option<Vec<_>>>() else { return Ok(None) };
                let (to, tensor) = allocate(&plan)?;
                let (to, each, streams) = (to as usize, plan.each, plan.total >= STREAM_FROM);
                let fill = move || {
                    for (i, from) in sources.into_iter().enumerate() {
                        // SAFETY: each source has `each` bytes, in the cache's mapping or in a tree, both of which live
                        // until `gather` returns; the target is new memory with room for all sources.
                        unsafe { copy(from as *const u8, (to + i * each) as *mut u8, each, streams) };
                    }
                };
                if plan.total >= DETACH_FROM {
                    py.detach(fill);
                } else {
                    fill();
                }
                tensor
            }
        });
    }
    cache.count_hits(rows.len() as u64);
    Ok(Some(match first.group {
        None => stacked.remove(0),
        Some(Group::Dict) => {
            let dict = PyDict::new(py);
            for (key, value) in first.keys.iter().zip(stacked) {
                dict.set_item(key, value)?;
            }
            dict.into_any().unbind()
        }
        Some(_) => PyList::new(py, stacked)?.into_any().unbind(),
    }))
}
