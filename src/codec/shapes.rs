//! Shapes: the keys that many dicts have in common. The row of a dict has the number of its shape and its values; the
//! image has the keys of each shape once.

use std::collections::HashMap;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

use crate::tree::{Group, Writer};

/// Maximum number of shapes of an image. If there are more, the keys of the dicts are arbitrary, and further dicts get
/// no shape.
const SHAPES_MAX: usize = 256;
/// Maximum number of keys of a dict that has a shape.
const KEYS_MAX: usize = 256;

/// The shapes of an image that is being written.
#[derive(Default)]
pub struct Shapes {
    /// The numbers of the shapes. The key is the tree of the tuple of the shape's keys.
    numbers: HashMap<Vec<u8>, u32>,
    /// These trees, in the order of the numbers.
    trees: Vec<u8>,
    buffer: Vec<u8>,
}

impl Shapes {
    /// Returns the number of a dict's shape, and the dict's values; `None` for another object, and for a dict without a
    /// shape.
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

    /// Returns the tree of the list of all shapes' keys; empty without shapes.
    pub fn finish(self) -> Vec<u8> {
        let mut out = Vec::new();
        if !self.numbers.is_empty() {
            Writer::new(&mut out).open(Group::List, self.numbers.len());
            out.extend_from_slice(&self.trees);
        }
        out
    }
}
