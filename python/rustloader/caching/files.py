"""Opens and creates the files of caches."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import sys
from typing import Any

from rustloader._core import CACHE_HEADER, CACHE_VERSION, CacheTable
from rustloader.caching import limits
from rustloader.caching.comparing import first_difference

logger = logging.getLogger("rustloader")

# The first bytes of a file.
_MAGIC = b"RLCACHE1"
# Maximum length of the version and of the dataset's class in a file's header, in characters. In JSON, a character takes
# up to 4 bytes, or 6 if it is a control character; the header has room for 3,840.
_MAX_VERSION, _MAX_CLASS = 400, 300


def open_table(path: str, dataset: Any, rows: int, memory: int | None, version: str) -> CacheTable:
    """Opens the file of a cache, or creates it. Programs that open it at the same time wait for one another briefly.

    Raises:
        OSError: The file cannot be opened, enlarged or mapped.
        ValueError: The file is not a cache, belongs to another dataset or version, or would exceed the available space.
    """
    meta = {"dataset": type(dataset).__qualname__[:_MAX_CLASS], "version": version}
    if len(version) > _MAX_VERSION:
        raise ValueError(f"version must have at most {_MAX_VERSION} characters, got {len(version)}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError(f"{path} is not a regular file: give another path")
        _lock(fd, path)
        table, is_new = _table(fd, path, rows, memory, meta)
    except OSError as error:
        # Errors from calls with a descriptor lack the file's name.
        error.filename = error.filename or path
        raise
    finally:
        # Unlocks explicitly, because closing is not enough: the mapping has a duplicate of the descriptor, which shares
        # the lock.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
    if not is_new and (row := first_difference(table, dataset)) is not None:
        raise ValueError(
            f"{path} is the cache of another dataset: sample {row} differs there; give another path, or remove the file"
        )
    return table


def _lock(fd: int, path: str) -> None:
    """Locks the file while it is being opened. The kernel releases the lock if the process ends."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("cache(path=%r): waiting for another program that is opening the file or has locked it", path)
        fcntl.flock(fd, fcntl.LOCK_EX)


def _table(fd: int, path: str, rows: int, memory: int | None, meta: dict[str, str]) -> tuple[CacheTable, bool]:
    """Returns the table of a file, and whether it is new."""
    system, status = os.fstatvfs(fd), os.fstat(fd)
    available, present = system.f_bavail * system.f_frsize, status.st_blocks * 512
    in_memory = _is_in_memory(path)
    head = CacheTable.head(fd)
    if head is None:
        if status.st_size and not _is_unfinished(fd, status.st_size):
            raise ValueError(f"{path} is not a cache of rustloader: give another path, or remove the file")
        limit = limits.of_file(rows, memory, available, present)
        os.ftruncate(fd, 0)
        os.ftruncate(fd, limit)
        # Access to a mapped page for which the disk has no room raises SIGBUS, so the space for the index is allocated
        # now. Samples are written with system calls instead.
        os.posix_fallocate(fd, 0, CacheTable.overhead(rows))
        CacheTable.format(fd, rows, limit, json.dumps(meta, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        return CacheTable.open_file(fd, in_memory, limit), True
    layout, stored_rows, stored_limit, stored_meta = head
    _compare(path, (layout, stored_rows, stored_meta), rows, meta)
    if status.st_size < stored_limit:
        # The file was truncated.
        os.ftruncate(fd, stored_limit)
        os.posix_fallocate(fd, 0, CacheTable.overhead(rows))
    table = CacheTable.open_file(fd, in_memory, status.st_size)
    table.reopen()
    if memory is not None and memory > stored_limit:
        limit = limits.of_file(rows, memory, available, present)
        os.ftruncate(fd, limit)
        table.grow(limit)
        table = CacheTable.open_file(fd, in_memory, limit)
    return table, False


def _compare(path: str, head: tuple[int, int, bytes], rows: int, meta: dict[str, str]) -> None:
    layout, stored_rows, stored_meta = head
    if layout != CACHE_VERSION:
        raise ValueError(
            f"{path} has version {layout} of the cache format, but this rustloader reads {CACHE_VERSION}: give "
            "another path, or remove the file"
        )
    try:
        stored = json.loads(stored_meta)
    except ValueError:
        stored = {}
    differences: list[tuple[str, Any, Any]] = [
        (name, stored.get(name), value) for name, value in meta.items() if stored.get(name) != value
    ]
    if stored_rows != rows:
        differences.insert(0, ("length", stored_rows, rows))
    if differences:
        text = ", and ".join(f"{name} {there!r} instead of {here!r}" for name, there, here in differences)
        raise ValueError(
            f"{path} is the cache of another dataset: it has {text}; give another path, or remove the file"
        )


def _is_unfinished(fd: int, length: int) -> bool:
    """Returns True if the process that created a file was killed before the file became a cache, or if the file
    begins like a cache but is shorter than a header."""
    head = os.pread(fd, CACHE_HEADER, 0)
    if head.startswith(_MAGIC):
        return length < CACHE_HEADER
    # The limit is written before the magic bytes.
    return not any(head) or (not any(head[:8]) and int.from_bytes(head[24:32], sys.byteorder) == length)


def _is_in_memory(path: str) -> bool:
    """Returns True if a file is stored in memory, as in a tmpfs."""
    path, best = os.path.realpath(path), ("", "")
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            mount, _, file_system = line.partition(" - ")
            point = mount.split(" ")[4].encode("latin-1", "surrogateescape").decode("unicode_escape")
            inside = path == point or path.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best[0]):
                best = point, file_system.split(" ")[0]
    return best[1] in ("tmpfs", "ramfs", "rootfs")
