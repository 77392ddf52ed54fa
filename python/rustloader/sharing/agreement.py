"""Checks that the ranks of a machine share the same object under a key."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch

from rustloader.sharing.sequences import SharedDict, SharedList, SharedTuple

# Maximum number of items that are compared, and maximum length of an item's repr in an error message.
_ITEMS_COMPARED = 16
_MAX_ITEM_TEXT = 60
_COMPARABLE_TYPES = (str, bytes, int)


def _outline(x: Any) -> tuple[Any, ...] | None:
    """Returns properties that are the same for equal objects; None if objects of this type are not compared."""
    if isinstance(x, np.ndarray):
        return "an array", str(x.dtype), x.shape
    if isinstance(x, torch.Tensor):
        return "a tensor", str(x.dtype), tuple(x.shape)
    for name, types in (("list", (list, SharedList)), ("tuple", (tuple, SharedTuple)), ("dict", (dict, SharedDict))):
        if isinstance(x, types):
            return f"a {name}", len(x)
    return None


def _sample_positions(length: int) -> Iterable[int]:
    return sorted({i * (length - 1) // (_ITEMS_COMPARED - 1) for i in range(_ITEMS_COMPARED)}) if length else ()


def _items(x: Any) -> Iterable[Any]:
    """Returns some items of an object; equal objects yield the same items in the same order."""
    if isinstance(x, (np.ndarray, torch.Tensor)):
        count = int(np.prod(x.shape))
        indices = (np.unravel_index(i, x.shape) for i in _sample_positions(count))
        return [np.asarray(x[tuple(map(int, index))].item() if x.shape else x.item()).tobytes() for index in indices]
    if isinstance(x, (dict, SharedDict)):
        return list(islice(x, _ITEMS_COMPARED))
    return [x[i] for i in _sample_positions(len(x))]


class Disagreement(ValueError):
    """Raised if ranks share different objects under a key."""


def check(key: str, own: Any, shared: Any) -> None:
    """Compares this rank's object with the object that another rank has shared. Checks only what is cheap to check.

    Raises:
        Disagreement: The objects differ.
    """
    outline = _outline(own)
    if outline is None:
        return
    shared_outline = _outline(shared)
    difference = None if outline == shared_outline else (outline, shared_outline)
    if difference is None and not _has_incomparable_items(own):
        pairs = zip(_items(own), _items(shared), strict=True)
        difference = next(
            ((mine, other) for mine, other in pairs if type(mine) in _COMPARABLE_TYPES and mine != other), None
        )
    if difference is not None:
        mine, other = (f"{part!r:.{_MAX_ITEM_TEXT}}" for part in difference)
        raise Disagreement(
            f"share(key={key!r}): this rank passes {mine}, but the rank that shared the object passed {other}: all "
            "ranks must make the same calls with a key, in the same order"
        )


def _has_incomparable_items(x: Any) -> bool:
    """Returns True if the items of an array or tensor cannot be compared as bytes."""
    if isinstance(x, np.ndarray):
        return x.dtype.kind not in "biufcSU"
    return isinstance(x, torch.Tensor) and x.is_complex()
