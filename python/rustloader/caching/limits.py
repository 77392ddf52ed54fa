"""Computes the maximum size of a cache."""

from __future__ import annotations

import resource

from rustloader._core import CacheTable, address_space_left, memory_limits
from rustloader.system import local_ranks

# Minimum number of bytes for samples in a default limit, in addition to the index. It keeps the cache useful even on a
# tiny machine.
_MIN_BYTES = 1 << 20
_PAGE = 4096
# A number of bytes that stands for no limit.
_UNLIMITED = 1 << 46


def of_memory(rows: int, wanted: int | None, is_shared: bool) -> int:
    """Returns the limit of a cache in memory, which all ranks of this machine share, or only this process uses."""
    available = min((free for _, _, free in memory_limits()), default=_UNLIMITED)
    ranks = 1 if is_shared else local_ranks.size() or 1
    return _limit(rows, wanted, available, "memory", ranks)


def of_file(rows: int, wanted: int | None, available: int) -> int:
    """Returns the limit of a cache in a file, which may occupy ``available`` bytes of its file system."""
    return _limit(rows, wanted, available, "space for the file", ranks=1)


def _limit(rows: int, wanted: int | None, available: int, what: str, ranks: int) -> int:
    """Returns the limit of a cache in bytes.

    Args:
        rows: The number of samples.
        wanted: The requested limit; None for half of what is available, divided among the ranks.
        available: The available bytes.
        what: What is available.
        ranks: The number of ranks that have such a cache each.

    Raises:
        ValueError: ``wanted`` is more than is available, or too little for the index.
    """
    overhead, mappable = CacheTable.overhead(rows), _mappable_bytes()
    maximum = min(available, mappable)
    if wanted is None:
        # Half of the address space also stays free, because loaders need some of it for their arenas.
        wanted = max(maximum // 2 // ranks, overhead + _MIN_BYTES)
    elif wanted > maximum:
        scarce = what if available <= mappable else "address space or file size (`ulimit -v`, `ulimit -f`)"
        raise ValueError(
            f"memory={wanted} bytes is too large: {maximum} bytes of {scarce} are available; give a smaller number, or "
            "omit it for half of the available bytes"
        )
    limit = wanted // _PAGE * _PAGE
    if limit <= overhead:
        text = f"memory={wanted} bytes is too small: the index alone takes {overhead} bytes for {rows} samples"
        raise ValueError(text)
    return limit


def _mappable_bytes() -> int:
    """Returns the maximum size in bytes of a file that this process may still write and map."""
    space, length = address_space_left(), resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return min(_UNLIMITED if space is None else space, _UNLIMITED if length == resource.RLIM_INFINITY else length)
