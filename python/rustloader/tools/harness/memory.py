"""Measures the memory of a process group from outside."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from rustloader.system.procfs import members, proportional

# Minimum seconds between two samples. Sampling takes at most half of the time.
_SAMPLE_INTERVAL = 0.02


class Peak:
    """The peak memory of a process group, determined by sampling.

    Attributes:
        samples: number of samples taken.
        bytes: the highest sample; None if the memory could not be read.
    """

    def __init__(self, group: int) -> None:
        self._group = group
        self._due = 0.0
        self.samples = 0
        self.bytes: int | None = None

    def sample(self) -> None:
        """Takes a sample, or does nothing if the last one is recent."""
        begin = time.monotonic()
        if begin < self._due:
            return
        now = used(self._group)
        if now is not None:
            self.bytes = max(now, self.bytes or 0)
        self.samples += 1
        end = time.monotonic()
        self._due = end + max(_SAMPLE_INTERVAL, end - begin)


def used(group: int) -> int | None:
    """Returns the memory of a process group in bytes; None if it is not readable.

    Pages that several processes map count once. Shared memory that is open but not mapped also counts once.
    """
    sizes: list[int] = []
    mapped, files = set(), dict[tuple[int, int], int]()
    for pid in members(group):
        own = proportional(pid)
        if own is None:  # the process has ended
            continue
        sizes.append(own)
        with contextlib.suppress(OSError):
            mapped |= set(_mapped(pid))
            files |= _shared_files(pid)
    return sum(sizes) + sum(size for file, size in files.items() if file not in mapped) if sizes else None


def _mapped(pid: int) -> Iterator[tuple[int, int]]:
    """Yields the device and inode of each shared memory file that a process maps."""
    with open(f"/proc/{pid}/maps") as file:
        for line in file:
            if "/dev/shm/" in line or "/memfd:" in line:
                _, _, _, device, inode, *_ = line.split()
                major, minor = (int(part, 16) for part in device.split(":"))
                yield os.makedev(major, minor), int(inode)


def _shared_files(pid: int) -> dict[tuple[int, int], int]:
    """Returns the size in bytes of each shared memory file that a process has open, by device and inode."""
    sizes = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith(("/dev/shm/", "/memfd:")):
                status = os.stat(path)
                sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sizes
