//! Pickles whose plain tensors and arrays are kept out of band.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::config::INLINE_LIMIT;
use crate::error::Error;
use crate::wire;

/// A result to unpickle.
#[derive(Debug)]
pub struct Pickled {
    pub payload: Py<PyBytes>,
    /// The out-of-band objects.
    pub objects: Py<PyList>,
    /// True for a batch, false for an error.
    pub is_batch: bool,
}

/// Returns the checksum of a pickle that is large enough to be sent in a leaf, which the message's own checksum does
/// not cover. Returns 0 for a smaller pickle: it is part of the payload, which that checksum covers.
pub fn pickle_sum(pickle: &Bound<'_, PyBytes>) -> i64 {
    let bytes = pickle.as_bytes();
    if bytes.len() < INLINE_LIMIT {
        return 0;
    }
    pickle.py().detach(|| wire::checksum(bytes)) as i64
}

/// Returns the pickle and the out-of-band objects of a decoded payload; an error if the checksum does not match.
pub fn pickle_of<'py>(decoded: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyList>)> {
    let (pickle, objects, sum): (Bound<'py, PyBytes>, Bound<'py, PyList>, i64) = decoded.extract()?;
    if pickle_sum(&pickle) != sum {
        return Err(Error::corrupt("the checksum of a pickled batch does not match").into());
    }
    Ok((pickle, objects))
}
