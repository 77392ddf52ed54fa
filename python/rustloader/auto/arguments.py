"""``num_workers="auto"`` as an argument of a loader: its checks, and the initial number of workers.

This module also works on systems without the engine.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable
from typing import Any

import rustloader.system.local_ranks as local_ranks
from rustloader.system.protocols import LoaderLike

AUTO = "auto"
# Position of num_workers among the arguments of torch's class.
_NUM_WORKERS_PLACE = 5
# Maximum of the initial number of workers, and the free memory in bytes that it allows for each of them.
_MAX_INITIAL, _MEMORY_PER_WORKER = 16, 256 << 20


def resolved(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], int | None]:
    """Returns the arguments of a loader with a number in place of "auto", and that number, or None without "auto".

    Raises:
        ValueError: ``num_workers`` is another string.
    """
    if len(args) > _NUM_WORKERS_PLACE:
        value = args[_NUM_WORKERS_PLACE]
    elif "num_workers" in kwargs:
        value = kwargs["num_workers"]
    else:
        return args, kwargs, None
    if not isinstance(value, str):
        return args, kwargs, None
    if value != AUTO:
        raise ValueError(f'num_workers option should be a non-negative integer or "auto", got num_workers={value!r}')
    count = initial_workers()
    if len(args) > _NUM_WORKERS_PLACE:
        return (*args[:_NUM_WORKERS_PLACE], count, *args[_NUM_WORKERS_PLACE + 1 :]), kwargs, count
    return args, kwargs | {"num_workers": count}, count


def suggest(error: TypeError, given: Iterable[str], known: Iterable[str]) -> None:
    """Adds a note to a constructor's error if an unknown keyword argument resembles a known one.

    Args:
        error: The error. Its text does not change.
        given: Names of the keyword arguments.
        known: Names of the parameters.
    """
    if "unexpected keyword argument" not in str(error) or "Did you mean" in str(error):
        return
    known = list(known)
    for name in given:
        if name not in known and (matches := difflib.get_close_matches(name, known, 1, cutoff=0.75)):
            error.add_note(f"Did you mean {matches[0]} in place of {name}?")


def refuse_string(loader: LoaderLike) -> None:
    """Raises TypeError if a program has set ``num_workers`` of a loader to a string."""
    value: object = loader.num_workers
    if isinstance(value, str):
        raise TypeError(
            f'num_workers of an existing DataLoader must be an integer, got {value!r}: pass num_workers="auto" to the '
            "constructor, or set a number"
        )


def initial_workers() -> int:
    """Returns the initial number of workers: the cores of this process by affinity and CPU quota, divided among the
    ranks that share them, and no more than the free memory allows.
    """
    if not sys.platform.startswith("linux"):
        return max(1, min(_MAX_INITIAL, (os.cpu_count() or 1) // (local_ranks.size() or 1)))
    from rustloader.system.cores import own_cores

    free = free_memory()
    by_memory = _MAX_INITIAL if free is None else free // _MEMORY_PER_WORKER
    return max(1, min(_MAX_INITIAL, own_cores(), by_memory))


def free_memory() -> int | None:
    """Returns the free memory of the cgroups and the machine, divided among the ranks, in bytes; None if unknown."""
    from rustloader._core import memory_limits

    free = min((free for _, _, free in memory_limits()), default=None)
    return None if free is None else free // (local_ranks.size() or 1)
