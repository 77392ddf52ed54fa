"""Processor time of workers.

The kernel keeps it; it is read when statistics are taken, and once more before workers are ended. A worker itself only
notes, once, what its start has taken: that of Python and of the program's imports is no work on batches.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from itertools import zip_longest
from typing import NamedTuple

from rustloader._core import Meter, WorkerTotals
from rustloader._core import figures as figures_of
from rustloader.procfs import read, stat

# The number of the field in /proc/PID/stat, from 0, behind the name of the program: the process's start.
_STARTED = 19


class ProcessorTime(NamedTuple):
    """Seconds that a process ran on a core, and seconds that its main thread waited for one (None: unknown)."""

    cpu: float
    queued: float | None


class WorkTime(NamedTuple):
    """Processor time of a worker's processes since their first tasks; None where it is unknown for all of them.

    ``unmeasured`` is how many of the worker's busy seconds belong to processes whose processor time is unknown.
    """

    cpu: float | None = None
    queued: float | None = None
    unmeasured: float = 0.0


NOTHING = WorkTime()


def of_process(pid: int, start: str | None = None) -> ProcessorTime | None:
    """Processor time of a process that exists; None if the system does not report it.

    All threads count, and child processes that it has waited for. With ``start``, what `started` has given: None, too,
    if another process has the number by now.
    """
    # Before the clock: where the process ends in between, all of it is unknown.
    queued = _queued(pid)
    own = of_threads(pid)
    if own is None:
        return None
    fields = stat(pid)
    if start is not None and fields[_STARTED : _STARTED + 1] != [start]:
        return None
    # cutime and cstime, in ticks.
    return ProcessorTime(own + sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK"), queued)


def of_threads(pid: int) -> float | None:
    """Seconds that all threads of a process ran, those that have ended included; None if the process has ended."""
    # What clock_getcpuclockid(3) computes: MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED).
    with contextlib.suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)
    return None


def started(pid: int) -> str | None:
    """When a process was started, as the kernel writes it: tells it from a later one of the same number."""
    fields = stat(pid)
    return fields[_STARTED] if len(fields) > _STARTED else None


def of_work(time: ProcessorTime | None, figures: WorkerTotals) -> WorkTime:
    """What of a process's time is work on batches: all since its first task.

    Args:
        time: all of its time; None where it is unknown.
        figures: a worker's, of one iterator.
    """
    if not figures.start_cpu:
        return WorkTime(0.0, 0.0)
    if time is None:
        return WorkTime(unmeasured=figures.fetch + figures.collate + figures.pack + figures.publish)
    queued = None if time.queued is None else max(0.0, time.queued - figures.start_queued)
    return WorkTime(max(0.0, time.cpu - figures.start_cpu), queued)


def _queued(pid: int) -> float | None:
    fields = (read(f"/proc/{pid}/schedstat") or "").split()
    return int(fields[1]) / 1e9 if len(fields) == 3 else None


class Workers:
    """The worker processes of one engine, by the worker's number, and the meter of that engine."""

    def __init__(self, pids: list[int], meter: Meter) -> None:
        self._processes = [(pid, started(pid)) for pid in pids]
        self._meter = meter
        self._ended: list[WorkTime] | None = None

    @property
    def ended(self) -> bool:
        """True once `end` was called."""
        return self._ended is not None

    def end(self) -> None:
        """Keeps the times as they are now: the processes are about to end."""
        # While the interpreter exits, parts of Python are already gone.
        if self._ended is None and not sys.is_finalizing():
            self._ended = self.times()

    def times(self) -> list[WorkTime]:
        """By the worker's number."""
        if self._ended is not None:
            return self._ended
        workers = figures_of([self._meter]).workers
        times = [of_process(pid, start) for pid, start in self._processes]
        # In a forked child there may be no figures.
        found = [of_work(time, figures) for time, figures in zip(times, workers, strict=False)]
        # Where another thread has ended the processes meanwhile, some were no longer there to ask.
        return found if self._ended is None else self._ended


def total(first: list[WorkTime], second: list[WorkTime]) -> list[WorkTime]:
    """Sums by the worker's number."""
    return [_sum(a, b) for a, b in zip_longest(first, second, fillvalue=NOTHING)]


def _sum(a: WorkTime, b: WorkTime) -> WorkTime:
    unmeasured = a.unmeasured + b.unmeasured
    if a.cpu is None or b.cpu is None:
        known = b if a.cpu is None else a
        return known._replace(unmeasured=unmeasured)
    queued = None if a.queued is None or b.queued is None else a.queued + b.queued
    return WorkTime(a.cpu + b.cpu, queued, unmeasured)
