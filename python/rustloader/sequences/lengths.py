"""The lengths of a dataset's samples, checked."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch

from rustloader._core import summarize_lengths

# Plans store indices and lengths as 32-bit numbers.
_LIMIT = 2**32 - 1


class Lengths:
    """The lengths of a dataset's samples.

    Arrays and memory-mapped files of int32 or int64 are not copied.

    Args:
        given: A one-dimensional array, tensor, or sequence of ints.

    Attributes:
        array: The lengths as a contiguous array of int32 or int64.
        identity: A string that is equal for equal lengths, whatever their type.
        longest: The index of the longest sample.

    Raises:
        TypeError: The lengths are not integers.
        ValueError: There are no lengths, more than 4,294,967,295, or they are not one-dimensional, or one is not
            positive.
    """

    def __init__(self, given: Any) -> None:
        if isinstance(given, torch.Tensor):
            given = given.detach().cpu()
        array = np.asarray(given if hasattr(given, "__array__") else list(given))
        if array.ndim != 1 or not 0 < len(array) <= _LIMIT:
            raise ValueError(
                f"lengths must be one-dimensional and have 1 to {_LIMIT:,} items, got the shape {array.shape}"
            )
        if array.dtype.kind not in "iu":
            values = array.tolist()
            at, value = next(((at, it) for at, it in enumerate(values) if type(it) is not int), (0, values[0]))
            raise TypeError(f"lengths must be integers, got {value!r} for sample {at}, of dtype {array.dtype}")
        narrow = np.can_cast(array.dtype, np.int32)
        self.array = np.ascontiguousarray(array, dtype=np.int32 if narrow else np.int64)
        checksum, shortest, self.longest = summarize_lengths(self.array)
        if self.array[shortest] < 1:
            raise ValueError(f"lengths must be positive, got {self.array[shortest]} for sample {shortest}")
        self.identity = f"{len(array)} samples with checksum {checksum:016x}"

    def check_limit(self, limit: int, tokens: int, name: str, remedy: str) -> None:
        """Raises ValueError if the longest sample takes more tokens than ``limit``."""
        if tokens > limit:
            raise ValueError(
                f"sample {self.longest} has length {self.array[self.longest]}, which takes {tokens} tokens and exceeds "
                f"{name}={limit}: {remedy}"
            )


def positive(name: str, value: Any) -> int:
    """Returns a setting as an int. Raises TypeError or ValueError unless it is an integer from 1 to 2**32 - 1."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if isinstance(value, bool) or not 0 < number <= _LIMIT:
        raise ValueError(f"{name} must be an integer from 1 to {_LIMIT:,}, got {value!r}")
    return number
