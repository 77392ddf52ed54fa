"""CPU time of workers.

It is read from the kernel when statistics are taken, and once more before the workers exit. The time of a worker's
start, which the worker records, is subtracted, because starting Python and importing the program's modules are not work
on batches. The worker also records the CPU time of fetches, which is not used here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from itertools import zip_longest
from typing import NamedTuple

from rustloader._core import Meter, WorkerTotals
from rustloader._core import figures as totals_of
from rustloader.metrics.fields import CoreUsers
from rustloader.metrics.memory import Allowance, WorkerMemory
from rustloader.system.cores import busy_seconds, share_of_cores
from rustloader.system.procfs import STARTED, read, stat


class ProcessorTime(NamedTuple):
    """Seconds for which a process ran (``cpu``), and for which its main thread waited for a core (``queued``).

    ``queued`` is None if unknown.
    """

    cpu: float
    queued: float | None


class WorkTime(NamedTuple):
    """CPU time of a worker's processes since their first tasks, in seconds.

    Attributes:
        cpu: Seconds for which the processes ran; None if unknown for all of them.
        queued: Seconds for which their main threads waited for a core; None if unknown.
        unmeasured: Busy seconds of processes with unknown CPU time.
    """

    cpu: float | None = None
    queued: float | None = None
    unmeasured: float = 0.0


NO_TIME = WorkTime()


def time_of_process(pid: int, start: str | None = None) -> ProcessorTime | None:
    """Returns the CPU time of a process, including its threads and the children that it has waited for.

    Returns None if the system does not report it. ``start`` is an earlier result of `start_time`. If ``start`` is given
    and another process has the pid by now, the result is None as well.
    """
    # Read before the processor clock. If the process ends in between, the result is None, not a time without `queued`.
    queued = _queued_seconds(pid)
    own = seconds_of_threads(pid)
    if own is None:
        return None
    fields = stat(pid)
    if start is not None and fields[STARTED : STARTED + 1] != [start]:
        return None
    # Items 13 and 14 are cutime and cstime (fields 16 and 17 in proc(5)), in clock ticks.
    return ProcessorTime(own + sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK"), queued)


def seconds_of_threads(pid: int) -> float | None:
    """Returns the seconds for which a process ran, including its ended threads; None if the process has ended."""
    # The clock id of clock_getcpuclockid(3): MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED).
    with contextlib.suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)
    return None


def start_time(pid: int) -> str | None:
    """Returns the start time of a process as the kernel reports it, which distinguishes processes with the same pid."""
    fields = stat(pid)
    return fields[STARTED] if len(fields) > STARTED else None


def time_of_work(time: ProcessorTime | None, totals: WorkerTotals) -> WorkTime:
    """Returns the part of a worker's CPU time that was spent on batches: the time since its first task.

    Args:
        time: The CPU time of the process; None if unknown.
        totals: The worker's counters.
    """
    if not totals.start_cpu:
        return WorkTime(0.0, 0.0)
    if time is None:
        return WorkTime(unmeasured=totals.busy_seconds)
    queued = None if time.queued is None else max(0.0, time.queued - totals.start_queued)
    return WorkTime(max(0.0, time.cpu - totals.start_cpu), queued)


def _queued_seconds(pid: int) -> float | None:
    fields = (read(f"/proc/{pid}/schedstat") or "").split()
    return int(fields[1]) / 1e9 if len(fields) == 3 else None


class _Moment(NamedTuple):
    """The monotonic clock, and the CPU time of all processes (None if unknown) and of this one, in seconds."""

    time: float
    busy: float | None
    main: float

    @classmethod
    def now(cls) -> _Moment:
        return cls(time.monotonic(), busy_seconds(), time.process_time())


class Workers:
    """The worker processes of one engine, by worker number."""

    def __init__(self, pids: list[int], meter: Meter, allowance: Allowance | None = None) -> None:
        # The pid and start time of each process; None after `keep`.
        self._processes: list[tuple[int, str | None] | None] = [(pid, start_time(pid)) for pid in pids]
        self._meter = meter
        # Times of the processes that were replaced.
        self._replaced = [NO_TIME] * len(pids)
        self._ended: list[WorkTime] | None = None
        self._users: CoreUsers | None = None
        self._start = _Moment.now()
        self._memory = WorkerMemory(len(pids), allowance or Allowance())

    @property
    def ended(self) -> bool:
        """True after ``end``."""
        return self._ended is not None

    def end(self) -> None:
        """Saves the current times and memory sizes. Called before the processes end; later calls do nothing."""
        # During finalization, parts of Python are already gone.
        if self._ended is None and not sys.is_finalizing():
            self._memory.update(self._processes)
            self._users = self.core_users()
            self._ended = self.times()

    def core_users(self) -> CoreUsers | None:
        """Returns what used the cores from the start of the workers until ``end``, or until now; None if unknown."""
        if self._ended is not None:
            return self._users
        start, now, workers = self._start, _Moment.now(), 0.0
        for time_, totals in zip(self.times(), totals_of([self._meter]).workers, strict=False):
            if time_.cpu is None:
                return None
            workers += time_.cpu + totals.start_cpu
        if start.busy is None or now.busy is None:
            return None
        main = now.main - start.main
        used = (main, workers, now.busy - start.busy - main - workers)
        shares = [share_of_cores(seconds, now.time - start.time) for seconds in used]
        known = [share for share in shares if share is not None]
        return CoreUsers(*known) if len(known) == len(shares) else None

    def keep(self, worker_id: int) -> None:
        """Saves the times of a process that has ended, before its counters are reset. A second call does nothing."""
        workers = totals_of([self._meter]).workers
        if worker_id < len(workers):
            time = _time_of(self._processes[worker_id], workers[worker_id])
            self._processes[worker_id] = None
            self._replaced[worker_id] = _sum(self._replaced[worker_id], time)

    def replace(self, worker_id: int, pid: int) -> None:
        """Sets the process that replaces an ended one. Called after ``keep``."""
        self._processes[worker_id] = pid, start_time(pid)

    def private(self) -> list[int | None]:
        """Returns the private memory of the latest processes in bytes, by worker number; None if unknown."""
        if self._ended is None:
            self._memory.update(self._processes)
        return self._memory.sizes()

    def times(self) -> list[WorkTime]:
        """Returns the CPU times, by worker number."""
        if self._ended is not None:
            return self._ended
        workers = totals_of([self._meter]).workers
        # In a forked child there may be no counters. `map` then stops at the shorter list.
        times = sum_by_worker(self._replaced, list(map(_time_of, self._processes, workers)))
        # If another thread has called `end` meanwhile, some processes may have ended before they were read.
        return times if self._ended is None else self._ended


def _time_of(process: tuple[int, str | None] | None, totals: WorkerTotals) -> WorkTime:
    return NO_TIME if process is None else time_of_work(time_of_process(*process), totals)


def sum_by_worker(first: list[WorkTime], second: list[WorkTime]) -> list[WorkTime]:
    """Adds two lists of times, by worker number."""
    return [_sum(a, b) for a, b in zip_longest(first, second, fillvalue=NO_TIME)]


def _sum(a: WorkTime, b: WorkTime) -> WorkTime:
    unmeasured = a.unmeasured + b.unmeasured
    if a.cpu is None or b.cpu is None:
        known = b if a.cpu is None else a
        return known._replace(unmeasured=unmeasured)
    queued = None if a.queued is None or b.queued is None else a.queued + b.queued
    return WorkTime(a.cpu + b.cpu, queued, unmeasured)
