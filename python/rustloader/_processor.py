"""Processor time of workers.

It is read from the kernel when statistics are taken, and once more before workers are ended: the workers themselves
pay nothing for it.
"""

from __future__ import annotations

import contextlib
import os
import time
from itertools import zip_longest
from typing import NamedTuple

__all__ = ["ProcessorTime", "Workers", "of_process", "total"]


class ProcessorTime(NamedTuple):
    """Seconds that a process ran on a core, and seconds that its main thread waited for one (None: unknown)."""

    cpu: float
    queued: float | None


def of_process(pid: int) -> ProcessorTime | None:
    """Processor time of a process that exists; None where the system does not tell it.

    All threads count, and child processes that it has waited for.
    """
    # What clock_getcpuclockid(3) computes: MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED).
    clock = (~pid << 3) | 2
    try:
        own = time.clock_gettime(clock)
    except OSError:
        return None
    return ProcessorTime(own + _children(pid), _queued(pid))


def _children(pid: int) -> float:
    fields = (_read(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    # cutime and cstime, in ticks.
    return sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")


def _queued(pid: int) -> float | None:
    fields = (_read(f"/proc/{pid}/schedstat") or "").split()
    return int(fields[1]) / 1e9 if len(fields) == 3 else None


def _read(path: str) -> str | None:
    with contextlib.suppress(OSError), open(path) as file:
        return file.read()
    return None


class Workers:
    """The worker processes of one iterator."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._ended: list[ProcessorTime | None] | None = None

    @property
    def ended(self) -> bool:
        """True once `end` was called."""
        return self._ended is not None

    def end(self) -> None:
        """Keeps the times as they are now: the processes are about to end."""
        if self._ended is None:
            self._ended = self.times()

    def times(self) -> list[ProcessorTime | None]:
        """By the worker's number; None where the process has gone without leaving its time."""
        return [of_process(pid) for pid in self._pids] if self._ended is None else self._ended


def total(first: list[ProcessorTime | None], second: list[ProcessorTime | None]) -> list[ProcessorTime | None]:
    """Sums by the worker's number. What is unknown in one is unknown in the sum."""
    nothing = ProcessorTime(0.0, 0.0)
    return [_sum(a, b) for a, b in zip_longest(first, second, fillvalue=nothing)]


def _sum(a: ProcessorTime | None, b: ProcessorTime | None) -> ProcessorTime | None:
    if a is None or b is None:
        return None
    queued = None if a.queued is None or b.queued is None else a.queued + b.queued
    return ProcessorTime(a.cpu + b.cpu, queued)
