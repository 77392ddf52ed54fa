"""Checks that the ranks of a machine mean the same object by a key."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch

from rustloader.sharing.sequences import SharedDict, SharedList, SharedTuple

# Items that are compared, and bytes of the text that names an item.
_COMPARED = 16
_SHOWN = 60
_PLAIN = (str, bytes, int)


def _outline(x: Any) -> tuple[Any, ...] | None:
    """Returns the properties that two objects must have in common; None for an object of any other type."""
    if isinstance(x, np.ndarray):
        return "an array", str(x.dtype), x.shape
    if isinstance(x, torch.Tensor):
        return "a tensor", str(x.dtype), tuple(x.shape)
    for name, kinds in (("list", (list, SharedList)), ("tuple", (tuple, SharedTuple)), ("dict", (dict, SharedDict))):
        if isinstance(x, kinds):
            return f"a {name}", len(x)
    return None


def _places(length: int) -> Iterable[int]:
    return sorted({place * (length - 1) // (_COMPARED - 1) for place in range(_COMPARED)}) if length else ()


def _items(x: Any) -> Iterable[Any]:
    """Returns some items of an object, in an order."""
    if isinstance(x, (np.ndarray, torch.Tensor)):
        count = int(np.prod(x.shape))
        places = (np.unravel_index(place, x.shape) for place in _places(count))
        return [np.asarray(x[tuple(map(int, place))].item() if x.shape else x.item()).tobytes() for place in places]
    if isinstance(x, (dict, SharedDict)):
        return list(islice(x, _COMPARED))
    return [x[place] for place in _places(len(x))]


class Disagreement(ValueError):
    """Ranks give different objects for a key."""


def check(key: str, own: Any, shared: Any) -> None:
    """Compares the object that this rank gives with the one that another rank has shared, as far as that is cheap.

    Raises:
        Disagreement: They differ.
    """
    outline = _outline(own)
    if outline is None:
        return
    theirs = _outline(shared)
    difference = None if outline == theirs else (outline, theirs)
    if difference is None and not _has_objects(own):
        pairs = zip(_items(own), _items(shared), strict=True)
        difference = next(((a, b) for a, b in pairs if type(a) in _PLAIN and a != b), None)
    if difference is not None:
        ours, others = (f"{part!r:.{_SHOWN}}" for part in difference)
        raise Disagreement(
            f"share(key={key!r}): this rank gives {ours} where the rank that has shared it gives {others}: with a key "
            "all ranks share the same object, and use the key in the same order"
        )


def _has_objects(x: Any) -> bool:
    """Returns True if items of an array or a tensor have no bytes of their own that can be compared."""
    if isinstance(x, np.ndarray):
        return x.dtype.kind not in "biufcSU"
    return isinstance(x, torch.Tensor) and x.is_complex()
