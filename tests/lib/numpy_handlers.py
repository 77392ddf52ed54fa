"""NumPy's memory handlers, through its C API."""

import ctypes

try:
    from numpy._core import _multiarray_umath, multiarray
except ImportError:  # NumPy 1
    from numpy.core import _multiarray_umath, multiarray

handler_name = multiarray.get_handler_name

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.argtypes, _capsule.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object

SET, GET = 304, 305
SIZE_OF_HANDLER = 127 + 1 + 5 * 8
CAPSULE = b"mem_handler"

# References to the handlers of this module, which are never freed.
_kept = []


def _table():
    table = _pointer(_multiarray_umath._ARRAY_API, None)
    return ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))


def set_handler(name):
    """Sets a handler with this name that uses the functions of the previous handler."""
    get = ctypes.PYFUNCTYPE(ctypes.py_object)(_table()[GET])
    put = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(_table()[SET])
    handler = ctypes.create_string_buffer(ctypes.string_at(_pointer(get(), CAPSULE), SIZE_OF_HANDLER), SIZE_OF_HANDLER)
    ctypes.memmove(handler, name.encode().ljust(127, b"\0"), 127)
    _kept.append(handler)
    put(_capsule(ctypes.addressof(handler), CAPSULE, None))
