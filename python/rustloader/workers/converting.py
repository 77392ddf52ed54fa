"""A variant of default_convert that makes no tensors from arrays in shared memory. An array may be sent without a copy
only if nothing else refers to its memory, and a tensor would hide the array and with it any other references."""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate

from rustloader._core import ArrayTensor, Port
from rustloader.system.torch_side import is_defined_in

_default_convert: Any = collate.default_convert
_as_tensor: Any = torch.as_tensor
# Types whose values default_convert returns unchanged.
_UNCHANGED = frozenset((bool, int, float, complex, str, bytes, type(None), torch.Tensor))


def is_torchs_own(collate_fn: Any) -> bool:
    """Returns True if a ``collate_fn`` is torch's own default_convert, and the program has not changed it."""
    return (
        collate_fn is _default_convert
        and collate.default_convert is _default_convert
        and is_defined_in(_default_convert, collate)
        and type(_as_tensor) is BuiltinFunctionType
    )


def converter(port: Port) -> Callable[[Any], Any]:
    """Returns a function that works like default_convert, but returns an ``ArrayTensor`` instead of a tensor over an
    array in ``port``'s region. :func:`tensors_of` makes the tensors.
    """

    def convert(data: Any) -> Any:
        kind = type(data)
        if kind in _UNCHANGED:
            return data
        if kind is np.ndarray:
            array_tensor = port.array_tensor(data) if torch.as_tensor is _as_tensor else None
            return _default_convert(data) if array_tensor is None else array_tensor
        if kind is list or kind is tuple:
            return [convert(item) for item in data]
        if kind is dict:
            return {key: convert(data[key]) for key in data}
        return _default_convert(data)

    def convert_or_raise_as_torch(data: Any) -> Any:
        try:
            return convert(data)
        except Exception:
            pass
        # Raises the same error, with torch's frames in its traceback.
        return _default_convert(data)

    return convert_or_raise_as_torch


def tensors_of(batch: Any) -> Any:
    """Returns a batch from :func:`converter` with each ``ArrayTensor`` replaced by its tensor, or the same object if it
    has none."""
    kind = type(batch)
    if kind is ArrayTensor:
        return batch.tensor()
    if kind is list:
        items = [tensors_of(item) for item in batch]
        return items if any(tensor is not item for tensor, item in zip(items, batch, strict=True)) else batch
    if kind is dict:
        values = {key: tensors_of(value) for key, value in batch.items()}
        return values if any(values[key] is not value for key, value in batch.items()) else batch
    return batch


def kind_of(batch: Any) -> type:
    """Returns the type that a batch from :func:`converter` has after :func:`tensors_of`."""
    kind = type(batch)
    return torch.Tensor if kind is ArrayTensor else kind
