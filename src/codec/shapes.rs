//! Shapes of dicts. A shape is a sequence of keys that many dicts have in common. The row of a dict contains its values
//! and the number of its shape; the image stores the keys of each shape only once.

use std::collections::HashMap;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

use crate::tree::{Group, Writer};

/// Maximum number of shapes in an image. If it is reached, the dicts probably have arbitrary keys, and dicts with new
/// keys get no shape.
const SHAPES_MAX: usize = 256;
/// Maximum number of keys of a dict that has a shape.
const KEYS_MAX: usize = 256;

/// The shapes of an image that is being written.
#[derive(Default)]
pub struct Shapes {
    /// The number of each shape, indexed by the encoded tuple of its keys.
    numbers: HashMap<Vec<u8>, u32>,
    /// The encoded tuples, concatenated in the order of their numbers.
    trees: Vec<u8>,
    buffer: Vec<u8>,
}

impl Shapes {
    /// Returns the number of a dict's shape, and the dict's values. Records the shape if it is new. Returns `None` for
    /// any other object, and for a dict that gets no shape.
    pub fn split<'py>(&mut self, value: &Bound<'py, PyAny>) -> PyResult<Option<(u32, Bound<'py, PyTuple>)>> {
        let Ok(dict) = value.cast_exact::<PyDict>() else { return Ok(None) };
        if dict.is_empty() || dict.len() > KEYS_MAX {
            return Ok(None);
        }
        let mut values = Vec::with_capacity(dict.len());
        self.buffer.clear();
        let mut tree = Writer::new(&mut self.buffer);
        tree.open(Group::Tuple, dict.len());
        for (key, value) in dict {
            let Ok(key) = key.cast_exact::<PyString>() else { return Ok(None) };
            let Ok(key) = key.to_str() else { return Ok(None) };
            tree.str(key);
            values.push(value);
        }
        let number = match self.numbers.get(&self.buffer) {
            Some(number) => *number,
            None if self.numbers.len() >= SHAPES_MAX => return Ok(None),
            None => {
                let number = self.numbers.len() as u32;
                self.trees.extend_from_slice(&self.buffer);
                self.numbers.insert(self.buffer.clone(), number);
                number
            }
        };
        Ok(Some((number, PyTuple::new(value.py(), values)?)))
    }

    /// Returns the encoded list of the tuples; no bytes if there are no shapes.
    pub fn finish(self) -> Vec<u8> {
        let mut out = Vec::new();
        if !self.numbers.is_empty() {
            Writer::new(&mut out).open(Group::List, self.numbers.len());
            out.extend_from_slice(&self.trees);
        }
        out
    }
}
