"""Moves a batch to a device: decides which parts to copy, and rebuilds the containers around them."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch

from rustloader.device.prefetch.streams import Streams, parts

_UNMOVED_TYPES = (str, bytes, bytearray, memoryview, range, int, float, complex, type, type(None))
# For each type, whether its method `to` takes `non_blocking`.
_takes_non_blocking: dict[type, bool] = {}


class Move:
    """The move of one batch. A container with nothing to move is not rebuilt.

    Args:
        streams: The streams of the device. Copies are queued in the calling thread's stream.
        checks_pinning: Whether to collect the types of objects that are not pinned.

    Attributes:
        made: The new memory on the device, as a dict from the address of a storage to an alias of a tensor over it.
        read: The tensors on the host that are being copied. The device may still read them.
        nbytes: Bytes of ``made``.
        unpinned: The types of the objects in pageable memory. An object inside a dataclass that torch does not pin is
            listed under the type of the outermost such dataclass.
    """

    def __init__(self, streams: Streams, checks_pinning: bool = False) -> None:
        self.made: dict[int, torch.Tensor] = {}
        self.read: list[torch.Tensor] = []
        self.nbytes = 0
        self.unpinned: set[type] = set()
        self._streams = streams
        self._checks_pinning = checks_pinning
        # By id, each object with its copy, so that an object that occurs twice in a batch is copied once. The object is
        # kept alive so that its id is not reused.
        self._moved: dict[int, tuple[Any, Any]] = {}
        # The outermost dataclass around the current value that torch's pin_memory does not pin.
        self._owner: type | None = None

    def __call__(self, value: Any) -> Any:
        """Queues the copies of a value to the device, and returns the value there, or the value itself if there is
        nothing to copy."""
        if isinstance(value, torch.Tensor):
            return self._move_once(value)
        if isinstance(value, _UNMOVED_TYPES):
            return value
        is_mapping = isinstance(value, Mapping)
        # A mapping may expose its items as attributes.
        if callable(getattr(type(value) if is_mapping else value, "to", None)):
            return self._move_once(value)
        if is_mapping:
            return self._mapping(value)
        if isinstance(value, tuple):
            return self._tuple(value)
        if isinstance(value, Sequence):
            return self._sequence(value)
        if dataclasses.is_dataclass(value):
            return self._dataclass(value)
        return value

    def _move_once(self, value: Any) -> Any:
        moved = self._moved.get(id(value))
        if moved is None:
            moved = self._moved[id(value)] = value, self._copied(value)
        return moved[1]

    def _copied(self, value: Any) -> Any:
        on_device: list[torch.Tensor] = []
        read: list[torch.Tensor] = []
        try:
            if type(value) is torch.Tensor and value.layout is torch.strided:
                # Some containers make a new item at each access and do not keep it, so the item is kept alive here.
                read.append(value)
                moved = self._streams.copy(value)
                if moved is not value:
                    on_device.append(moved)
            else:
                moved = self._streams.traced(lambda: _call_to(value, self._streams), on_device, read)
        finally:
            # This also runs if the call fails: some objects change themselves, and keep the parts that they have moved.
            self._record_memory(on_device, read)
        if self._checks_pinning and not all(self._streams.is_pinned(tensor) for tensor in read):
            self.unpinned.add(self._owner or (torch.Tensor if isinstance(value, torch.Tensor) else type(value)))
        # For some types, `to` changes the object itself and returns nothing.
        return value if moved is None else moved

    def _record_memory(self, on_device: list[torch.Tensor], read: list[torch.Tensor]) -> None:
        self.read += read
        for part in itertools.chain.from_iterable(map(parts, on_device)):
            storage = part.untyped_storage()
            if storage._cdata not in self.made:
                self.made[storage._cdata] = part.detach()
                self.nbytes += storage.nbytes()

    def _mapping(self, value: Mapping[Any, Any]) -> Any:
        # Some mappings make new items at each access.
        items = list(value.items())
        moved = {key: self(item) for key, item in items}
        if all(moved[key] is item for key, item in items):
            return value
        if type(value) is dict:
            return moved
        try:
            if isinstance(value, MutableMapping):
                copied = copy.copy(value)
                copied.update(moved)
                return copied
            return type(value)(moved)  # type: ignore[call-arg]
        except TypeError:
            return moved

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        moved = [self(item) for item in value]
        if _are_same_objects(moved, value):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*moved)
        try:
            return type(value)(moved)
        except TypeError:
            return tuple(moved)

    def _sequence(self, value: Sequence[Any]) -> Any:
        items = list(value)
        moved = [self(item) for item in items]
        if _are_same_objects(moved, items):
            return value
        if type(value) is list:
            return moved
        try:
            if isinstance(value, MutableSequence):
                copied = copy.copy(value)
                for place, item in enumerate(moved):
                    copied[place] = item
                return copied
            return type(value)(moved)  # type: ignore[call-arg]
        except TypeError:
            return moved

    def _dataclass(self, value: Any) -> Any:
        owner = self._owner
        if owner is None and not hasattr(type(value), "pin_memory"):
            self._owner = type(value)
        try:
            fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
            moved = {name: self(getattr(value, name)) for name in fields}
        finally:
            self._owner = owner
        if all(moved[name] is getattr(value, name) for name in fields):
            return value
        copied = copy.copy(value)
        for name, item in moved.items():
            # A frozen dataclass refuses setattr.
            object.__setattr__(copied, name, item)
        return copied


def _are_same_objects(moved: list[Any], value: Sequence[Any]) -> bool:
    return all(item is original for item, original in zip(moved, value, strict=True))


def _call_to(value: Any, streams: Streams) -> Any:
    """Calls an object's own method ``to``."""
    kind = type(value)
    takes = _takes_non_blocking.get(kind)
    if takes is None:
        takes = _takes_non_blocking[kind] = isinstance(value, torch.Tensor) or _has_parameter(value.to)
    try:
        return value.to(streams.device, non_blocking=streams.non_blocking) if takes else value.to(streams.device)
    except Exception as error:
        if not isinstance(value, torch.Tensor):
            error.add_note(f"prefetch_to_device() called the method to() of a {kind.__module__}.{kind.__qualname__}")
        raise


def _has_parameter(method: Any) -> bool:
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return False
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return "non_blocking" in parameters or takes_any
