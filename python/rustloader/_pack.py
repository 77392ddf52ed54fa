"""Pickling of what is no plain tree of tensors, arrays and numbers.

The dispatch table is ForkingPickler's, so reducers that torch and users registered there are honoured. Only
those of plain CPU tensors, plain arrays and CPU storages are ours. A batch's pickle holds tokens in their place; they
travel beside it (protocol 5) through the codec, which knows what they share and how little of their storages
they show. What torch's other reducers make of a tensor ends in a storage, which travels as the tensor of its bytes.
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

from rustloader._core import INLINE_LIMIT, is_plain_leaf

__all__ = ["dump_index", "dumps", "dumps_alone", "load_index", "loads"]

_extra_reducers: dict[type, Callable[[Any], Any]] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]

# One reducer for each type in `_TORCHS`.
_Reducers = dict[type, Callable[[Any], Any]]

# The reducers, or none, that ours stand in for; somebody else's is left alone.
_TORCHS: dict[type, Callable[[Any], Any] | None] = {
    torch.UntypedStorage: reductions.reduce_storage,
    torch.Tensor: reductions.reduce_tensor,
    torch.nn.Parameter: reductions.reduce_tensor,
    np.ndarray: None,
}


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    # torch's reducer drops both bits, and the values arrive wrong.
    if tensor.layout == torch.strided and (tensor.is_conj() or tensor.is_neg()):
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_quantized:
        # torch's reducer for other processes loses the quantizer; the one for files keeps it.
        return tensor._reduce_ex_internal(2)
    return reductions.reduce_tensor(tensor)


def _reduce_array(array: np.ndarray) -> Any:
    if array.nbytes < INLINE_LIMIT:
        # Protocol 5 would make it a view on a buffer; as from torch's loader it owns its memory.
        return array.__reduce_ex__(4)
    # A read-only buffer would arrive read-only; torch's loader delivers arrays that can be written to.
    return (array if array.flags.writeable else array.copy(order="K")).__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _rebuild_storage(buffer: Any) -> torch.UntypedStorage:
    if len(buffer) == 0:
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    if storage.device.type != "cpu":
        return reductions.reduce_storage(storage)
    return _rebuild_storage, (pickle.PickleBuffer(_bytes_of(storage).numpy()),)  # type: ignore[arg-type]


# With everything in the pickle itself.
_ALONE: _Reducers = {
    torch.UntypedStorage: _reduce_storage,
    torch.Tensor: _reduce_tensor,
    torch.nn.Parameter: _reduce_tensor,
    np.ndarray: _reduce_array,
}


def _beside(obj: Any) -> Any:
    return obj


def _storage_beside(content: torch.Tensor) -> torch.UntypedStorage:
    storage = content.untyped_storage()
    if storage.nbytes() != content.numel():  # it came inside of a larger one
        storage = content.clone().untyped_storage()
    return storage


def _rebuild_leaf(cls: type, tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    if cls is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


class _Beside:
    """The objects that travel beside a pickle, in the order of their tokens.

    A token is a buffer of one writable byte that the pickler takes for a large one; ``pickle.loads`` puts whatever
    it is given in its place.
    """

    def __init__(self, views: bool) -> None:
        self.objects: list[Any] = []
        self._waiting: dict[int, Any] = {}
        self._views = views

    def reducers(self) -> _Reducers:
        return {
            torch.UntypedStorage: self._reduce_storage,
            torch.Tensor: self._reduce_tensor,
            torch.nn.Parameter: self._reduce_tensor,
            np.ndarray: self._reduce_array,
        }

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """The pickler's callback: False for what does not lie in the pickle."""
        token = id(buffer)
        if token in self._waiting:
            self.objects.append(self._waiting.pop(token))
            return False
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous
            return True
        if raw.nbytes < INLINE_LIMIT:
            return True
        self.objects.append(np.frombuffer(raw, np.uint8))
        return False

    def _token(self, rebuild: Callable[..., Any], obj: Any) -> Any:
        token = pickle.PickleBuffer(bytearray(1))
        self._waiting[id(token)] = obj
        return rebuild, (token,)

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type != "cpu":
            return reductions.reduce_storage(storage)
        return self._token(_storage_beside, _bytes_of(storage))

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if self._views:
            if is_plain_leaf(tensor):
                return self._token(_beside, tensor)
            # What torch's reducer keeps of such a tensor is its class and this one bit.
            if tensor.requires_grad and tensor.is_leaf:
                content = tensor.detach()
                if is_plain_leaf(content):
                    torch.utils.hooks.warn_if_has_hooks(tensor)
                    return _rebuild_leaf, (type(tensor), content, True)
            elif type(tensor) is torch.nn.Parameter:
                content = tensor.detach()
                if is_plain_leaf(content):
                    return _rebuild_leaf, (type(tensor), content, False)
        return _reduce_tensor(tensor)

    def _reduce_array(self, array: np.ndarray) -> Any:
        return self._token(_beside, array) if is_plain_leaf(array) else _reduce_array(array)


def _pickle(value: Any, reducers: _Reducers, callback: Callable[[pickle.PickleBuffer], Any] | None) -> bytes:
    table = {**copyreg.dispatch_table, **_extra_reducers}
    table.update({kind: ours for kind, ours in reducers.items() if table.get(kind) is _TORCHS[kind]})
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=5, buffer_callback=callback)
    pickler.dispatch_table = table
    pickler.dump(value)
    return out.getvalue()


def dumps(value: Any, *, views: bool = True) -> tuple[bytes, list[Any]]:
    """The pickle of a batch, and the tensors and arrays that travel beside it.

    Args:
        value: the batch.
        views: whether tensors travel as views. False: as whole storages, which always works.
    """
    beside = _Beside(views)
    return _pickle(value, beside.reducers(), beside.take), beside.objects


def loads(payload: bytes, objects: Sequence[Any]) -> Any:
    """What :func:`dumps` has pickled."""
    return pickle.loads(payload, buffers=objects)


def dumps_alone(value: Any) -> bytes:
    """The pickle of an error."""
    return _pickle(value, _ALONE, None)


def dump_index(index: Any) -> bytes:
    """The pickle of an index batch."""
    return _pickle(index, _ALONE, None)


def load_index(payload: bytes) -> Any:
    """What :func:`dump_index` has pickled."""
    return pickle.loads(payload)
