"""Operations on NumPy arrays."""

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from roundtrip import objects
from roundtrip.build_tensors import noise

__all__ = ["ARRAY_DTYPES", "OPERATIONS"]

RECORD = [("a", "i1"), ("b", ">f8", (2,)), ("c", "U3"), ("d", [("e", "f4")])]
# {name: argument of np.dtype}, the plain ones first.
ARRAY_DTYPES = {
    **{name: name for name in "float32 int64 uint8 bool int8 int16 int32 uint16 uint32 uint64".split()},
    **{name: name for name in "float16 float64 complex64 complex128 longdouble clongdouble".split()},
    **{name: name for name in ">i4 >f8 >c16 S5 U3 >U2 M8[ns] >M8[D] m8[s] V7 longlong".split()},
    "record": RECORD,
    "aligned": np.dtype({"names": ["a", "b"], "formats": ["i1", "f8"]}, align=True),
    "titled": [(("title", "a"), "i2"), ("b", "S2")],
    "metadata": np.dtype("f8", metadata={"unit": "m"}),
}


def array(dtype, shape, seed, order="C"):
    """Random bits; valid values for bools, strings, records and long doubles."""
    kind = np.dtype(ARRAY_DTYPES[dtype])
    count = int(np.prod(shape, dtype=np.int64))
    raw = noise(count * kind.itemsize, seed)
    if kind == np.bool_:
        raw = raw & 1
    if kind.kind in "USV":
        raw = np.frombuffer((raw % 50 + 65).tobytes(), np.uint8)
    if kind.kind == "U" or kind.names:
        result = np.zeros(count, kind)
        for name in kind.names or [None]:
            target = result if name is None else result[name]
            target[...] = np.array("ab") if target.dtype.kind in "US" else 3
    elif kind.char in "gG":
        result = noise(count, seed).astype(kind)  # ten of the sixteen bytes hold the value
    else:
        result = np.frombuffer(bytearray(raw), kind) if count else np.zeros(0, kind)
    result = np.array(result.reshape(shape), order=order)
    if kind.char in "gG":  # the other six are undefined
        result.ravel(order="K").view(np.uint8).reshape(-1, 16)[:, 10:] = 0
    return result


def of_objects(*values):
    result = np.empty(len(values), object)
    result[:] = [None] * len(values)
    for i, value in enumerate(values):
        result[i] = value
    return result


def record_of_objects(first, second):
    result = np.zeros(2, [("o", object), ("n", "i4")])
    result["o"][0], result["o"][1] = first, second
    return result


def cut(a, axis, start, stop, step):
    """A slice whose step may be negative."""
    axis %= a.ndim
    step = step % 7 - 3 or 1
    start, stop = start % (a.shape[axis] + 1), stop % (a.shape[axis] + 1)
    ends = slice(start or None, stop or None, step) if step > 0 else slice(None, None, step)
    return a[(slice(None),) * axis + (ends,)]


def frozen(a):
    view = a.view()
    view.setflags(write=False)
    return view


def masked(a, seed, hard):
    result = np.ma.masked_array(a, mask=(noise(a.size, seed) & 1).astype(bool).reshape(a.shape))
    if hard:
        result.harden_mask()
    return result


def noted(a, note):
    result = a.view(objects.FrozenArray)
    result.note = note and [note]
    return result


def unaligned(dtype, n, seed):
    kind = np.dtype(ARRAY_DTYPES[dtype])
    return np.frombuffer(bytearray(noise(n * kind.itemsize + 1, seed)), np.uint8)[1:].view(kind)


def memmap(n):
    return np.memmap(__file__, mode="c", shape=(n,))


def from_buffer(a):
    if a.dtype.hasobject or a.dtype.isalignedstruct:
        raise TypeError("references and padding differ between processes")
    return torch.frombuffer(a, dtype=torch.uint8)


OPERATIONS = {
    "array": array,
    "of_objects": of_objects,
    "record_of_objects": record_of_objects,
    "array_cut": cut,
    "array_transpose": lambda a, seed: a.transpose(np.random.default_rng(seed).permutation(a.ndim)),
    "array_fortran": np.asfortranarray,
    "array_broadcast": lambda a, n: np.broadcast_to(a, (n, *a.shape)),
    "array_windows": lambda a: sliding_window_view(a.reshape(-1), 2),
    "array_overlap": lambda a: sliding_window_view(a.reshape(-1), 2, writeable=True)[::2],
    "array_field": lambda a: a[a.dtype.names[-1]],
    "array_frozen": frozen,
    "array_bytes": lambda n: np.frombuffer(bytes(n), np.uint8),
    "array_view": lambda a: a[...],
    "array_item": lambda a: a.reshape(-1)[-1],
    "array_flat": lambda a: a.reshape(-1),
    "array_swapped": lambda a: a.view(a.dtype.newbyteorder()),
    "masked": masked,
    "noted": noted,
    "subclass": lambda a: a.view(objects.Array),
    "matrix": lambda a: np.asmatrix(a.reshape(1, -1)),
    "recarray": lambda a: a.view(np.recarray),
    "chararray": lambda a: a.view(np.char.chararray),
    "unaligned": unaligned,
    "memmap": memmap,
    "from_numpy": torch.from_numpy,
    "from_buffer": from_buffer,
}
