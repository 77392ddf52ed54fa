"""Operations on NumPy arrays."""

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from roundtrip import objects
from roundtrip.build_tensors import noise

__all__ = ["ARRAY_DTYPES", "OPERATIONS"]

RECORD = [("a", "i1"), ("b", ">f8", (2,)), ("c", "U3"), ("d", [("e", "f4")])]
# By what np.dtype takes: the plain ones first.
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
    """Random bits; texts and times are made so that they are valid."""
    kind = np.dtype(ARRAY_DTYPES[dtype])
    count = int(np.prod(shape, dtype=np.int64))
    raw = noise(count * kind.itemsize, seed)
    if kind == np.bool_:
        raw = raw & 1
    if kind.kind in "USV":
        raw = np.frombuffer((raw % 50 + 65).tobytes(), np.uint8)
    if kind.kind == "U" or kind.names:
        made = np.zeros(count, kind)
        for name in kind.names or [None]:
            target = made if name is None else made[name]
            target[...] = np.array("ab") if target.dtype.kind in "US" else 3
    elif kind.char in "gG":
        made = noise(count, seed).astype(kind)  # ten bytes of sixteen count
    else:
        made = np.frombuffer(bytearray(raw), kind) if count else np.zeros(0, kind)
    made = np.array(made.reshape(shape), order=order)
    if kind.char in "gG":  # the other six hold whatever was there
        made.ravel(order="K").view(np.uint8).reshape(-1, 16)[:, 10:] = 0
    return made


def of_objects(*values):
    made = np.empty(len(values), object)
    made[:] = [None] * len(values)
    for i, value in enumerate(values):
        made[i] = value
    return made


def record_of_objects(first, second):
    made = np.zeros(2, [("o", object), ("n", "i4")])
    made["o"][0], made["o"][1] = first, second
    return made


def cut(a, axis, start, stop, step):
    """A slice whose step may go backwards."""
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
    made = np.ma.masked_array(a, mask=(noise(a.size, seed) & 1).astype(bool).reshape(a.shape))
    if hard:
        made.harden_mask()
    return made


def noted(a, note):
    made = a.view(objects.FrozenArray)
    made.note = note and [note]
    return made


def unaligned(dtype, n, seed):
    kind = np.dtype(ARRAY_DTYPES[dtype])
    return np.frombuffer(bytearray(noise(n * kind.itemsize + 1, seed)), np.uint8)[1:].view(kind)


def memmap(n):
    return np.memmap(__file__, mode="c", shape=(n,))


def from_buffer(a):
    if a.dtype.hasobject or a.dtype.isalignedstruct:
        raise TypeError("references and gaps are different in each process")
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
