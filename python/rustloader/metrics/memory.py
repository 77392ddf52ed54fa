"""Private memory of workers.

The kernel counts this memory page by page, which takes milliseconds per GB. So `WorkerMemory` reads it only when
statistics are taken and before workers end, and only for processes whose page faults show much growth since the last
reading. An `Allowance` limits the readings to about 1 % of the time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from rustloader.system import procfs

# Index of the number of minor page faults among the fields of /proc/PID/stat that `procfs.stat` returns.
_MINOR_FAULTS_FIELD = 7
# Number of bytes that page faults must add before the next reading.
_FAULTED_STEP = 16 << 20
# Maximum share of the time to spend on readings.
_TIME_SHARE = 0.01


def private_bytes(pid: int, rollup: dict[str, int] | None = None) -> int | None:
    """Returns the size in bytes of the memory that only this process uses, without shared memory such as an arena.

    Returns None if the kernel does not report it.

    Args:
        pid: ID of the process.
        rollup: The result of `procfs.rollup` for the process, if already read.
    """
    if rollup is None:
        rollup = procfs.rollup(pid)
    shared = procfs.amounts(procfs.read(f"/proc/{pid}/status")).get("RssShmem")
    if shared is None or not rollup:
        return None
    # The kernel counts pages of the arena as private if the main process has not touched them. A page touched by two
    # processes counts half toward the proportional set size (Pss) of each.
    arena_alone = max(0, 2 * rollup.get("Pss_Shmem", 0) - shared)
    return max(0, rollup.get("Private_Clean", 0) + rollup.get("Private_Dirty", 0) - arena_alone)


class Allowance:
    """A limit on the time spent on readings: one reading, plus a share of the time since this object was created."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._spent = 0.0

    def has_remaining(self) -> bool:
        """Returns True if another reading is allowed now."""
        return self._spent <= _TIME_SHARE * (time.monotonic() - self._started)

    def spend(self, since: float) -> None:
        """Counts a reading that started at ``since``, in ``time.monotonic`` seconds, and ends now."""
        self._spent += time.monotonic() - since


class _Reading(NamedTuple):
    """The latest reading of a process.

    Attributes:
        pid: ID of the process.
        faulted: Bytes that its page faults had added at the time of the reading; 0 before the first reading.
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
        """Reads the memory of the running processes that have grown enough, in descending order of growth.

        Stops when the allowance is spent. Processes that have ended keep their last values.

        Args:
            processes: Pid and start time of each process, by worker number; None for a process that has ended.
        """
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
                # Each private page was added by a page fault, so the faulted bytes, while few, serve as the size.
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

    def sizes(self) -> list[int | None]:
        """Returns the private memory in bytes, by worker number; None if unknown."""
        return [None if known is None else known.private_bytes for known in self._readings]


def _faulted(pid: int, start: str | None = None) -> int | None:
    """Returns the bytes that the minor page faults of a process have added, not counting huge pages.

    Returns None if the process has ended, or if the start time differs because another process has the pid now.
    """
    fields = procfs.stat(pid)
    if len(fields) <= procfs.STARTED or fields[0] in "ZX" or (start is not None and fields[procfs.STARTED] != start):
        return None
    return int(fields[_MINOR_FAULTS_FIELD]) * os.sysconf("SC_PAGE_SIZE")
