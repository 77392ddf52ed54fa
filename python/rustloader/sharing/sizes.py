"""Estimates the memory of a dataset's attributes, with the data of arrays and tensors unless it is shared.

`metrics.copied` looks for less, the Python objects that a forked worker copies as it reads them, and has less time.
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

# Items of a container that are measured: of the outermost one, of those in it, and so on.
_SAMPLED = (200, 32, 8, 2)
# Number of items that are pickled to find their common parts, and bytes of pickles above which these are not sought.
_PICKLED = 8
_LARGEST_PICKLE = 16 << 20
# Bytes of pickles that the names of classes may take.
_NAMES = 4096


def sampled(container: Any, most: int = _SAMPLED[0]) -> list[Any]:
    """Returns up to ``most`` items of a container, of a dict as many keys and values."""
    if isinstance(container, dict):
        return list(chain.from_iterable(islice(container.items(), most)))
    if isinstance(container, (set, frozenset)):
        return list(islice(container, most))
    if len(container) <= most:
        return list(container)
    return [container[place * len(container) // most] for place in range(most)]


def size_of(value: Any, level: int = 0) -> int:
    """Estimates the bytes that only copies give to another process: of a large container, a few items are
    measured.
    """
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return 0 if is_shared(value) else int(value.nbytes)
    if isinstance(value, (SharedList, SharedTuple, SharedDict)):
        return 0
    own = sys.getsizeof(value, 64)
    if level == len(_SAMPLED):
        return own
    if isinstance(value, (list, tuple, dict, set, frozenset, deque)):
        items: Iterable[Any] = sampled(value, _SAMPLED[level])
        few = min(len(value), _SAMPLED[level])
        return own + sum(size_of(item, level + 1) for item in items) * len(value) // max(few, 1)
    state = getattr(value, "__dict__", None)
    return own if type(state) is not dict or isinstance(value, type) else own + size_of(state, level + 1)


def is_shared(value: np.ndarray | torch.Tensor) -> bool:
    """Returns True if the memory of an array or a tensor is one for all processes already: shared, or a file's."""
    if isinstance(value, SharedTensor):
        return True
    if isinstance(value, torch.Tensor):
        return value.device.type != "cpu" or value.layout != torch.strided or value.is_shared()
    base = value.base
    while isinstance(base, np.ndarray):
        base = base.base
    return data_of(value) is not None or isinstance(getattr(base, "obj", base), mmap.mmap)


class _Counter:
    """A file that counts the bytes of a pickle."""

    def __init__(self) -> None:
        self.nbytes = 0

    def write(self, data: Any) -> int:
        self.nbytes += len(memoryview(data))
        if self.nbytes > _LARGEST_PICKLE:
            raise OverflowError(f"an item takes more than {_LARGEST_PICKLE} bytes as a pickle")
        return len(data)


def _pickled(value: Any) -> int:
    counter = _Counter()
    pickle.Pickler(counter, protocol=5).dump(value)
    return counter.nbytes


def check_items(container: Any) -> None:
    """Checks that the items of a container can be pickled one by one.

    Raises:
        ValueError: They hold common objects, of which each item would get a copy.
    """
    plain = (str, bytes, int, float, np.ndarray, torch.Tensor)
    items = [item for item in sampled(container, _PICKLED) if not isinstance(item, plain)]
    if sum(map(_pickled, items)) > 2 * _pickled(items) + _NAMES:
        raise ValueError("its items hold common objects, and each item would get a copy of them")
