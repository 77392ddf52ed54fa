"""Checks the argument ``num_workers`` of a loader, and chooses the initial number of workers for "auto".

This module also works on systems without the engine.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import rustloader.system.local_ranks as local_ranks
from rustloader.system.protocols import LoaderLike

AUTO = "auto"
# Index of `num_workers` among the positional arguments of torch's class.
_NUM_WORKERS_INDEX = 5
# Maximum initial number of workers, and the free memory in bytes that each of them requires.
_MAX_INITIAL, _MEMORY_PER_WORKER = 16, 256 << 20


def resolved(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], int | None]:
    """Replaces "auto" in the arguments of a loader with the initial number of workers. Returns the new arguments and
    that number; if ``num_workers`` is not "auto", returns the unchanged arguments and None.

    Raises:
        TypeError: ``num_workers`` is a string other than "auto".
    """
    if len(args) > _NUM_WORKERS_INDEX:
        value = args[_NUM_WORKERS_INDEX]
    elif "num_workers" in kwargs:
        value = kwargs["num_workers"]
    else:
        return args, kwargs, None
    if not isinstance(value, str):
        return args, kwargs, None
    if value != AUTO:
        raise TypeError(f'num_workers option should be a non-negative integer or "auto", got num_workers={value!r}')
    count = initial_workers()
    if len(args) > _NUM_WORKERS_INDEX:
        return (*args[:_NUM_WORKERS_INDEX], count, *args[_NUM_WORKERS_INDEX + 1 :]), kwargs, count
    return args, kwargs | {"num_workers": count}, count


def refuse_string(loader: LoaderLike) -> None:
    """Raises TypeError if the program has set a loader's ``num_workers`` to a string."""
    value: object = loader.num_workers
    if isinstance(value, str):
        raise TypeError(
            f'num_workers of an existing DataLoader must be an integer, got {value!r}: pass num_workers="auto" to the '
            "constructor, or set a number"
        )


def initial_workers() -> int:
    """Returns the initial number of workers, from 1 to 16: this rank's share of the cores that affinity and CPU quota
    allow, or fewer if there is too little free memory."""
    if not sys.platform.startswith("linux"):
        return max(1, min(_MAX_INITIAL, (os.cpu_count() or 1) // (local_ranks.size() or 1)))
    from rustloader.system.cores import own_cores

    free = free_memory()
    by_memory = _MAX_INITIAL if free is None else free // _MEMORY_PER_WORKER
    return max(1, min(_MAX_INITIAL, own_cores(), by_memory))


def free_memory() -> int | None:
    """Returns this rank's share of the free memory, in bytes; None if unknown.

    The free memory is the smallest amount available on the machine or in any of the process's cgroups. The ranks on
    this machine share it equally.
    """
    from rustloader._core import memory_limits

    free = min((free for _, _, free in memory_limits()), default=None)
    return None if free is None else free // (local_ranks.size() or 1)
