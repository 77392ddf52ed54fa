"""Checks that the ranks of a machine share the same object under a key."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch

from rustloader.sharing.sequences import SharedDict, SharedList, SharedTuple

# Number of items that are compared, and maximum length of an item's repr in an error message.
_ITEMS_COMPARED = 16
_MAX_ITEM_TEXT = 60
_COMPARABLE_TYPES = (str, bytes, int)


def _outline(x: Any) -> tuple[Any, ...] | None:
    """Returns the properties that two equal objects have in common, or None for an object of another type."""
    if isinstance(x, np.ndarray):
        return "an array", str(x.dtype), x.shape
    if isinstance(x, torch.Tensor):
        return "a tensor", str(x.dtype), tuple(x.shape)
    for name, types in (("list", (list, SharedList)), ("tuple", (tuple, SharedTuple)), ("dict", (dict, SharedDict))):
        if isinstance(x, types):
            return f"a {name}", len(x)
    return None


def _sample_places(length: int) -> Iterable[int]:
    return sorted({place * (length - 1) // (_ITEMS_COMPARED - 1) for place in range(_ITEMS_COMPARED)}) if length else ()


def _items(x: Any) -> Iterable[Any]:
    """Returns some items of an object, always in the same order for equal objects."""
    if isinstance(x, (np.ndarray, torch.Tensor)):
        count = int(np.prod(x.shape))
        places = (np.unravel_index(place, x.shape) for place in _sample_places(count))
        return [np.asarray(x[tuple(map(int, place))].item() if x.shape else x.item()).tobytes() for place in places]
    if isinstance(x, (dict, SharedDict)):
        return list(islice(x, _ITEMS_COMPARED))
    return [x[place] for place in _sample_places(len(x))]


class Disagreement(ValueError):
    """Raised if ranks share different objects under a key."""


def check(key: str, own: Any, shared: Any) -> None:
    """Compares this rank's object with the object that another rank has shared, as far as the comparison is cheap.

    Raises:
        Disagreement: The objects differ.
    """
    outline = _outline(own)
    if outline is None:
        return
    shared_outline = _outline(shared)
    difference = None if outline == shared_outline else (outline, shared_outline)
    if difference is None and not _has_objects(own):
        pairs = zip(_items(own), _items(shared), strict=True)
        difference = next(
            ((mine, other) for mine, other in pairs if type(mine) in _COMPARABLE_TYPES and mine != other), None
        )
    if difference is not None:
        mine, other = (f"{part!r:.{_MAX_ITEM_TEXT}}" for part in difference)
        raise Disagreement(
            f"share(key={key!r}): this rank gives {mine}, but the rank that shared the object gave {other}: all ranks "
            "must make the same calls with a key, in the same order"
        )


def _has_objects(x: Any) -> bool:
    """Returns True if the items of an array or tensor cannot be compared as bytes."""
    if isinstance(x, np.ndarray):
        return x.dtype.kind not in "biufcSU"
    return isinstance(x, torch.Tensor) and x.is_complex()
