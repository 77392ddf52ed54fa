"""Comparison of two samples, and of the samples in a file with those of a dataset."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import torch

from rustloader._core import CacheTable
from rustloader.sharing.pickling import dumps
from rustloader.system.generators import GeneratorStates

# Samples of a file that are made again when it is opened.
_SAMPLES_COMPARED = 2
_MISSING = object()


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
    """Returns a row whose sample in the table is not the one that the dataset makes; None if those that are compared
    are equal. Making them leaves the generators as they were, and an error is left for later.
    """
    generators = GeneratorStates()
    try:
        for row in table.some_rows(_SAMPLES_COMPARED):
            kept = table.get(row, _MISSING)
            if kept is not _MISSING and not are_equal(kept, dataset[row]):
                return row
    except Exception:
        return None
    finally:
        generators.restore()
    return None
