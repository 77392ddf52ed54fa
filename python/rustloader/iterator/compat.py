"""Stand-ins for the private queues, events and counters of torch's iterator.

Some programs contain copies of that iterator's shutdown routines, which use its queues and its event; some subclasses
of the iterator read its counters. The engine has none of these, but with the stand-ins such code keeps working: a
copied shutdown routine still ends the workers. If a program replaces parts of torch's loop,
:mod:`rustloader.iterator.fallback` selects torch's iterator instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from rustloader._core import Progress
from rustloader.system.protocols import WorkersIterator


class _DoneEvent:
    """A stand-in for the event that tells torch's workers to exit."""

    def __init__(self, iterator: WorkersIterator) -> None:
        self._core = iterator._engine()

    def set(self) -> None:
        self._core.close()

    def is_set(self) -> bool:
        return self._core.closing


class _Queue:
    """A stand-in for one of torch's queues. It discards every item that is put into it, and has no feeder thread."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None: ...

    def close(self) -> None: ...

    cancel_join_thread = join_thread = close


class _IndexQueue(_Queue):
    """A stand-in for a worker's index queue. Putting ``None`` into it dismisses the worker; putting anything else into
    it raises RuntimeError."""

    def __init__(self, iterator: WorkersIterator, worker_id: int) -> None:
        self._iterator, self._worker_id = iterator, worker_id

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if item is not None:
            raise RuntimeError(
                "rustloader's engine sends the index batches; a subclass of the iterator that sends its own must "
                "override _try_put_index, and then runs on torch's iterator"
            )
        self._iterator._mark_worker_as_unavailable(self._worker_id)


class _StandIn:
    """A descriptor that provides the stand-in for an attribute of torch's iterator.

    It is a non-data descriptor, so a value in the instance's ``__dict__`` takes precedence; that is where torch's own
    iterator stores its queues and counters. A ``__getattr__`` method would slow down every attribute access.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, iterator: WorkersIterator | None, owner: type) -> Any:
        if iterator is None:
            raise AttributeError(f"type object {owner.__name__!r} has no attribute {self._name!r}")
        if iterator._core is None:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")
        return _STAND_INS[self._name](iterator)


def _counter(name: str, count: Callable[[Progress], Any]) -> Callable[[WorkersIterator], Any]:
    """Returns a function that reads a counter of torch's iterator; ``count`` computes its value from the engine's
    progress. The function raises AttributeError while ``next`` runs."""

    def read(iterator: WorkersIterator) -> Any:
        progress = iterator._engine().progress()
        if progress is None:
            raise AttributeError(f"{name} cannot be read while next() runs")
        return count(progress)

    return read


def _cycle(sent: int, workers: int) -> Iterator[int]:
    return itertools.islice(itertools.cycle(range(workers)), sent % workers, None)


_COUNTERS: dict[str, Callable[[Progress], Any]] = {
    "_send_idx": lambda progress: progress.sent,
    "_rcvd_idx": lambda progress: next((task for task, _ in progress.undelivered), progress.sent),
    "_tasks_outstanding": lambda progress: progress.outstanding,
    "_workers_num_tasks": lambda progress: progress.loads,
    "_task_info": lambda progress: {task: (worker,) for task, worker in progress.undelivered},
    "_worker_queue_idx_cycle": lambda progress: _cycle(progress.sent, len(progress.loads)),
}

_STAND_INS: dict[str, Callable[[WorkersIterator], Any]] = {
    "_workers_done_event": _DoneEvent,
    "_index_queues": lambda iterator: [_IndexQueue(iterator, i) for i in range(len(iterator._workers))],
    "_worker_result_queue": lambda iterator: _Queue(),
    # False, so that a shutdown routine removes no PIDs from torch's registry of workers: the engine does not use it.
    "_worker_pids_set": lambda iterator: False,
    **{name: _counter(name, count) for name, count in _COUNTERS.items()},
}


def add_stand_ins(cls: type) -> None:
    """Adds the stand-ins to an iterator class."""
    for name in _STAND_INS:
        setattr(cls, name, _StandIn(name))
