"""Estimates the memory of a dataset's attributes, including the data of arrays and tensors unless the data is shared.

`metrics.copied` counts only the Python objects that a forked worker copies as it reads them, and has to be faster.
"""

from __future__ import annotations

import mmap
import pickle
import sys
from collections import deque
from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from rustloader.sharing.arrays import SharedTensor
from rustloader.sharing.pickling import data_of
from rustloader.sharing.sequences import SharedDict, SharedList, SharedTuple

# Maximum number of items of a container that are measured, by level: the outermost container, containers inside it, and
# so on.
_ITEMS_BY_LEVEL = (200, 32, 8, 2)
# Maximum number of items that are pickled to find common objects, and size in bytes above which pickling stops.
_ITEMS_PICKLED = 8
_MAX_PICKLE = 16 << 20
# Allowance in bytes for the names of classes in pickles.
_NAMES_ALLOWANCE = 4096


def sampled(container: Any, limit: int = _ITEMS_BY_LEVEL[0]) -> list[Any]:
    """Returns up to ``limit`` items of a container, or for a dict up to ``limit`` keys and their values."""
    if isinstance(container, dict):
        return list(chain.from_iterable(islice(container.items(), limit)))
    if isinstance(container, (set, frozenset)):
        return list(islice(container, limit))
    if len(container) <= limit:
        return list(container)
    return [container[number * len(container) // limit] for number in range(limit)]


def size_of(value: Any, level: int = 0) -> int:
    """Estimates the bytes of a value that are not in shared memory, and of which another process would get a copy.
    Measures only a few items of a large container.
    """
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return 0 if is_shared(value) else int(value.nbytes)
    if isinstance(value, (SharedList, SharedTuple, SharedDict)):
        return 0
    own = sys.getsizeof(value, 64)
    if level == len(_ITEMS_BY_LEVEL):
        return own
    if isinstance(value, (list, tuple, dict, set, frozenset, deque)):
        items: Iterable[Any] = sampled(value, _ITEMS_BY_LEVEL[level])
        measured = min(len(value), _ITEMS_BY_LEVEL[level])
        return own + sum(size_of(item, level + 1) for item in items) * len(value) // max(measured, 1)
    state = getattr(value, "__dict__", None)
    return own if type(state) is not dict or isinstance(value, type) else own + size_of(state, level + 1)


def is_shared(value: np.ndarray | torch.Tensor) -> bool:
    """Returns True if all processes already share the memory of an array or tensor: it is shared memory, or a mapped
    file. Also returns True for tensors that ``share`` does not support: those on a device, or not strided."""
    if isinstance(value, SharedTensor):
        return True
    if isinstance(value, torch.Tensor):
        return value.device.type != "cpu" or value.layout != torch.strided or value.is_shared()
    base = value.base
    while isinstance(base, np.ndarray):
        base = base.base
    return data_of(value) is not None or isinstance(getattr(base, "obj", base), mmap.mmap)


class _Counter:
    """A file object that only counts the bytes of a pickle. Raises OverflowError above ``_MAX_PICKLE`` bytes."""

    def __init__(self) -> None:
        self.nbytes = 0

    def write(self, data: Any) -> int:
        self.nbytes += len(memoryview(data))
        if self.nbytes > _MAX_PICKLE:
            raise OverflowError(f"an item takes more than {_MAX_PICKLE} bytes as a pickle")
        return len(data)


def _pickled_size(value: Any) -> int:
    counter = _Counter()
    pickle.Pickler(counter, protocol=5).dump(value)
    return counter.nbytes


def check_items(container: Any) -> None:
    """Checks that the items of a container can be pickled one by one.

    Raises:
        ValueError: The items refer to common objects, and each item would get a copy of those objects.
    """
    plain = (str, bytes, int, float, np.ndarray, torch.Tensor)
    items = [item for item in sampled(container, _ITEMS_PICKLED) if not isinstance(item, plain)]
    if sum(map(_pickled_size, items)) > 2 * _pickled_size(items) + _NAMES_ALLOWANCE:
        raise ValueError("its items refer to common objects, and each item would get a copy of them")
