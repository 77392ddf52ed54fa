//! Calls from Rust into Python on threads that may still be in such a call when the interpreter exits: a daemon thread
//! in `next`, or the pin thread.
//!
//! If a thread tries to take the GIL back while the interpreter exits, Python (up to 3.13) ends the thread with
//! `pthread_exit`. This unwinds the stack, and aborts the process when the unwinding reaches Rust's frames. The
//! functions here park such a thread instead, as Python 3.14 does.
//!
//! PyO3 parks threads that return from [`Python::detach`] or call [`Python::attach`] (`HangThread` in pyo3-ffi). It
//! does not park a thread whose call releases the GIL inside Python, for example in a sampler that sleeps.

use std::hint::black_box;
use std::mem::{forget, transmute};

use pyo3::exceptions::PyStopIteration;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyIterator, PyTuple};

use crate::engine::Handle;
use crate::sys::signal::gettid;

type Object = *mut ffi::PyObject;
type Call = unsafe extern "C" fn(Object, Object, Object) -> Object;
type UnwindingCall = unsafe extern "C-unwind" fn(Object, Object, Object) -> Object;
type Next = unsafe extern "C" fn(Object) -> Object;
type UnwindingNext = unsafe extern "C-unwind" fn(Object) -> Object;
type Release = unsafe extern "C" fn(Object);
type UnwindingRelease = unsafe extern "C-unwind" fn(Object);

// A second declaration of the functions as "C-unwind" would not be enough: the compiler keeps one declaration per
// symbol and codegen unit, and if it keeps PyO3's, it assumes that the call cannot unwind. `black_box` hides the
// callee.

/// Calls a function that may run Python code or wait without the GIL, such as user code, pickle or torch's allocator.
/// Drops the arguments with the same protection.
pub fn call<'py>(function: &Bound<'py, PyAny>, args: Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the types differ only in whether the call may unwind.
    let call = black_box(unsafe { transmute::<Call, UnwindingCall>(ffi::PyObject_Call) });
    // SAFETY: the GIL is held; both objects live, and the second one is a tuple; null means no keyword arguments.
    let result = guarded(|| unsafe { call(function.as_ptr(), args.as_ptr(), std::ptr::null_mut()) });
    // SAFETY: the call returned a new reference, or null with an exception set.
    let result = unsafe { Bound::from_owned_ptr_or_err(function.py(), result) };
    // Drop the arguments only after the exception has been taken, because their finalizers may run code.
    release(function.py(), args.into_any().unbind());
    result
}

/// Returns the next item of an iterator, or of a function that raises StopIteration at the end. Returns `None` at the
/// end.
pub fn next_item<'py>(items: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = items.py();
    let Ok(iterator) = items.cast::<PyIterator>() else {
        return match call(items, PyTuple::empty(py)) {
            Err(error) if error.is_instance_of::<PyStopIteration>(py) => Ok(None),
            item => item.map(Some),
        };
    };
    // SAFETY: as in `call`.
    let next = black_box(unsafe { transmute::<Next, UnwindingNext>(ffi::PyIter_Next) });
    // SAFETY: the GIL is held; the object is an iterator.
    let item = guarded(|| unsafe { next(iterator.as_ptr()) });
    // SAFETY: the call returned a new reference, or null: at the end without an exception, otherwise with one.
    match unsafe { Bound::from_owned_ptr_or_opt(py, item) } {
        Some(item) => Ok(Some(item)),
        None => PyErr::take(py).map_or(Ok(None), Err),
    }
}

/// Drops an object whose finalizer may run Python code.
pub fn release(_: Python<'_>, object: Py<PyAny>) {
    // SAFETY: as in `call`.
    let release = black_box(unsafe { transmute::<Release, UnwindingRelease>(ffi::Py_DecRef) });
    // SAFETY: the GIL is held; the call gives up the caller's reference.
    guarded(|| unsafe { release(object.into_ptr()) });
}

/// Makes a call, and parks the thread if the call unwinds the stack.
fn guarded<R>(call: impl FnOnce() -> R) -> R {
    let guard = ParkOnUnwind;
    let result = call();
    forget(guard);
    result
}

/// Parks the calling thread forever if the interpreter is exiting and the thread is not the main thread. Otherwise does
/// nothing.
pub fn park_at_exit(py: Python<'_>, handle: &Handle) {
    if handle.exiting() && gettid() != std::process::id() as i32 {
        py.detach(|| drop(ParkOnUnwind));
    }
}

/// A guard that parks the thread forever when it is dropped.
struct ParkOnUnwind;

impl Drop for ParkOnUnwind {
    fn drop(&mut self) {
        loop {
            std::thread::park();
        }
    }
}
