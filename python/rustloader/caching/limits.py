"""The number of bytes that a cache may take."""

from __future__ import annotations

import resource

from rustloader._core import CacheTable, memory_limits
from rustloader.system import local_ranks, procfs

# Never less than this much beyond the index, so that even a tiny machine gets a cache that does something.
_MIN_BYTES = 1 << 20
_PAGE = 4096


def of_memory(rows: int, wanted: int | None, is_shared: bool) -> int:
    """Returns the limit of a cache in memory.

    Raises:
        ValueError: There is not as much memory, or too little for the index.
    """
    left = min((free for _, _, free in memory_limits()), default=1 << 62)
    space = _space_left()
    most = min(left, space)
    if wanted is None:
        ranks = 1 if is_shared else local_ranks.size() or 1
        # Half of the address space stays, too: the arenas of loaders want some.
        return _checked(rows, max(most // 2 // ranks, CacheTable.overhead(rows) + _MIN_BYTES))
    if wanted > most:
        what = "memory are" if left <= space else "address space (RLIMIT_AS, `ulimit -v`) are"
        raise ValueError(
            f"memory={wanted} bytes is too large: {most} bytes of {what} left; give a smaller number, or none "
            "for half of what is left"
        )
    return _checked(rows, wanted)


def of_file(rows: int, wanted: int | None, left: int, present: int) -> int:
    """Returns the limit of a cache in a file.

    Args:
        rows: The number of samples.
        wanted: The limit that was asked for.
        left: Bytes that the file system has left.
        present: Bytes that the file has on it.

    Raises:
        ValueError: There is not as much space, or too little for the index.
    """
    most = min(left + present, _space_left())
    if wanted is None:
        return _checked(rows, max(most // 2, CacheTable.overhead(rows) + _MIN_BYTES))
    if wanted > most:
        raise ValueError(f"memory={wanted} bytes is too large: {most} bytes are left for the file")
    return _checked(rows, wanted)


def _checked(rows: int, wanted: int) -> int:
    limit = wanted // _PAGE * _PAGE
    overhead = CacheTable.overhead(rows)
    if limit <= overhead:
        text = f"memory={wanted} bytes has no room beside the index, which takes {overhead} bytes for {rows} samples"
        raise ValueError(text)
    return limit


def _space_left() -> int:
    """Returns how many bytes this process may still map, and write to a file."""
    space, length = resource.getrlimit(resource.RLIMIT_AS)[0], resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    used = int((procfs.read("/proc/self/statm") or "0").split()[0]) * resource.getpagesize()
    most = 1 << 46 if space == resource.RLIM_INFINITY else max(space - used, 0)
    return most if length == resource.RLIM_INFINITY else min(most, length)
