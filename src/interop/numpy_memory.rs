//! NumPy's memory in a worker. Arrays of [`ARRAY_MIN`] bytes or more are allocated in the worker's region; see
//! `worker::arrays`.
//!
//! NumPy 1.22 and newer let a program replace the functions that allocate the memory of arrays (NEP 49). These
//! functions are set per context (`contextvars`), and each array keeps the functions with which it was allocated. The
//! functions of this module leave small arrays, and arrays for which the region has no room, to NumPy's default
//! functions.

use std::ffi::{CStr, c_char, c_uint, c_void};
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;

use crate::config::ARRAY_MIN;
use crate::worker::arrays::{self, Resized};
use crate::worker::port::Port;

/// NumPy's `PyDataMemAllocator`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Functions {
    ctx: *mut c_void,
    malloc: unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void,
    calloc: unsafe extern "C" fn(*mut c_void, usize, usize) -> *mut c_void,
    realloc: unsafe extern "C" fn(*mut c_void, *mut c_void, usize) -> *mut c_void,
    free: unsafe extern "C" fn(*mut c_void, *mut c_void, usize),
}

/// NumPy's `PyDataMem_Handler`.
#[repr(C)]
struct Handler {
    name: [c_char; 127],
    version: u8,
    functions: Functions,
}

const CAPSULE: &CStr = c"mem_handler";
const NAME: &CStr = c"rustloader_arena";
/// The name of NumPy's default handler.
const DEFAULT: &CStr = c"default_allocator";
/// The version of [`Handler`] that NumPy 1.22 introduced.
const VERSION: u8 = 1;

/// The feature version of NumPy 1.22, the first version with handlers.
const WITH_HANDLERS: c_uint = 0xf;
/// Indices in NumPy's table of functions.
const FEATURE_VERSION: usize = 211;
const SET_HANDLER: usize = 304;
const GET_HANDLER: usize = 305;

/// The context that NumPy passes to the functions.
struct Context {
    port: Arc<Port>,
    /// The region's first address.
    first: usize,
    /// Bytes of the region.
    len: usize,
    /// NumPy's default functions.
    default: Functions,
}

type SetHandler = unsafe extern "C" fn(*mut ffi::PyObject) -> *mut ffi::PyObject;
type GetHandler = unsafe extern "C" fn() -> *mut ffi::PyObject;

/// The functions of NumPy's C API that this module calls.
#[derive(Clone, Copy)]
struct Api {
    set: SetHandler,
    get: GetHandler,
}

impl Api {
    /// Finds NumPy's functions. Returns `None` if NumPy is too old to have handlers.
    fn find(py: Python<'_>) -> PyResult<Option<Self>> {
        let core = py.import("numpy._core._multiarray_umath");
        let core = core.or_else(|_| py.import("numpy.core._multiarray_umath"))?;
        let table = core.getattr("_ARRAY_API")?;
        // SAFETY: the call raises an error unless the object is a capsule.
        let table = unsafe { ffi::PyCapsule_GetPointer(table.as_ptr(), std::ptr::null()) };
        if table.is_null() {
            return Err(PyErr::fetch(py));
        }
        let table = table.cast::<*const c_void>();
        // SAFETY: every NumPy version for a supported Python has this function in its table.
        let version = unsafe {
            let version: unsafe extern "C" fn() -> c_uint = std::mem::transmute(*table.add(FEATURE_VERSION));
            version()
        };
        if version < WITH_HANDLERS {
            return Ok(None);
        }
        // SAFETY: tables of this feature version or a newer one have both functions. Their indices never change,
        // because NumPy only appends to the table.
        Ok(Some(unsafe {
            Self {
                set: std::mem::transmute::<*const c_void, SetHandler>(*table.add(SET_HANDLER)),
                get: std::mem::transmute::<*const c_void, GetHandler>(*table.add(GET_HANDLER)),
            }
        }))
    }

    /// Returns NumPy's default functions if the current context uses them. Returns `None` if it has another handler.
    fn default_functions(self, py: Python<'_>) -> PyResult<Option<Functions>> {
        // SAFETY: the GIL is held; the call returns a new reference or raises an error.
        let current = unsafe { Bound::from_owned_ptr_or_err(py, (self.get)())? };
        // SAFETY: the call raises an error unless the object is a capsule of this name.
        let handler = unsafe { ffi::PyCapsule_GetPointer(current.as_ptr(), CAPSULE.as_ptr()) };
        if handler.is_null() {
            return Err(PyErr::fetch(py));
        }
        // SAFETY: such a capsule holds a handler, which lives as long as the capsule. Its name is zero-terminated.
        let (name, handler) = unsafe {
            let handler = &*handler.cast::<Handler>();
            (CStr::from_ptr(handler.name.as_ptr()), handler)
        };
        Ok((name == DEFAULT && handler.version >= VERSION).then_some(handler.functions))
    }
}

/// The handler that allocates the memory of NumPy's arrays in a worker.
pub struct NumpyMemory {
    api: Api,
    capsule: Py<PyAny>,
}

impl NumpyMemory {
    /// Creates a handler. Returns `None` if NumPy is missing or older than 1.22, if the program has set a handler, or
    /// if forks cannot be watched. The handler is never freed, because arrays may outlive everything else.
    pub fn new(py: Python<'_>, port: &Arc<Port>) -> PyResult<Option<Self>> {
        let Ok(Some(api)) = Api::find(py) else { return Ok(None) };
        let Some(default) = api.default_functions(py)? else { return Ok(None) };
        if arrays::watch(port).is_err() {
            return Ok(None);
        }
        let (first, len) = (port.arena().region_base(port.worker()) as usize, port.arena().geometry().region_len);
        let context = Box::leak(Box::new(Context { port: port.clone(), first, len: len as usize, default }));
        let functions = Functions { ctx: std::ptr::from_mut(context).cast(), malloc, calloc, realloc, free };
        let mut handler = Box::new(Handler { name: [0; 127], version: VERSION, functions });
        for (to, from) in handler.name.iter_mut().zip(NAME.to_bytes()) {
            *to = *from as c_char;
        }
        // SAFETY: the handler is never freed; the name is static.
        let capsule =
            unsafe { ffi::PyCapsule_New(std::ptr::from_mut(Box::leak(handler)).cast(), CAPSULE.as_ptr(), None) };
        // SAFETY: the call returned a new reference or raised an error.
        let capsule = unsafe { Bound::from_owned_ptr_or_err(py, capsule)? }.unbind();
        Ok(Some(Self { api, capsule }))
    }

    /// Sets the handler in the current context, if NumPy's default handler is still set there.
    pub fn enter(&self, py: Python<'_>) -> PyResult<()> {
        if self.api.default_functions(py)?.is_none() {
            return Ok(());
        }
        // SAFETY: the argument is a handler's capsule, and the GIL is held. The call returns a new reference to the
        // previous handler, or raises an error.
        drop(unsafe { Bound::from_owned_ptr_or_err(py, (self.api.set)(self.capsule.as_ptr()))? });
        Ok(())
    }
}

impl Context {
    /// # Safety
    /// `ctx` must be that of a handler of this module.
    unsafe fn of<'a>(ctx: *mut c_void) -> &'a Self {
        // SAFETY: contexts are never freed.
        unsafe { &*ctx.cast_const().cast::<Self>() }
    }

    fn has(&self, memory: *mut c_void) -> bool {
        (memory as usize).wrapping_sub(self.first) < self.len
    }

    /// Allocates memory in the region. Returns `None` if NumPy's default function is to be used, and null if there is
    /// no memory; NumPy then raises a MemoryError.
    fn allocate(&self, len: usize, zeroed: bool) -> Option<*mut c_void> {
        if len < ARRAY_MIN {
            return None;
        }
        match self.port.allocate_array(len, zeroed) {
            Ok(memory) => memory.map(|memory| memory.as_ptr().cast()),
            Err(_) => Some(std::ptr::null_mut()),
        }
    }
}

// NumPy calls the following functions on any thread, usually with the GIL. It passes the context of this handler, and
// pointers that the functions have returned. The functions do not call Python, and panic only if the block table is
// damaged, which ends the process.

unsafe extern "C" fn malloc(ctx: *mut c_void, len: usize) -> *mut c_void {
    // SAFETY: see above.
    let context = unsafe { Context::of(ctx) };
    // SAFETY: NumPy's function is called with NumPy's context.
    context.allocate(len, false).unwrap_or_else(|| unsafe { (context.default.malloc)(context.default.ctx, len) })
}

unsafe extern "C" fn calloc(ctx: *mut c_void, count: usize, size: usize) -> *mut c_void {
    // SAFETY: see above.
    let context = unsafe { Context::of(ctx) };
    let memory = count.checked_mul(size).and_then(|len| context.allocate(len, true));
    // SAFETY: NumPy's function is called with NumPy's context.
    memory.unwrap_or_else(|| unsafe { (context.default.calloc)(context.default.ctx, count, size) })
}

unsafe extern "C" fn realloc(ctx: *mut c_void, memory: *mut c_void, len: usize) -> *mut c_void {
    // SAFETY: see above.
    let context = unsafe { Context::of(ctx) };
    let default = context.default;
    if !context.has(memory) {
        // SAFETY: NumPy's function is called with NumPy's context and memory.
        return unsafe { (default.realloc)(default.ctx, memory, len) };
    }
    let Resized::Move(old) = (match len < ARRAY_MIN {
        true => Resized::Move(context.port.array_len(memory.cast())),
        // SAFETY: NumPy resizes the array, so it no longer uses the bytes from `len` on.
        false => unsafe { context.port.resize_array(memory.cast(), len) },
    }) else {
        return memory;
    };
    // SAFETY: `ctx` is the context of this handler.
    let moved = unsafe { malloc(ctx, len) };
    if !moved.is_null() {
        // SAFETY: the old memory has `old` bytes and the new one `len`. Both live, and they do not overlap.
        // Nothing uses the old memory after the copy.
        unsafe {
            std::ptr::copy_nonoverlapping(memory.cast::<u8>(), moved.cast(), old.min(len));
            context.port.free_array(memory.cast());
        }
    }
    moved
}

unsafe extern "C" fn free(ctx: *mut c_void, memory: *mut c_void, len: usize) {
    // SAFETY: see above.
    let context = unsafe { Context::of(ctx) };
    if context.has(memory) {
        // SAFETY: NumPy frees the array.
        unsafe { context.port.free_array(memory.cast()) };
    } else {
        // SAFETY: NumPy's function is called with NumPy's context and memory.
        unsafe { (context.default.free)(context.default.ctx, memory, len) }
    }
}
