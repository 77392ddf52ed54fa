"""Comparison of two samples, and of the samples in a file with those of a dataset."""

from __future__ import annotations

import ctypes
import io
import pickle
import random
import sys
from typing import Any

import numpy as np
import torch

from rustloader._core import CacheTable
from rustloader.sharing.pickling import dumps

# Samples of a file that are made again when it is opened.
_COMPARED = 2
_MISSING = object()


class Generators:
    """The states of the global random number generators."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._torch = torch.default_generator.get_state()
        self._numpy = _NumPyState.now()

    def restore(self) -> None:
        random.setstate(self._python)
        torch.default_generator.set_state(self._torch)
        if self._numpy is not None:
            self._numpy.restore()


class _NumPyState:
    """The state of NumPy's global generator.

    Reading or setting it takes 50 us. So it is not read again while its words in memory are still those that were read
    last, nor set while they are those that it would be set to. A normal number may be left over from a pair, and is not
    among these words. A state with one is always read and set.
    """

    _last: _NumPyState | None = None

    def __init__(self, numpy_random: Any, words: bytes | None) -> None:
        self._random, state = numpy_random, numpy_random.get_state(legacy=False)
        self._words, self._state = None if state["has_gauss"] else words, state

    @classmethod
    def now(cls) -> _NumPyState | None:
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is None:
            return None
        words = _words(numpy_random)
        if cls._last is None or words is None or cls._last._words != words:
            cls._last = cls(numpy_random, words)
        return cls._last

    def restore(self) -> None:
        if self._words is None or _words(self._random) != self._words:
            self._random.set_state(self._state)


def _words(numpy_random: Any) -> bytes | None:
    """The words of an MT19937, and its position; None for another generator."""
    if not hasattr(numpy_random, "get_bit_generator"):
        return None
    bit_generator: Any = numpy_random.get_bit_generator()
    if type(bit_generator) is not numpy_random.MT19937:
        return None
    return ctypes.string_at(bit_generator.ctypes.state_address, 625 * 4)


class _Content(pickle.Pickler):
    """Pickles tensors by their elements: torch's pickles of storages hold addresses."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            dense = obj.detach().as_subclass(torch.Tensor)
            dense = dense.to_dense() if dense.layout != torch.strided else dense
            dense = dense.int_repr() if dense.is_quantized else dense
            numbers = dense.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            return _described, (type(obj).__name__, str(obj.dtype), tuple(obj.shape), numbers.numpy().tobytes())
        if isinstance(obj, (torch.UntypedStorage, torch.storage.TypedStorage)):
            return _described, ("storage", bytes(obj.tolist()))
        if type(obj) is np.ndarray and obj.dtype != object:
            return _described, ("array", obj.dtype.str, obj.shape, obj.tobytes())
        return NotImplemented


def _described(*parts: Any) -> Any:
    """Returns the parts that stand for a tensor in a pickle that is only compared."""
    return parts


def _content(sample: Any) -> bytes:
    out = io.BytesIO()
    _Content(out, protocol=5).dump(sample)
    return out.getvalue()


def are_equal(sample: Any, again: Any) -> bool:
    """Returns True if two samples have the same type and content, or if that cannot be determined."""
    if type(sample) is not type(again):
        return False
    try:
        if _content(sample) == _content(again):
            return True
        # Pickles of equal objects can differ in which parts are the same object. Those of their copies do not.
        first, other, second = (_content(pickle.loads(dumps(it))) for it in (sample, sample, again))
        return first == second or first != other
    except Exception:
        return True


def first_difference(table: CacheTable, dataset: Any) -> int | None:
    """A row whose sample in the table is not the one that the dataset makes; None if those that are compared are equal.
    Making them leaves the generators as they were, and an error is left for later."""
    generators = Generators()
    try:
        for row in table.some_rows(_COMPARED):
            kept = table.get(row, _MISSING)
            if kept is not _MISSING and not are_equal(kept, dataset[row]):
                return row
    except Exception:
        return None
    finally:
        generators.restore()
    return None
