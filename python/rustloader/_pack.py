"""Pickling of what is no plain tree of tensors, arrays and numbers.

The dispatch table is ForkingPickler's, so reducers that torch and users registered there are honoured. Only
the reducer of CPU storages is ours: its bytes travel out of band (protocol 5), into a block of the arena, instead of
through a shared-memory file and its descriptor. torch's tensor reducers run unchanged on top of it.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.multiprocessing import reductions

from rustloader._core import INLINE_LIMIT, LeaseBuffer

__all__ = ["dump_index", "dumps", "load_index", "loads"]

_extra_reducers: dict[type, Callable[[Any], Any]] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]


def _rebuild_storage(buffer: Any) -> torch.UntypedStorage:
    if isinstance(buffer, LeaseBuffer):
        return buffer.storage()
    if len(buffer) == 0:
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    if storage.device.type != "cpu":
        return reductions.reduce_storage(storage)
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    return _rebuild_storage, (pickle.PickleBuffer(flat.numpy()),)  # type: ignore[arg-type]


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    # torch's reducer drops both bits, and the values arrive wrong.
    if tensor.layout == torch.strided and (tensor.is_conj() or tensor.is_neg()):
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_quantized:
        # torch's reducer for other processes loses the quantizer; the one for files keeps it.
        return tensor._reduce_ex_internal(2)
    return reductions.reduce_tensor(tensor)


def _reduce_array(array: np.ndarray) -> Any:
    # A read-only buffer would arrive read-only; torch's loader delivers arrays that can be written to.
    return (array if array.flags.writeable else array.copy(order="K")).__reduce_ex__(pickle.HIGHEST_PROTOCOL)


# Our reducers and, where there is one, torch's that each stands in for; somebody else's is left alone.
_OURS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any] | None]] = {
    torch.UntypedStorage: (_reduce_storage, reductions.reduce_storage),
    torch.Tensor: (_reduce_tensor, reductions.reduce_tensor),
    np.ndarray: (_reduce_array, None),
}


def _dispatch_table() -> dict[type, Callable[[Any], Any]]:
    table = {**copyreg.dispatch_table, **_extra_reducers}
    for kind, (ours, torchs) in _OURS.items():
        if table.get(kind) is torchs:
            table[kind] = ours
    return table


def _pickle(value: Any, callback: Callable[[pickle.PickleBuffer], Any] | None) -> bytes:
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=5, buffer_callback=callback)
    pickler.dispatch_table = _dispatch_table()
    pickler.dump(value)
    return out.getvalue()


def dumps(value: Any) -> tuple[bytes, list[memoryview]]:
    """The pickle of a batch, and the buffers of at least ``INLINE_LIMIT`` bytes that travel beside it."""
    buffers: list[memoryview] = []

    def in_band(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous
            return True
        if raw.nbytes < INLINE_LIMIT:
            return True
        buffers.append(raw)
        return False

    return _pickle(value, in_band), buffers


def loads(payload: bytes, buffers: Sequence[LeaseBuffer]) -> Any:
    """What :func:`dumps` has pickled; the memory of large storages and arrays is that of ``buffers``."""
    return pickle.loads(payload, buffers=buffers)


def dump_index(index: Any) -> bytes:
    """The pickle of an index batch."""
    return _pickle(index, None)


def load_index(payload: bytes) -> Any:
    """What :func:`dump_index` has pickled."""
    return pickle.loads(payload)
