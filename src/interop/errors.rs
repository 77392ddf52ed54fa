//! Conversion of the core's errors to Python exceptions.

use pyo3::PyErr;
use pyo3::exceptions::{PyMemoryError, PyOSError, PyOverflowError, PyRuntimeError, PyValueError};

use crate::error::Error;

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        let text = error.to_string();
        match error {
            Error::NoMemory { .. } | Error::NoHeap { .. } | Error::RegionFull { .. } => PyMemoryError::new_err(text),
            Error::ShareMemory { .. } => PyMemoryError::new_err(text),
            Error::Foreign { .. } => PyValueError::new_err(text),
            Error::Os { errno: libc::ENOMEM, .. } => PyMemoryError::new_err(text),
            Error::TooMany { .. } => PyOverflowError::new_err(text),
            Error::Os { errno, .. } => PyOSError::new_err((errno, text)),
            Error::Corrupt { .. }
            | Error::Connection { .. }
            | Error::Layout { .. }
            | Error::Child { .. }
            | Error::Usage { .. } => PyRuntimeError::new_err(text),
        }
    }
}
