"""Computes the maximum size of a cache."""

from __future__ import annotations

import resource

from rustloader._core import CacheTable, memory_limits
from rustloader.system import local_ranks, procfs

# Minimum number of bytes for samples in a default limit, in addition to the index. It keeps the cache useful even on a
# tiny machine.
_MIN_BYTES = 1 << 20
_PAGE = 4096


def of_memory(rows: int, wanted: int | None, is_shared: bool) -> int:
    """Returns the limit of a cache in memory.

    Raises:
        ValueError: ``wanted`` is more than the available memory, or too little for the index.
    """
    available = min((free for _, _, free in memory_limits()), default=1 << 62)
    mappable = _mappable_bytes()
    maximum = min(available, mappable)
    if wanted is None:
        ranks = 1 if is_shared else local_ranks.size() or 1
        # Half of the address space also stays free, because loaders need some of it for their arenas.
        return _checked(rows, max(maximum // 2 // ranks, CacheTable.overhead(rows) + _MIN_BYTES))
    if wanted > maximum:
        resource_name = "memory" if available <= mappable else "address space or file size (`ulimit -v`, `ulimit -f`)"
        raise ValueError(
            f"memory={wanted} bytes is too large: {maximum} bytes of {resource_name} are available; give a smaller "
            "number, or omit it for half of the available bytes"
        )
    return _checked(rows, wanted)


def of_file(rows: int, wanted: int | None, available: int, present: int) -> int:
    """Returns the limit of a cache in a file.

    Args:
        rows: The number of samples.
        wanted: The requested limit; None for half of the available space.
        available: Available bytes of the file system.
        present: Bytes that the file already occupies there.

    Raises:
        ValueError: ``wanted`` is more than the available space, or too little for the index.
    """
    maximum = min(available + present, _mappable_bytes())
    if wanted is None:
        return _checked(rows, max(maximum // 2, CacheTable.overhead(rows) + _MIN_BYTES))
    if wanted > maximum:
        raise ValueError(f"memory={wanted} bytes is too large: {maximum} bytes are available for the file")
    return _checked(rows, wanted)


def _checked(rows: int, wanted: int) -> int:
    limit = wanted // _PAGE * _PAGE
    overhead = CacheTable.overhead(rows)
    if limit <= overhead:
        text = f"memory={wanted} bytes is too small: the index alone takes {overhead} bytes for {rows} samples"
        raise ValueError(text)
    return limit


def _mappable_bytes() -> int:
    """Returns the maximum size in bytes of a file that this process may still write and map."""
    space, length = resource.getrlimit(resource.RLIMIT_AS)[0], resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    used = int((procfs.read("/proc/self/statm") or "0").split()[0]) * resource.getpagesize()
    maximum = 1 << 46 if space == resource.RLIM_INFINITY else max(space - used, 0)
    return maximum if length == resource.RLIM_INFINITY else min(maximum, length)
