"""Stand-ins for the queues, events and counters of torch's iterator, which programs use although they are private.

Shutdown routines that were copied out of torch touch its queues and its event; subclasses read its counters. The
engine has no such parts: the stand-ins here answer for them, so that such code does no harm and ends the workers.
If a program puts itself between these parts, :mod:`rustloader.iterator.fallback` sees it, and torch's iterator runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from rustloader._core import Engine


class Iter(Protocol):
    """What the stand-ins need of the iterator."""

    _workers: list[Any]

    @property
    def _core(self) -> Engine | None: ...

    def _engine(self) -> Engine: ...

    def _dismiss(self, worker_id: int) -> None: ...


class _DoneEvent:
    """In the place of the event that tells torch's workers to leave."""

    def __init__(self, iterator: Iter) -> None:
        self._core = iterator._engine()

    def set(self) -> None:
        self._core.close()

    def is_set(self) -> bool:
        return self._core.closing


class _Queue:
    """In the place of a queue of torch's: takes what a shutdown routine puts into it."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Nothing waits at the other end."""

    def cancel_join_thread(self) -> None:
        """There is no thread."""

    def close(self) -> None:
        """There is nothing to close."""

    def join_thread(self) -> None:
        """There is no thread."""


class _IndexQueue(_Queue):
    """In the place of a worker's queue; ``None`` in it tells the worker to leave."""

    def __init__(self, iterator: Iter, worker_id: int) -> None:
        self._iterator, self._worker_id = iterator, worker_id

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if item is not None:
            raise RuntimeError(
                "the engine of rustloader sends index batches by itself; a subclass of the iterator that sends its own "
                "has to override _try_put_index, and then runs on torch's iterator"
            )
        self._iterator._dismiss(self._worker_id)


class _Part:
    """An attribute of torch's iterator, with a stand-in for its value.

    What stands in the ``__dict__`` comes first, and with torch's own iterator all of it does. This is no
    ``__getattr__`` of the class, with which each look at any attribute would take Python's slow way.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, iterator: Iter | None, owner: type) -> Any:
        if iterator is None:
            raise AttributeError(f"type object {owner.__name__!r} has no attribute {self._name!r}")
        if iterator._core is None:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")
        return _PARTS[self._name](iterator)


def _counter(name: str, count: Callable[..., Any]) -> Callable[[Iter], Any]:
    """What answers for a counter that ``count`` makes of the engine's own."""

    def read(iterator: Iter) -> Any:
        progress = iterator._engine().progress()
        if progress is None:
            raise AttributeError(f"{name} cannot be read while next() runs")
        return count(*progress)

    return read


def _cycle(sent: int, workers: int) -> Iterator[int]:
    return itertools.islice(itertools.cycle(range(workers)), sent % workers, None)


# From (tasks sent, tasks without a result, tasks not delivered by worker, (number, worker) of tasks not delivered).
_COUNTERS: dict[str, Callable[..., Any]] = {
    "_send_idx": lambda sent, outstanding, loads, tasks: sent,
    "_rcvd_idx": lambda sent, outstanding, loads, tasks: tasks[0][0] if tasks else sent,
    "_tasks_outstanding": lambda sent, outstanding, loads, tasks: outstanding,
    "_workers_num_tasks": lambda sent, outstanding, loads, tasks: loads,
    "_task_info": lambda sent, outstanding, loads, tasks: {task: (worker,) for task, worker in tasks},
    "_worker_queue_idx_cycle": lambda sent, outstanding, loads, tasks: _cycle(sent, len(loads)),
}

_PARTS: dict[str, Callable[[Iter], Any]] = {
    "_workers_done_event": _DoneEvent,
    "_index_queues": lambda iterator: [_IndexQueue(iterator, i) for i in range(len(iterator._workers))],
    "_worker_result_queue": lambda iterator: _Queue(),
    # Deaths are seen without torch's registry of workers.
    "_worker_pids_set": lambda iterator: False,
    **{name: _counter(name, count) for name, count in _COUNTERS.items()},
}


def add_parts(cls: type) -> None:
    """Has the iterator's class answer for the attributes of torch's that it does not have."""
    for name in _PARTS:
        setattr(cls, name, _Part(name))
