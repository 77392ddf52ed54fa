"""The function ``rustloader.prefetch_to_device``, and the loader that it returns."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeGuard, TypeVar

import torch

from rustloader.device.prefetch.iterator import DeviceIterator, Position
from rustloader.device.prefetch.lane import HostLane, Lane
from rustloader.device.prefetch.streams import streams_of
from rustloader.metrics import transfers
from rustloader.metrics.transfers import Transfers
from rustloader.metrics.wrappers import loader_in
from rustloader.system.forwarding import class_with, special_methods
from rustloader.system.protocols import LoaderLike, Rewindable

logger = logging.getLogger("rustloader")
_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


def prefetch_to_device(
    loader: Iterable[_T], device: torch.device | str | int | None = None, depth: int = 2
) -> DeviceLoader[_T]:
    """Copies the batches of a loader to a device while the program computes.

    The copies run on a separate stream, ``depth`` batches ahead. ``next`` makes the calling thread's current stream,
    and not the thread itself, wait for the batch. The memory of a batch is reused only after the device has finished
    the work that was queued when the program dropped the batch. Up to ``2 * depth + 1`` batches are on the device, in
    addition to those that the program keeps. Copies overlap with computation if the batches are pinned
    (``pin_memory=True``).

    Tensors in dicts, lists, tuples, named tuples, dataclasses, and other mappings and sequences are copied, as are
    objects with a method ``to(device, non_blocking=...)``. All other objects, such as numbers, strings and NumPy
    arrays, stay unchanged.

    Args:
        loader: A loader of rustloader or torch, or any iterable of batches.
        device: The device of the batches (default: None, the accelerator of this process; the CPU if there is none).
            Without an index, it is the calling thread's current device. On the CPU, batches are delivered unchanged.
        depth: Number of batches to copy ahead (default: 2).

    Returns:
        An iterable that can be used for any number of epochs.

    Raises:
        TypeError: ``loader`` is not iterable.
        ValueError: ``depth`` is not a positive integer, or is more than 8 over a ``StatefulDataLoader``.

    Examples:
        >>> loader = rustloader.DataLoader(range(8), batch_size=4, num_workers=2, pin_memory=torch.cuda.is_available())
        >>> for batch in rustloader.prefetch_to_device(loader):
        ...     print(batch.tolist())
        [0, 1, 2, 3]
        [4, 5, 6, 7]
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise ValueError(f"depth must be a positive integer, got {depth!r}")
    if not hasattr(type(loader), "__iter__") and not hasattr(type(loader), "__getitem__"):
        raise TypeError(f"prefetch_to_device() takes an iterable of batches, not an object of type {type(loader)!r}")
    if _is_rewindable(loader):
        # Imported here because the core exists only on Linux, as do these loaders.
        from rustloader._core import BACK_BATCHES

        # A call of `next` that has not returned may hold one more batch.
        if depth >= BACK_BATCHES:
            maximum = BACK_BATCHES - 1
            raise ValueError(
                f"depth must be {maximum} or less over a StatefulDataLoader, got {depth}: its states go back no further"
            )
    streams = streams_of(device)
    base = StatefulDeviceLoader if hasattr(loader, "state_dict") else DeviceLoader
    kind = class_with(base, "loader", special_methods(type(loader)) & _FORWARDED)
    return kind(loader, HostLane() if streams is None else Lane(streams, depth), depth)


# Special methods of the loader that its `DeviceLoader` has, too. Others may return batches that are not on the device.
_FORWARDED = {"__len__", "__length_hint__", "__bool__", "__contains__", "__call__"}


class DeviceLoader(Generic[_T_co]):
    """A loader that delivers the batches of another loader on a device, made by ``prefetch_to_device``.

    It has the length and the attributes of that loader. Over a ``StatefulDataLoader``, it also has ``state_dict`` and
    ``load_state_dict``, and its state counts the batches that the program has received. As a context manager, it closes
    itself at the end of the ``with`` statement.

    Raises:
        RuntimeError: ``next`` is called while a graph is being captured, in a forked child, or after ``close``.

    Examples:
        >>> batches = rustloader.prefetch_to_device([torch.ones(2), torch.zeros(2)], "cpu")
        >>> len(batches), [batch.sum().item() for batch in batches]
        (2, [2.0, 0.0])
        >>> isinstance(batches, rustloader.DeviceLoader)
        True
    """

    def __init__(self, loader: Iterable[_T_co], lane: Lane, depth: int) -> None:
        self.loader = loader
        self._depth = depth
        self._lane = lane
        self._position = Position()
        self._iterators: weakref.WeakSet[DeviceIterator] = weakref.WeakSet()
        # Lets `stats` find the counters both by the loader and by this object.
        counters = transfers.keep(self, transfers.of(loader_in(loader, lambda _: False)))
        if isinstance(lane, HostLane):
            counters.note_host()
        else:
            lane.transfers = counters

    @property
    def device(self) -> torch.device:
        """The device of the batches."""
        return self._lane.streams.device

    def __iter__(self) -> Iterator[_T_co]:
        position = Position()
        log_unpinned = functools.partial(_log_once, self._lane.transfers)
        # Loops on the CPU share nothing and need not wait for one another.
        lane = HostLane() if isinstance(self._lane, HostLane) else self._lane
        iterator = DeviceIterator(self.loader, lane, position, log_unpinned)
        # Tracing is available only with the core.
        tracing = sys.modules.get("rustloader.tracing.core")
        if tracing is not None and lane is self._lane:
            iterator.note_copy = tracing.follow_copies(self, f"to {self.device}")
        self._iterators.add(iterator)
        self._position = position
        return iterator

    if TYPE_CHECKING:

        def __len__(self) -> int: ...

    def __getattr__(self, name: str) -> Any:
        # The attribute `loader` is missing while this object is being copied.
        if name.startswith("__") or "loader" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loader, name)

    def __reduce__(self) -> Any:
        # A copy starts over, with a separate stream.
        return prefetch_to_device, (self.loader, self.device, self._depth)

    def close(self) -> None:
        """Ends all loops over this loader and frees their batches. Waits for the copies in progress.

        A later ``iter()`` starts over.

        Examples:
            >>> batches = rustloader.prefetch_to_device([1, 2, 3])
            >>> next(iter(batches))
            1
            >>> batches.close()
        """
        for iterator in list(self._iterators):
            iterator.close()

    def __enter__(self) -> DeviceLoader[_T_co]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<rustloader.DeviceLoader on {self.device} over {self.loader!r}>"


class StatefulDeviceLoader(DeviceLoader[_T_co]):
    """A `DeviceLoader` over a loader with a state.

    It is a separate class because frameworks look for the methods with ``hasattr``, or with a protocol, which inspects
    the class.
    """

    def state_dict(self, back: int = 0) -> Any:
        """Returns the loader's state after the batches that this object has delivered, without the last ``back`` of
        them."""
        method: Any = self.loader.state_dict  # type: ignore[attr-defined]
        position = self._position
        ahead = position.ahead_count()
        if ahead + back == 0:
            if _is_rewindable(self.loader):
                if position.has_unseen_end():
                    return self.loader._state_before_end()
                if position.has_unseen_error():
                    return self.loader._state_before_error()
            return method()
        if "back" not in inspect.signature(method).parameters:
            raise TypeError(
                f"the state_dict() of {type(self.loader).__qualname__} cannot go back by the {ahead} batches that "
                "are copied ahead: use rustloader.StatefulDataLoader"
            )
        return method(back=ahead + back)

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads a state. The next ``iter()`` resumes from it."""
        self.loader.load_state_dict(state_dict)  # type: ignore[attr-defined]
        # Until the next ``iter()``, the state is that of the loader itself.
        self._position = Position()


def _is_rewindable(loader: object) -> TypeGuard[Rewindable]:
    return hasattr(loader, "_state_before_end")


# Pickles and messages name the module from which users import it.
DeviceLoader.__module__ = "rustloader"


def _log_once(transfers: Transfers, loader: LoaderLike, unpinned: set[type]) -> None:
    """Logs, once per loader, that copies come from pageable memory, and the reason."""
    why = why_pageable(loader, unpinned)
    if transfers.note_pageable(why):
        logger.info("prefetch_to_device: %s", why)


def why_pageable(loader: LoaderLike, unpinned: set[type]) -> str:
    """Returns the reason why batches are not pinned, and the remedy."""
    names = ", ".join(sorted(kind.__qualname__ for kind in unpinned if not hasattr(kind, "pin_memory")))
    if getattr(loader, "pin_memory", False) and names:
        return f"a batch of type {names} is not pinned: it has no pin_memory(). Add a method that returns a pinned copy"
    if getattr(loader, "pin_memory", None) is False:
        return "batches are copied from pageable memory, which delays the program: set pin_memory=True in the loader"
    return "batches are copied from pageable memory, which delays the program: call pin_memory() on their tensors"
