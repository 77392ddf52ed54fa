"""Finds attributes of a dataset that workers copy merely by reading them: large containers of Python objects.

Python updates an object's reference count whenever it reads the object, so copy-on-write gives each forked worker its
own copy of the memory. An array or tensor is a single object, so its data stays shared.

Sizes count only Python objects, are estimated from a few items, and are computed without running the dataset's code.
`sharing.sizes` also counts the data of arrays, because it measures the bytes that would be sent to another process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any, TypeGuard

import numpy as np
import torch

from rustloader.metrics.fields import LargeAttribute

# Minimum private memory of a worker, in bytes, before the dataset is searched.
MIN_PRIVATE_BYTES = 64 << 20
# Minimum size of the Python objects in a large attribute, in bytes.
MIN_LARGE_BYTES = 16 << 20
# Maximum number of attributes to report.
_MAX_NAMED = 5
# Limits of the search: seconds of CPU time, number of objects, nesting depth.
_MAX_SECONDS, _MAX_OBJECTS, _MAX_DEPTH = 0.05, 10_000, 8
# Containers with at most this many items are searched item by item. Larger ones are only measured.
_MAX_SEARCHED_ITEMS = 64
# Number of items sampled from a container, from each container inside it, and so on.
_SAMPLED = (128, 16, 8)
# Types of objects that are not searched.
_LEAVES = (ModuleType, FunctionType, BuiltinFunctionType, type, torch.Tensor, np.ndarray, str, bytes, int, float)


def find(dataset: Any) -> tuple[LargeAttribute, ...]:
    """Returns the large containers of a dataset and of the objects in it, largest first.

    Runs none of the dataset's code and takes little time. Sizes are estimated from a few items.
    """
    containers = []
    deadline = time.thread_time() + _MAX_SECONDS
    seen: set[int] = set()
    waiting = [("dataset", dataset, 0)]
    for path, value, depth in waiting:
        if id(value) in seen or isinstance(value, _LEAVES) or value is None:
            continue
        if len(seen) >= _MAX_OBJECTS or time.thread_time() > deadline:
            break
        seen.add(id(value))
        try:
            if _is_container(value) and len(value) > _MAX_SEARCHED_ITEMS:
                size = round(_items_size(value, 0))
                if size >= MIN_LARGE_BYTES:
                    containers.append(LargeAttribute(path, type(value).__name__, len(value), size))
            elif depth < _MAX_DEPTH:
                waiting += [(f"{path}{name}", part, depth + 1) for name, part in _parts(value)]
        except RuntimeError:  # another thread changed a dict meanwhile
            continue
    return tuple(sorted(containers, key=lambda attribute: attribute.bytes, reverse=True)[:_MAX_NAMED])


def _is_container(value: Any) -> TypeGuard[list[Any] | tuple[Any, ...] | dict[Any, Any]]:
    # A subclass may compute its items.
    return type(value) in (list, tuple, dict)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the items and attributes of an object, each with its path as code, such as ``[0]`` or ``.name``."""
    if isinstance(value, dict):
        for key in list(dict.keys(value))[:_MAX_SEARCHED_ITEMS]:
            if isinstance(key, (str, int)):
                yield f"[{key!r}]", dict.get(value, key)
    elif isinstance(value, (list, tuple)):
        items = list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)
        for number, item in enumerate(islice(items, _MAX_SEARCHED_ITEMS)):
            yield f"[{number}]", item
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        attributes = None
    if type(attributes) is dict:
        for name, part in list(attributes.items()):
            yield f".{name}", part
    for base in type(value).__mro__:
        for name, member in list(vars(base).items()):
            if isinstance(member, MemberDescriptorType) and base.__module__ != "builtins":
                try:
                    yield f".{name}", member.__get__(value)
                except AttributeError:  # not set
                    continue


def _items_size(container: Any, level: int) -> float:
    """Estimates the size of a container's items in bytes, from a sample. Does not write to the container's memory."""
    sampled = _SAMPLED[level]
    if isinstance(container, dict):
        step = max(1, min(len(container), 50 * sampled) // sampled)
        pairs = islice(container.items(), 0, step * sampled, step)
        items: list[Any] = [item for pair in pairs for item in pair]
        count = 2 * len(container)
    else:
        items = [container[number * len(container) // sampled] for number in range(sampled)]
        items = items if len(container) > sampled else list(container)
        count = len(container)
    distinct = {id(item): item for item in items if not _is_shared_constant(item)}
    size = sum(_size(item, level + 1) for item in distinct.values())
    # If at most half of the sampled objects are distinct, the container is assumed to hold no other objects.
    return size * count / len(items) if 2 * len(distinct) > len(items) or len(items) < _SAMPLED[-1] else size


def _is_shared_constant(item: Any) -> bool:
    """Returns True if Python shares one object among all equal values."""
    return item is None or isinstance(item, bool) or (type(item) is int and -5 <= item <= 256)


def _size(item: Any, level: int) -> float:
    # The size of an array does not include its data.
    size = float(sys.getsizeof(item) if type(item).__module__ == "builtins" else object.__sizeof__(item))
    if level >= len(_SAMPLED):
        return size
    attributes = None
    if _is_container(item):
        return size + _items_size(item, level) if item else size
    try:
        attributes = object.__getattribute__(item, "__dict__")
    except (AttributeError, TypeError):
        return size
    return size + (sys.getsizeof(attributes) + _items_size(attributes, level) if attributes else 0)
