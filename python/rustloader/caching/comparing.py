"""Compares two samples, and a sample in a file with that of a dataset."""

from __future__ import annotations

import enum
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rustloader.sharing.pickling import dumps
from rustloader.system.generators import GeneratorStates

logger = logging.getLogger("rustloader")

# Number of times that a sample that differs is made again, to find out whether the dataset is random.
_ATTEMPTS = 8


class _ContentPickler(pickle.Pickler):
    """A pickler that pickles tensors by their elements and attributes.

    torch's own pickles of storages contain addresses.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            dense = obj.detach().as_subclass(torch.Tensor)
            dense = dense.to_dense() if dense.layout != torch.strided else dense
            dense = dense.int_repr() if dense.is_quantized else dense
            numbers = dense.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            kind = (type(obj).__name__, str(obj.dtype), tuple(obj.shape))
            return _stand_in, (*kind, numbers.numpy().tobytes(), vars(obj))
        if isinstance(obj, (torch.UntypedStorage, torch.storage.TypedStorage)):
            return _stand_in, ("storage", bytes(obj.tolist()))
        if type(obj) is np.ndarray and not obj.dtype.hasobject:
            return _stand_in, ("array", str(obj.dtype), obj.shape, obj.flags.writeable, obj.tobytes())
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


class Outcome(enum.Enum):
    """The outcome of a comparison of a kept sample with one that the dataset makes."""

    EQUAL = enum.auto()
    # The sample differs each time it is made.
    RANDOM = enum.auto()
    # The sample is the same each time it is made, but the kept one differs.
    OTHER = enum.auto()


def compare(kept: Any, make: Callable[[], Any], made: Any = None) -> Outcome:
    """Compares a kept sample with one that the dataset makes, or has just ``made``. Restores the random number
    generators afterwards. Errors of the dataset count as equal samples: a later access raises them.
    """
    generators = GeneratorStates()
    try:
        made = make() if made is None else made
        if are_equal(kept, made):
            return Outcome.EQUAL
        is_random = any(not are_equal(made, make()) for _ in range(_ATTEMPTS))
        return Outcome.RANDOM if is_random else Outcome.OTHER
    except Exception as error:
        logger.debug("cache(): a sample cannot be made again: %r", error)
        return Outcome.EQUAL
    finally:
        generators.restore()
