//! NumPy's array class and dtypes.

use pyo3::intern;
use pyo3::prelude::*;

use crate::tree::dtype::Dtype;

/// The objects of NumPy that the crate uses.
pub struct Numpy {
    pub(super) ndarray: Py<PyAny>,
    pub(super) weakrefs: Py<PyAny>,
    /// Pairs of a NumPy dtype and the corresponding dtype of this crate, for all built-in dtypes, including aliases
    /// such as `longlong`.
    known: Vec<(Py<PyAny>, Dtype)>,
    /// The NumPy dtypes of delivered arrays, indexed by the codes of this crate's dtypes. `None` where NumPy has no
    /// such dtype.
    pub(super) delivered: Vec<Option<Py<PyAny>>>,
}

/// NumPy's type characters of all built-in dtypes of kinds b, i, u, f and c.
const LETTERS: &str = "?bBhHiIlLqQefdgFDG";

impl Numpy {
    pub fn find(py: Python<'_>) -> PyResult<Self> {
        let numpy = py.import("numpy")?;
        let make = numpy.getattr("dtype")?;
        let delivered: Vec<Option<Py<PyAny>>> =
            Dtype::all().map(|dtype| make.call1((dtype.numpy_name()?,)).ok().map(Bound::unbind)).collect();
        let mut known = Vec::new();
        for letter in LETTERS.chars() {
            let built_in = make.call1((letter.to_string(),))?;
            for dtype in Dtype::all() {
                if let Some(delivered) = &delivered[usize::from(dtype.code())]
                    && built_in.eq(delivered)?
                {
                    known.push((built_in.clone().unbind(), dtype));
                }
            }
        }
        let weakrefs = py.import("weakref")?.getattr("getweakrefcount")?.unbind();
        Ok(Self { ndarray: numpy.getattr("ndarray")?.unbind(), weakrefs, known, delivered })
    }

    #[inline]
    pub fn is_array(&self, obj: &Bound<'_, PyAny>) -> bool {
        obj.get_type_ptr().cast() == self.ndarray.as_ptr()
    }

    pub(super) fn dtype_of(&self, array: &Bound<'_, PyAny>) -> PyResult<Option<Dtype>> {
        let py = array.py();
        let dtype = array.getattr(intern!(py, "dtype"))?;
        if let Some((_, own)) = self.known.iter().find(|(known, _)| known.is(&dtype)) {
            return Ok(Some(*own));
        }
        // Unpickled arrays have copies of the built-in dtypes. `==` compares byte orders and fields, but not metadata.
        if !dtype.getattr(intern!(py, "metadata"))?.is_none() {
            return Ok(None);
        }
        for (known, own) in &self.known {
            if dtype.eq(known)? {
                return Ok(Some(*own));
            }
        }
        Ok(None)
    }
}
