"""Reads the content and the counters of another process's cache, from its file alone. Nothing is mapped or written."""

from __future__ import annotations

import os

from rustloader._core import CACHE_HEADER, CacheTable
from rustloader.caching.usage import CacheUsage


def usage_of(descriptor: int) -> CacheUsage | None:
    """Returns the content and the counters of the cache in a file; None if the file is no cache of this version."""
    usage = CacheTable.usage_of_header(os.pread(descriptor, CACHE_HEADER, 0))
    return None if usage is None else CacheUsage(**usage)
