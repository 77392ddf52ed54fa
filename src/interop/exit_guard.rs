//! Calls from Rust that run Python code, on threads that may be inside them when the interpreter exits: a user's daemon thread in
//! `next`, the pin thread.
//!
//! A thread that wants the GIL back while the interpreter ends is ended by Python (up to 3.13) with `pthread_exit`, which
//! unwinds its stack, and Rust's part of it would abort the process. It is parked here instead, as Python 3.14 does.
//!
//! A return from [`Python::detach`], or a call of [`Python::attach`], needs none of this: PyO3 parks such a thread in the same way
//! (`HangThread` in pyo3-ffi). But it does not cover a call that releases the GIL in Python, such as a sampler that sleeps.

use std::hint::black_box;
use std::mem::{forget, transmute};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyIterator, PyTuple};

type Object = *mut ffi::PyObject;
type Call = unsafe extern "C" fn(Object, Object, Object) -> Object;
type UnwindingCall = unsafe extern "C-unwind" fn(Object, Object, Object) -> Object;
type Next = unsafe extern "C" fn(Object) -> Object;
type UnwindingNext = unsafe extern "C-unwind" fn(Object) -> Object;
type Release = unsafe extern "C" fn(Object);
type UnwindingRelease = unsafe extern "C-unwind" fn(Object);

// The functions are not declared once more as "C-unwind": the compiler has one declaration of a symbol in a unit of code, and
// where pyo3's comes first it takes our call for one that cannot unwind, too. So it must not see what is called.

/// Calls what runs Python code or waits without the GIL: users' code, pickle, torch's allocator. The arguments are dropped
/// here.
pub fn call<'py>(function: &Bound<'py, PyAny>, args: Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the types differ only in that unwinding is allowed.
    let call = black_box(unsafe { transmute::<Call, UnwindingCall>(ffi::PyObject_Call) });
    // SAFETY: the GIL is held; both are live objects, the second one a tuple; null stands for no keywords.
    let result = guarded(|| unsafe { call(function.as_ptr(), args.as_ptr(), std::ptr::null_mut()) });
    // SAFETY: a new reference, or null with an exception set.
    let result = unsafe { Bound::from_owned_ptr_or_err(function.py(), result) };
    // After the exception has been taken: what ends now may run code.
    release(function.py(), args.into_any().unbind());
    result
}

/// The next item of a user's iterator; `None` at its end.
pub fn next_of<'py>(iterator: &Bound<'py, PyIterator>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = iterator.py();
    // SAFETY: as in `call`.
    let next = black_box(unsafe { transmute::<Next, UnwindingNext>(ffi::PyIter_Next) });
    // SAFETY: the GIL is held; the object is an iterator.
    let item = guarded(|| unsafe { next(iterator.as_ptr()) });
    // SAFETY: a new reference, or null: with an exception set, or without one at the end.
    match unsafe { Bound::from_owned_ptr_or_opt(py, item) } {
        Some(item) => Ok(Some(item)),
        None => PyErr::take(py).map_or(Ok(None), Err),
    }
}

/// Drops an object whose finalizer may run Python code.
pub fn release(_: Python<'_>, object: Py<PyAny>) {
    // SAFETY: as in `call`.
    let release = black_box(unsafe { transmute::<Release, UnwindingRelease>(ffi::Py_DecRef) });
    // SAFETY: the GIL is held; the reference was the caller's, and is given up.
    guarded(|| unsafe { release(object.into_ptr()) });
}

/// Makes a call. If it unwinds the stack instead of returning, the thread is parked here.
fn guarded<R>(call: impl FnOnce() -> R) -> R {
    let guard = ParkOnUnwind;
    let result = call();
    forget(guard);
    result
}

/// Dropped only when the stack is unwound.
struct ParkOnUnwind;

impl Drop for ParkOnUnwind {
    fn drop(&mut self) {
        loop {
            std::thread::park();
        }
    }
}
