"""Reads the sizes and counters of another process's cache from its file, without mapping the file or writing to it."""

from __future__ import annotations

import os

from rustloader._core import CACHE_HEADER, CacheTable
from rustloader.caching.usage import CacheUsage


def usage_of(descriptor: int) -> CacheUsage | None:
    """Returns the sizes and counters of the cache in a file, or None if the file is not a cache of this version."""
    usage = CacheTable.usage_of_header(os.pread(descriptor, CACHE_HEADER, 0))
    return None if usage is None else CacheUsage(**usage)
