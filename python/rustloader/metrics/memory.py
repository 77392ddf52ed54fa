"""Private memory of workers.

The kernel counts it page by page, which takes milliseconds per GB. So it is read only when statistics are taken and
before workers end, only for processes whose page faults show much growth since the last reading, and for at most 1 % of
the time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from rustloader.system import procfs

# Index of the number of minor page faults among the fields of /proc/PID/stat that `procfs.stat` returns.
_MINOR_FAULTS_FIELD = 7
# Minimum number of bytes added by page faults since the last reading for another one.
_FAULTED_STEP = 16 << 20
# Maximum share of the time that is spent on readings.
_TIME_SHARE = 0.01


def private_bytes(pid: int, rollup: dict[str, int] | None = None) -> int | None:
    """Returns the size of the memory that only this process uses, without shared memory such as an arena, in bytes.

    Returns None if it is not readable.

    Args:
        pid: The process.
        rollup: Its `procfs.rollup`, if already read.
    """
    if rollup is None:
        rollup = procfs.rollup(pid)
    shared = procfs.amounts(procfs.read(f"/proc/{pid}/status")).get("RssShmem")
    if shared is None or not rollup:
        return None
    # The kernel counts pages of the arena as private if the main process has not touched them. A page touched by two
    # processes counts half in the proportional set of each.
    arena_alone = max(0, 2 * rollup.get("Pss_Shmem", 0) - shared)
    return max(0, rollup.get("Private_Clean", 0) + rollup.get("Private_Dirty", 0) - arena_alone)


class Allowance:
    """Limits the time spent on readings to one reading plus a share of the time since the creation of this object."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._spent = 0.0

    def has_remaining(self) -> bool:
        """Returns True if another reading is allowed now."""
        return self._spent <= _TIME_SHARE * (time.monotonic() - self._started)

    def spend(self, since: float) -> None:
        """Adds a reading that began at a time of ``time.monotonic`` and ends now."""
        self._spent += time.monotonic() - since


class _Reading(NamedTuple):
    """The latest reading of a process.

    Attributes:
        pid: The process.
        faulted: Bytes of its page faults at that time; 0 before the first reading.
        private_bytes: Its private memory in bytes; None if unknown.
    """

    pid: int
    faulted: int
    private_bytes: int | None


class WorkerMemory:
    """The private memory of the workers of one engine, by worker number."""

    def __init__(self, count: int, allowance: Allowance) -> None:
        self._allowance = allowance
        self._readings: list[_Reading | None] = [None] * count

    def update(self, processes: Sequence[tuple[int, str | None] | None]) -> None:
        """Reads the memory of running processes, given by pid and start time. Ended ones keep their last figures."""
        due = []
        for number, process in enumerate(processes):
            faulted = None if process is None else _faulted(*process)
            if process is None or faulted is None:
                continue
            known = self._readings[number]
            if known is None or known.pid != process[0]:
                known = _Reading(process[0], 0, None)
            if faulted - known.faulted >= _FAULTED_STEP:
                due.append((faulted - known.faulted, number))
            if known.faulted == 0:
                # Each private page was once a fault, so few faults mean little private memory.
                known = known._replace(private_bytes=faulted if faulted < _FAULTED_STEP else None)
            self._readings[number] = known
        for _, number in sorted(due, reverse=True):
            known = self._readings[number]
            if known is None or not self._allowance.has_remaining():
                break
            since = time.monotonic()
            faulted, private = _faulted(known.pid), private_bytes(known.pid)
            self._allowance.spend(since)
            if faulted is not None and private is not None:
                self._readings[number] = _Reading(known.pid, faulted, private)

    def figures(self) -> list[int | None]:
        """Returns the private memory in bytes, by worker number; None if unknown."""
        return [None if known is None else known.private_bytes for known in self._readings]


def _faulted(pid: int, start: str | None = None) -> int | None:
    """Returns the bytes added by the minor page faults of a process, without huge pages; None if it has ended."""
    fields = procfs.stat(pid)
    if len(fields) <= procfs.STARTED or fields[0] in "ZX" or (start is not None and fields[procfs.STARTED] != start):
        return None
    return int(fields[_MINOR_FAULTS_FIELD]) * os.sysconf("SC_PAGE_SIZE")
