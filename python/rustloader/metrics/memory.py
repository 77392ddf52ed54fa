"""Private memory of workers.

The kernel counts it page by page, which takes milliseconds for each GB. So it is read only when statistics are taken
and before workers end, only of processes whose page faults show that they have grown much since the last time, and for
at most 1 % of the time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from rustloader.system import procfs

# Index of the number of minor page faults among the fields of /proc/PID/stat that `procfs.stat` returns.
_MINOR_FAULTS_FIELD = 7
# Bytes that page faults have added since the last reading, from which it is worth another.
_FAULTED_STEP = 16 << 20
# Share of the time that readings may take.
_TIME_SHARE = 0.01


def own(pid: int, rollup: dict[str, int] | None = None) -> int | None:
    """Returns the number of bytes that a process alone has, without shared memory such as an arena; None if it is not
    readable.

    Args:
        pid: The process.
        rollup: Its `procfs.rollup`, if it was read already.
    """
    if rollup is None:
        rollup = procfs.rollup(pid)
    shared = procfs.amounts(procfs.read(f"/proc/{pid}/status")).get("RssShmem")
    if shared is None or not rollup:
        return None
    # Pages of the arena that the main process has not touched count as private. Those that two processes have touched
    # are half of one's proportional set.
    alone = max(0, 2 * rollup.get("Pss_Shmem", 0) - shared)
    return max(0, rollup.get("Private_Clean", 0) + rollup.get("Private_Dirty", 0) - alone)


class Allowance:
    """The time that readings may take: that of one, and a share of the time since the first."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._spent = 0.0

    def is_left(self) -> bool:
        return self._spent <= _TIME_SHARE * (time.monotonic() - self._begin)

    def spend(self, since: float) -> None:
        self._spent += time.monotonic() - since


class _Known(NamedTuple):
    """The known figures of a process: its bytes of page faults at the last reading (0: none yet), and its own bytes."""

    pid: int
    faulted: int
    own: int | None


class WorkerMemory:
    """The private memory of the workers of one engine, by worker number."""

    def __init__(self, count: int, allowance: Allowance) -> None:
        self._allowance = allowance
        self._known: list[_Known | None] = [None] * count

    def update(self, processes: Sequence[tuple[int, str | None] | None]) -> None:
        """Reads the memory of running processes, given as pids with start times. Ended ones keep their last figures."""
        waiting = []
        for number, process in enumerate(processes):
            faulted = None if process is None else _faulted(*process)
            if process is None or faulted is None:
                continue
            known = self._known[number]
            if known is None or known.pid != process[0]:
                known = _Known(process[0], 0, None)
            if faulted - known.faulted >= _FAULTED_STEP:
                waiting.append((faulted - known.faulted, number))
            if known.faulted == 0:
                # Each page that a process has for itself was a fault, and there are few.
                known = known._replace(own=faulted if faulted < _FAULTED_STEP else None)
            self._known[number] = known
        for _, number in sorted(waiting, reverse=True):
            known = self._known[number]
            if known is None or not self._allowance.is_left():
                break
            since = time.monotonic()
            faulted, own_bytes = _faulted(known.pid), own(known.pid)
            self._allowance.spend(since)
            if faulted is not None and own_bytes is not None:
                self._known[number] = _Known(known.pid, faulted, own_bytes)

    def figures(self) -> list[int | None]:
        """Returns the memory in bytes by worker number; None: unknown."""
        return [None if known is None else known.own for known in self._known]


def _faulted(pid: int, start: str | None = None) -> int | None:
    """Returns the size of the pages of a process's minor faults in bytes, without huge pages; None if it has ended."""
    fields = procfs.stat(pid)
    if len(fields) <= procfs.STARTED or fields[0] in "ZX" or (start is not None and fields[procfs.STARTED] != start):
        return None
    return int(fields[_MINOR_FAULTS_FIELD]) * os.sysconf("SC_PAGE_SIZE")
