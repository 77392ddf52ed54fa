//! Functions of libraries that the process has already loaded.

use std::ffi::CStr;

/// Returns the address of `symbol` in the library with the soname `library`; `None` if the library is not loaded or
/// lacks the symbol. The address is valid while the library is loaded; the libraries of a Python extension stay loaded
/// until the process ends.
pub fn find(library: &CStr, symbol: &CStr) -> Option<*mut libc::c_void> {
    // SAFETY: both are C strings; RTLD_NOLOAD loads nothing and runs no code.
    let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
    if handle.is_null() {
        return None;
    }
    // SAFETY: `handle` was just opened and is never closed.
    let address = unsafe { libc::dlsym(handle, symbol.as_ptr()) };
    (!address.is_null()).then_some(address)
}
