"""Reads the content and the counters of another process's cache, from its file alone. Nothing is mapped or written."""

from __future__ import annotations

import os
import struct

from rustloader._core import CACHE_VERSION, CacheTable
from rustloader.caching.usage import CacheUsage

# src/cache/mod.rs has a picture of the file: the words of its header, and 64 stripes of 8 counters.
_MAGIC = b"RLCACHE1"
_WORDS, _COUNTERS = struct.Struct("=8s5Q"), struct.Struct("=512Q")
_COUNTERS_AT, _STRIPE = 4096, 8


def usage_of(descriptor: int) -> CacheUsage | None:
    """Returns the content and the counters of the cache in a file; None if the file is no cache of this version."""
    header = os.pread(descriptor, _COUNTERS_AT + _COUNTERS.size, 0)
    if len(header) < _COUNTERS_AT + _COUNTERS.size:
        return None
    magic, version, rows, limit, end, stored = _WORDS.unpack_from(header)
    if magic != _MAGIC or version != CACHE_VERSION:
        return None
    counters = _COUNTERS.unpack_from(header, _COUNTERS_AT)
    hits, misses, refused, damaged = (sum(counters[place::_STRIPE]) for place in range(4))
    return CacheUsage(
        hits=hits,
        misses=misses,
        samples_bytes=stored,
        bytes_left=max(0, limit - end),
        bytes_unused=max(0, end - CacheTable.overhead(rows) - stored),
        refused=refused,
        damaged=damaged,
        limit=limit,
    )
