"""``num_workers="auto"`` as an argument of a loader: its checks, and the number that a loader begins with.

Works on systems without the engine, too.
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
# Place of num_workers among the arguments of torch's class.
_NUM_WORKERS_PLACE = 5
# The first guess is no larger, and leaves each worker this many bytes of the free memory.
_MAX_FIRST_GUESS, _MEMORY_PER_WORKER = 16, 256 << 20


def resolved(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], int | None]:
    """Returns the arguments of a loader with a number in place of "auto", and that number; None without "auto".

    Raises:
        ValueError: ``num_workers`` is another text.
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
    count = first_guess()
    if len(args) > _NUM_WORKERS_PLACE:
        return (*args[:_NUM_WORKERS_PLACE], count, *args[_NUM_WORKERS_PLACE + 1 :]), kwargs, count
    return args, kwargs | {"num_workers": count}, count


def suggest(error: TypeError, given: Iterable[str], known: Iterable[str]) -> None:
    """Adds a note to the error of a constructor with an unknown keyword argument that resembles a known one.

    Args:
        error: The error. Its text stays.
        given: Names of the keyword arguments.
        known: Names of the parameters.
    """
    if "unexpected keyword argument" not in str(error) or "Did you mean" in str(error):
        return
    known = list(known)
    for name in given:
        if name not in known and (matches := difflib.get_close_matches(name, known, 1, cutoff=0.75)):
            error.add_note(f"Did you mean {matches[0]} in place of {name}?")


def refuse_text(loader: LoaderLike) -> None:
    """Raises TypeError if a program has set ``num_workers`` of a loader to a text."""
    value: object = loader.num_workers
    if isinstance(value, str):
        raise TypeError(
            f"num_workers of a DataLoader must be an integer once the loader is made, got {value!r}: pass "
            'num_workers="auto" to its constructor, or set a number'
        )


def first_guess() -> int:
    """Returns the number of workers to begin with: the cores of this process by affinity and CPU quota, divided among
    the ranks that share them, and no more than the free memory allows.
    """
    if not sys.platform.startswith("linux"):
        return max(1, min(_MAX_FIRST_GUESS, (os.cpu_count() or 1) // (local_ranks.size() or 1)))
    from rustloader.system.cores import own_cores

    left = memory_left()
    by_memory = _MAX_FIRST_GUESS if left is None else left // _MEMORY_PER_WORKER
    return max(1, min(_MAX_FIRST_GUESS, own_cores(), by_memory))


def memory_left() -> int | None:
    """Returns a rank's part of the memory that the cgroups and the machine have left, in bytes; None if unknown."""
    from rustloader._core import memory_limits

    left = min((left for _, _, left in memory_limits()), default=None)
    return None if left is None else left // (local_ranks.size() or 1)
