"""Compares two samples, and the samples in a file with those of a dataset."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import torch

from rustloader._core import CacheTable
from rustloader.sharing.pickling import dumps
from rustloader.system.generators import GeneratorStates

# Number of samples of a file that are made again, for comparison, when the file is opened.
_SAMPLES_COMPARED = 2
_MISSING = object()


class _ContentPickler(pickle.Pickler):
    """A pickler that pickles tensors by their elements, because torch's pickles of storages contain addresses."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            dense = obj.detach().as_subclass(torch.Tensor)
            dense = dense.to_dense() if dense.layout != torch.strided else dense
            dense = dense.int_repr() if dense.is_quantized else dense
            numbers = dense.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            return _stand_in, (type(obj).__name__, str(obj.dtype), tuple(obj.shape), numbers.numpy().tobytes())
        if isinstance(obj, (torch.UntypedStorage, torch.storage.TypedStorage)):
            return _stand_in, ("storage", bytes(obj.tolist()))
        if type(obj) is np.ndarray and obj.dtype != object:
            return _stand_in, ("array", obj.dtype.str, obj.shape, obj.tobytes())
        return NotImplemented


def _stand_in(*parts: Any) -> Any:
    """Returns the parts that stand for a tensor or array in a pickle. Such pickles are compared and never loaded."""
    return parts


def _content(sample: Any) -> bytes:
    out = io.BytesIO()
    _ContentPickler(out, protocol=5).dump(sample)
    return out.getvalue()


def are_equal(sample: Any, again: Any) -> bool:
    """Returns True if two samples have the same type and content, or if that cannot be determined."""
    if type(sample) is not type(again):
        return False
    try:
        if _content(sample) == _content(again):
            return True
        # Pickles of equal objects can differ, because they record which parts are the same object. So copies made by
        # unpickling are compared. If even two copies of one sample differ, nothing can be determined.
        first, repeated, second = (_content(pickle.loads(dumps(obj))) for obj in (sample, sample, again))
        return first == second or first != repeated
    except Exception:
        return True


def first_difference(table: CacheTable, dataset: Any) -> int | None:
    """Makes some samples of the table again and returns a row whose sample differs, or None. Restores the random number
    generators afterwards. Ignores errors of the dataset, because a later access raises them.
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
