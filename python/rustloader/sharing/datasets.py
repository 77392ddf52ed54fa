"""Shares the large attributes of a dataset."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from rustloader.sharing.agreement import Disagreement
from rustloader.sharing.sequences import SharedDict, SharedList, SharedTuple
from rustloader.sharing.sizes import check_items, is_shared, sampled, size_of

logger = logging.getLogger("rustloader")

# Maximum length of a list, tuple or dict whose large items are shared one by one. Each shared item takes a descriptor.
_FEW_ITEMS = 64
_CONTAINERS = (list, tuple, dict)
_ARRAYS = (np.ndarray, torch.Tensor)


def is_dataset(x: Any) -> bool:
    """Returns True if an object is a dataset: an instance of torch's class, or an object that has items and attributes
    but is not a container."""
    if isinstance(x, Dataset):
        return True
    kind = type(x)
    is_container = hasattr(kind, "__iter__") or isinstance(x, (*_ARRAYS, SharedList, SharedTuple, SharedDict))
    return not is_container and hasattr(kind, "__getitem__") and hasattr(x, "__dict__")


class _Node:
    """An object that may have to be rebuilt because a part of it is shared: a dataset, a container, or a bound method
    of a dataset."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.changes = False
        # The nodes that hold this one. If it changes, they change, too.
        self.holders: list[_Node] = []

    def change(self) -> None:
        """Marks this node and all nodes that hold it, directly or indirectly, as changed."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            if not node.changes:
                node.changes = True
                waiting.extend(node.holders)


class Sharing:
    """One call of ``share(dataset)``: finds the large attributes, shares them, and rebuilds the datasets that hold
    them."""

    def __init__(self, threshold: int, share: Callable[[Any, str], Any]) -> None:
        self._threshold = threshold
        self._share = share
        # These dicts are keyed by the id of the original. The nodes, and `_kept`, keep the originals alive, so that no
        # id is reused.
        self._nodes: dict[int, _Node] = {}
        self._kept: list[Any] = []
        self._shared: dict[int, Any] = {}
        self._rebuilt: dict[int, Any] = {}
        self._largest = (0, "")
        self._has_shared = False

    def run(self, dataset: Any) -> Any:
        """Returns a copy of a dataset with shared attributes, or the dataset itself if nothing in it is large."""
        self._visit(dataset, type(dataset).__name__, None)
        if not self._nodes[id(dataset)].changes:
            self._log_nothing_shared(type(dataset).__name__)
        return self._rebuild(dataset)

    def _log_nothing_shared(self, name: str) -> None:
        if self._has_shared:
            logger.info("share(dataset): everything large in %s is already shared", name)
            return
        size, largest = self._largest
        logger.warning(
            "share(dataset): nothing in %s is shared: its attributes, and those of the datasets in it, include no "
            "list, tuple, dict, array or tensor of at least %d bytes (threshold) that can be shared%s",
            name,
            self._threshold,
            f"; the largest is {largest}, with about {size} bytes" if largest else "",
        )

    # Finding and sharing the large attributes

    def _visit(self, value: Any, name: str, holder: _Node | None) -> None:
        """Shares the large parts of a value, and marks the nodes that hold them as changed."""
        waiting = [(value, name, holder)]
        while waiting:
            value, name, holder = waiting.pop()
            node = self._nodes.get(id(value))
            if node is None and id(value) not in self._shared:
                parts = self._parts(value, name)
                if parts is not None:
                    node = self._nodes[id(value)] = _Node(value)
                    waiting.extend((part, label, node) for part, label in reversed(parts))
                else:
                    self._share_leaf(value, name)
            if holder is None:
                continue
            if node is not None:
                node.holders.append(holder)
            if node.changes if node is not None else id(value) in self._shared:
                holder.change()

    def _parts(self, value: Any, name: str) -> list[tuple[Any, str]] | None:
        """Returns the parts of a value, with their names, if they must be searched for large objects. Returns None for
        a value that is shared as one object or stays unchanged.
        """
        if is_dataset(value):
            return [(part, f"{name}.{key}") for key, part in list(getattr(value, "__dict__", {}).items())]
        if type(value) is MethodType and is_dataset(value.__self__):
            return [(value.__self__, f"{name}.__self__")]
        if type(value) not in _CONTAINERS:
            return None
        items = sampled(value)
        if any(map(is_dataset, items)) or (len(value) <= _FEW_ITEMS and any(map(self._is_worth_searching, items))):
            return list(_named(value, name))
        return None

    def _is_worth_searching(self, part: Any) -> bool:
        return type(part) is MethodType or size_of(part) >= self._threshold

    def _share_leaf(self, value: Any, name: str) -> None:
        if isinstance(value, (SharedList, SharedTuple, SharedDict)) or (
            isinstance(value, _ARRAYS) and is_shared(value)
        ):
            self._has_shared = True
            return
        size = size_of(value)
        self._largest = max(self._largest, (size, name))
        if size < self._threshold:
            return
        if type(value) not in (*_CONTAINERS, np.ndarray, torch.Tensor):
            if isinstance(value, (*_CONTAINERS, *_ARRAYS, set, frozenset)):
                logger.info(_NOT_SHARED_TEXT, name, type(value).__name__, size / 1e6, "its class would be lost")
            return
        try:
            if type(value) in _CONTAINERS:
                check_items(value)
            shared = self._share(value, name)
        except (MemoryError, OSError, Disagreement) as error:
            error.add_note(f"rustloader.share() failed at {name}")
            raise
        except Exception as error:
            logger.warning(_NOT_SHARED_TEXT, name, type(value).__name__, size / 1e6, f"{type(error).__name__}: {error}")
            return
        logger.info(_SHARED_TEXT, name, type(value).__name__, size / 1e6, shared.nbytes / 1e6)
        self._kept.append(value)
        self._shared[id(value)] = shared

    # Rebuilding the holders

    def _rebuild(self, value: Any) -> Any:
        """Returns a copy of a value with the shared objects in it, or the value itself if it has none."""
        if id(value) in self._shared:
            return self._shared[id(value)]
        node = self._nodes.get(id(value))
        if node is None or node.value is not value or not node.changes:
            return value
        if id(value) not in self._rebuilt:
            self._make_copy(value)
        return self._rebuilt[id(value)]

    def _make_copy(self, value: Any) -> None:
        if type(value) is MethodType:
            self._rebuilt[id(value)] = MethodType(value.__func__, self._rebuild(value.__self__))
        elif type(value) is tuple:
            self._rebuilt[id(value)] = tuple(map(self._rebuild, value))
        elif type(value) is list:
            items: list[Any] = []
            # The list is stored before its items are rebuilt, because they may hold it.
            self._rebuilt[id(value)] = items
            items.extend(map(self._rebuild, value))
        elif type(value) is dict:
            pairs: dict[Any, Any] = {}
            self._rebuilt[id(value)] = pairs
            pairs.update((key, self._rebuild(part)) for key, part in value.items())
        else:
            self._rebuilt[id(value)] = dataset = _shallow_copy(value)
            state = vars(dataset)
            # setattr would fail for a frozen dataclass or a property.
            state.update({name: self._rebuild(part) for name, part in state.items()})


_NOT_SHARED_TEXT = "share(dataset): %s, a %s of about %.1f MB, is not shared: %s"
_SHARED_TEXT = "share(dataset): %s, a %s of about %.1f MB, is now %.1f MB in shared memory"


def _named(container: Any, name: str) -> Iterator[tuple[Any, str]]:
    pairs = container.items() if type(container) is dict else enumerate(container)
    return ((part, f"{name}[{key!r}]") for key, part in pairs)


def _shallow_copy(dataset: Any) -> Any:
    """Returns a shallow copy of a dataset."""
    kind = type(dataset)
    if hasattr(kind, "__del__"):
        raise TypeError(
            f"a {kind.__name__} has a __del__, which would release resources that its copy still uses: share its large "
            "attributes in its __init__, as in self.paths = rustloader.share(paths)"
        )
    if any(vars(base).get("__slots__") for base in kind.__mro__) or hasattr(kind, "__copy__"):
        return copy.copy(dataset)
    try:
        # copy.copy would call __getstate__, which may leave out attributes that only this process can use. The copy
        # needs them, too.
        copied = object.__new__(kind)
    except TypeError:
        return copy.copy(dataset)
    vars(copied).update(vars(dataset))
    return copied
