"""Caches in files."""

from __future__ import annotations

import fcntl
import json
import os
from typing import Any

from rustloader._core import CACHE_VERSION, CacheTable
from rustloader.caching import limits

# Longest texts in a file's header, in characters.
_LONGEST = 800


def opened(path: str, rows: int, memory: int | None, kind: str, version: str) -> CacheTable:
    """Opens the file of a cache, or makes it. Programs that open it at the same time wait for each other for a moment.

    Raises:
        OSError: The file cannot be opened, enlarged or mapped.
        ValueError: It is no cache, or that of another dataset or version, or there is no space for it.
    """
    meta = {"dataset": kind[:_LONGEST], "version": version}
    if len(version) > _LONGEST:
        raise ValueError(f"version must have at most {_LONGEST} characters, got {len(version)}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        # The kernel releases it with the process.
        fcntl.flock(fd, fcntl.LOCK_EX)
        system, status = os.fstatvfs(fd), os.fstat(fd)
        left, present = system.f_bavail * system.f_frsize, status.st_blocks * 512
        in_memory = _is_in_memory(path)
        head = CacheTable.head(fd)
        if head is None:
            if status.st_size and not _is_unfinished(fd):
                raise ValueError(f"{path} is no cache of rustloader: give another path, or remove the file")
            limit = limits.of_file(rows, memory, left, present)
            os.ftruncate(fd, 0)
            os.ftruncate(fd, limit)
            # A mapped page that the disk has no room for is a SIGBUS. The samples are written by calls.
            os.posix_fallocate(fd, 0, CacheTable.overhead(rows))
            CacheTable.format(fd, rows, limit, json.dumps(meta).encode())
            return CacheTable.open_file(fd, in_memory)
        layout, its_rows, its_limit, its_meta = head
        _compare(path, (layout, its_rows, its_meta), rows, meta)
        if status.st_size < its_limit:
            # It was cut off.
            os.ftruncate(fd, its_limit)
            os.posix_fallocate(fd, 0, CacheTable.overhead(rows))
        table = CacheTable.open_file(fd, in_memory)
        table.reopen()
        if memory is not None and memory > its_limit:
            limit = limits.of_file(rows, memory, left, present)
            os.ftruncate(fd, limit)
            table.grow(limit)
            table = CacheTable.open_file(fd, in_memory)
        return table
    finally:
        # The mapping's own descriptor shares the lock.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _compare(path: str, its: tuple[int, int, bytes], rows: int, meta: dict[str, str]) -> None:
    layout, its_rows, its_meta = its
    if layout != CACHE_VERSION:
        raise ValueError(
            f"{path} has version {layout} of the cache's format, and this rustloader reads {CACHE_VERSION}: give "
            "another path, or remove the file"
        )
    try:
        found = json.loads(its_meta)
    except ValueError:
        found = {}
    differences: list[tuple[str, Any, Any]] = [
        (name, found.get(name), value) for name, value in meta.items() if found.get(name) != value
    ]
    if its_rows != rows:
        differences.insert(0, ("length", its_rows, rows))
    if differences:
        words = ", and ".join(f"{name} {theirs!r} where this one has {ours!r}" for name, theirs, ours in differences)
        raise ValueError(
            f"{path} is the cache of another dataset: it has {words}; give another path, or remove the file"
        )


def _is_unfinished(fd: int) -> bool:
    """Whether a file is one whose maker was killed before it had written the first word."""
    return not any(os.pread(fd, 8, 0))


def _is_in_memory(path: str) -> bool:
    """Whether a file's pages are memory, as those of a tmpfs are."""
    path, best = os.path.realpath(path), ("", "")
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, behind = line.partition(" - ")
            point = before.split(" ")[4].encode("latin-1", "surrogateescape").decode("unicode_escape")
            inside = path == point or path.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best[0]):
                best = point, behind.split(" ")[0]
    return best[1] in ("tmpfs", "ramfs", "rootfs")
