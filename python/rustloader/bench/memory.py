"""The memory of processes, looked at from outside."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from rustloader.procfs import members, proportional

__all__ = ["Peak", "used"]

# Seconds between two looks, at the least; and at most half of the time goes into looking.
_BETWEEN = 0.02


class Peak:
    """The most that a process group has had at any look."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._due = 0.0
        self.looks = 0
        # Bytes; None where the system does not say.
        self.bytes: int | None = None

    def look(self) -> None:
        """Looks, unless it has just done so."""
        begin = time.monotonic()
        if begin < self._due:
            return
        now = used(self._group)
        if now is not None:
            self.bytes = max(now, self.bytes or 0)
        self.looks += 1
        end = time.monotonic()
        self._due = end + max(_BETWEEN, end - begin)


def used(group: int) -> int | None:
    """Bytes of a process group. Pages that several processes map count once, and so does shared memory that is under
    way, open but not mapped. None where the system does not say."""
    total, mapped, files = 0, set(), dict[tuple[int, int], int]()
    found = False
    for pid in members(group):
        # A process that ends meanwhile counts with nothing.
        own = proportional(pid)
        if own is None:
            continue
        total, found = total + own, True
        with contextlib.suppress(OSError):
            mapped |= set(_mapped(pid))
            files |= _shared_files(pid)
    if not found:
        return None
    return total + sum(size for file, size in files.items() if file not in mapped)


def _mapped(pid: int) -> Iterator[tuple[int, int]]:
    """(device, inode) of the shared memory that a process maps."""
    with open(f"/proc/{pid}/maps") as file:
        for line in file:
            if "/dev/shm/" in line or "/memfd:" in line:
                _, _, _, device, inode, *_ = line.split()
                major, minor = (int(part, 16) for part in device.split(":"))
                yield os.makedev(major, minor), int(inode)


def _shared_files(pid: int) -> dict[tuple[int, int], int]:
    """Bytes of the shared memory that a process has open, by (device, inode)."""
    sizes = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith(("/dev/shm/", "/memfd:")):
                status = os.stat(path)
                sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sizes
