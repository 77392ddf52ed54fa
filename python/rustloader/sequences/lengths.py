"""The lengths of a dataset's samples, checked."""

from __future__ import annotations

import hashlib
import operator
from typing import Any

import numpy as np
import torch

# The largest length, number of samples, and setting.
_LIMIT = 2**31 - 1


class Lengths:
    """A copy of the lengths of a dataset's samples, with 4 bytes per sample. Raises TypeError or ValueError if they are
    not a one-dimensional array, tensor, or sequence of positive integers.

    Attributes:
        array: The lengths, uint32.
        identity: A description that differs for other lengths.
    """

    def __init__(self, given: Any) -> None:
        given = given.detach().cpu() if isinstance(given, torch.Tensor) else given
        array = np.asarray(given if hasattr(given, "__array__") else list(given))
        if array.ndim != 1 or not 0 < len(array) <= _LIMIT:
            raise ValueError(f"lengths must have one dimension and 1 to {_LIMIT:,} items, got the shape {array.shape}")
        if array.dtype.kind not in "iu":
            values = array.tolist()
            at, value = next(((at, it) for at, it in enumerate(values) if type(it) is not int), (0, values[0]))
            raise TypeError(f"lengths must be integers, got {value!r} for sample {at}, of dtype {array.dtype}")
        for at in (int(array.argmin()), int(array.argmax())):
            if not 0 < array[at] <= _LIMIT:
                raise ValueError(f"lengths must be positive and at most {_LIMIT:,}, got {array[at]} for sample {at}")
        self.array = array.astype(np.uint32)
        self.identity = f"{len(array)} samples, BLAKE2 {hashlib.blake2b(self.array.data, digest_size=8).hexdigest()}"

    def check_limit(self, limit: int, name: str, remedy: str, multiple: int = 1) -> None:
        """Raises ValueError if a length, padded to a multiple, exceeds a limit."""
        at = int(self.array.argmax())
        tokens = -(-int(self.array[at]) // multiple) * multiple
        if tokens > limit:
            raise ValueError(
                f"sample {at} has length {self.array[at]}, which takes {tokens} tokens and exceeds {name}={limit}: "
                f"{remedy}"
            )


def integer(name: str, value: Any) -> int:
    """Returns a setting as an int. Raises TypeError unless it is an integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


def positive(name: str, value: Any) -> int:
    """Returns a setting as an int. Raises TypeError or ValueError unless it is a positive integer."""
    number = integer(name, value)
    if isinstance(value, bool) or not 0 < number <= _LIMIT:
        raise ValueError(f"{name} must be an integer from 1 to {_LIMIT:,}, got {value!r}")
    return number
