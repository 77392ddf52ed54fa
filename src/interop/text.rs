//! Short descriptions of indices, for statistics.

use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList, PyString, PyTuple};

use crate::config::{INDICES_SHOWN, KEY_SHOWN};

/// Returns a short string that shows an index or an index batch. Runs no user code: of objects other than ints, strings
/// and `None`, it shows only the type.
pub fn short_text(index: &Bound<'_, PyAny>) -> String {
    let (open, close) = if index.is_exact_instance_of::<PyList>() {
        ("[", "]")
    } else if index.is_exact_instance_of::<PyTuple>() {
        ("(", ")")
    } else {
        return item_text(index);
    };
    let Ok(len) = index.len() else { return item_text(index) };
    let shown = (0..len.min(INDICES_SHOWN)).filter_map(|at| index.get_item(at).ok());
    let mut text = shown.map(|item| item_text(&item)).collect::<Vec<_>>().join(", ");
    if len > INDICES_SHOWN {
        text += &format!(", ... {len} in all");
    }
    format!("{open}{text}{close}")
}

fn item_text(item: &Bound<'_, PyAny>) -> String {
    if item.is_none() {
        return "None".into();
    }
    if item.is_exact_instance_of::<PyInt>() {
        return item.extract::<i64>().map_or_else(|_| "a large int".into(), |number| number.to_string());
    }
    if let Ok(text) = item.cast_exact::<PyString>() {
        let text = text.to_string_lossy();
        let cut: String = text.chars().take(KEY_SHOWN).collect();
        let more = if cut.len() < text.len() { "..." } else { "" };
        return format!("{cut:?}{more}");
    }
    item.get_type().name().map_or_else(|_| "<object>".into(), |name| format!("<{name}>"))
}
