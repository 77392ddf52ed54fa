"""The model of ``top``: computes the description of a loader from two observations of its shared memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import rustloader.system.procfs as procfs
from rustloader._core import Observed, ObservedWorker, Totals, WorkerTotals
from rustloader.metrics.cpu_time import NO_TIME, WorkTime, time_of_process, time_of_work
from rustloader.metrics.fields import SchedulingStats
from rustloader.metrics.memory import private_bytes
from rustloader.metrics.stats import Stats, fields_of_totals, worker_stats
from rustloader.metrics.verdict import MIN_BATCHES, Verdict
from rustloader.system.cores import usable_cores
from rustloader.tools.top import processes
from rustloader.tools.top.processes import LoaderArena

# A worker is stuck if its current batch has taken at least this many seconds, and this many times its mean time per
# batch.
_LONG_SECONDS, _LONG_MULTIPLE = 2.0, 10.0
# A worker is also stuck if its start or its first batch has taken at least this many seconds.
_LONG_AT_FIRST = 30.0
# Minimum seconds that a verdict must cover to be reliable.
_SETTLED_SECONDS = 10.0
# The states of a busy worker, and the names by which they are shown.
_BUSY = {"fetch": "fetching", "collate": "collating", "pack": "packing", "publish": "sending"}


@dataclass(frozen=True)
class Observation:
    """The state of an iterator at one moment.

    Attributes:
        file: device and inode of the arena.
        figures: the result of ``_core.inspect_arena``.
        pids: process IDs of the workers in this PID namespace; None for one that is unknown.
        times: CPU time that each worker has spent on batches.
        ended: workers that had ended before ``figures`` was read. Only for these is the state in ``figures`` final.
    """

    file: tuple[int, int]
    figures: Observed
    pids: tuple[int | None, ...]
    times: tuple[WorkTime, ...]
    ended: frozenset[int] = frozenset()

    @property
    def key(self) -> tuple[tuple[int, int], float]:
        """Identifies the iterator. Includes the start time, because a later iterator may use the same arena."""
        return self.file, self.figures.started


def observe(pid: int) -> list[Observation]:
    """Observes the iterators of a process, oldest first.

    Raises ``NothingToSee`` if the process has ended, or if its loaders cannot be read.
    """
    ended: frozenset[int] = frozenset()
    while True:
        observations = _observe(pid, ended)
        workers = {worker for it in observations for worker in it.pids if worker is not None}
        # A worker that ends sets its state first, possibly after the state was read here. So read the state again.
        newly_ended = {worker for worker in workers - ended if procfs.has_ended(worker)}
        if not newly_ended:
            return observations
        ended |= newly_ended


def _observe(pid: int, ended: frozenset[int]) -> list[Observation]:
    loaders = processes.loaders(pid)
    if procfs.has_ended(pid):
        raise processes.NothingToSee(f"process {pid} has ended")
    inner, outer = processes.inner_pid(pid), processes.outer_pids(pid)
    return [_observe_iterator(it, outer, ended) for it in loaders if it.figures.pid == inner]


def _observe_iterator(loader: LoaderArena, outer: dict[int, int] | None, ended: frozenset[int]) -> Observation:
    totals = loader.figures.totals.workers
    inner = [worker.pid for worker in totals]
    pids = tuple((pid if outer is None else outer.get(pid)) or None for pid in inner)
    times = (None if pid is None else time_of_process(pid) for pid in pids)
    work = tuple(time_of_work(time, worker) for time, worker in zip(times, totals, strict=True))
    return Observation(loader.file, loader.figures, pids, work, ended.intersection(pids))


@dataclass(frozen=True)
class WorkerView:
    """A worker, as ``top`` shows it.

    ``pid`` is the process ID in this PID namespace, if known. Shares cover the last interval. ``fetch_cpu_share`` is
    the CPU time of the fetches that ended in the interval as a share of their wall time; None if none ended.
    """

    id: int
    pid: int | None
    state: str
    batch: int | None
    seconds: float
    index: str | None
    shares: dict[str, float]
    fetch_cpu_share: float | None
    queued: int
    ready: int
    memory_bytes: int | None
    pss_bytes: int | None
    private_bytes: int | None
    shared_bytes: int
    tasks: int
    usual_seconds: float | None

    @property
    def is_busy(self) -> bool:
        """True if the worker is working on a batch."""
        return self.state in _BUSY.values()

    @property
    def is_stuck(self) -> bool:
        """True if the current batch, or the start of the worker, is taking much longer than usual."""
        if self.state == "starting":
            return self.seconds >= _LONG_AT_FIRST
        usual = _LONG_AT_FIRST / _LONG_MULTIPLE if self.usual_seconds is None else self.usual_seconds
        return self.is_busy and self.seconds >= max(_LONG_SECONDS, _LONG_MULTIPLE * usual)

    @property
    def is_marked(self) -> bool:
        """True if the worker is stuck or stopped, or has ended too early."""
        return self.is_stuck or self.state in ("ended", "stopped")

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for ``--json``."""
        fields = asdict(self)
        return fields | {"usual_batch_seconds": fields.pop("usual_seconds"), "stuck": self.is_stuck}


class Loader:
    """A loader, described from two observations of its iterator.

    Args:
        pid: the main process.
        before: the observation at the start of the interval; None if the iterator did not exist yet.
        now: the latest observation.
        period: the earlier observations of the period that the verdict covers, oldest first; empty if the period starts
            at the iterator's creation.
    """

    def __init__(
        self, pid: int, before: Observation | None, now: Observation, period: Sequence[Observation] = ()
    ) -> None:
        self.pid, self._before, self._now, self._period = pid, before, now, period
        self.figures = now.figures

    @cached_property
    def seconds(self) -> float:
        """The length of the interval in seconds."""
        return max(1e-9, self.figures.now - (self._before.figures.now if self._before else self.figures.started))

    @property
    def age_seconds(self) -> float:
        """Seconds since the iterator was created."""
        return max(1e-9, self.figures.now - self.figures.started)

    @cached_property
    def total(self) -> Stats:
        """The statistics since the iterator was created."""
        return stats_of(self.pid, self.workers, self._now)

    @cached_property
    def recent(self) -> Stats:
        """The statistics of the interval."""
        return stats_of(self.pid, self.workers, self._now, self._before)

    @cached_property
    def verdict(self) -> tuple[Verdict, float | None]:
        """The verdict, and the seconds that it covers: None if that is the time since the iterator was created."""
        seconds = self.figures.now - self._period[0].figures.now if self._period else 0.0
        if seconds >= _SETTLED_SECONDS:
            recent = replace(self._stats_since(self._period[0]), halves=self._halves())
            verdict = recent.verdict()
            if verdict.kind != "unknown" and recent.batches >= MIN_BATCHES:
                return verdict, seconds
        return stats_for_verdict(self.total, self.figures).verdict(), None

    def _stats_since(self, since: Observation, until: Observation | None = None) -> Stats:
        """Returns the statistics between two observations, for the verdict."""
        return stats_for_verdict(stats_of(self.pid, self.workers, until or self._now, since), self.figures)

    def _halves(self) -> tuple[Stats, ...]:
        """Returns the statistics of the halves of the period; nothing if no observation is between its ends."""
        first, *others = self._period
        if not others:
            return ()
        both = _batches(first) + _batches(self._now)
        middle = min(others, key=lambda it: abs(2 * _batches(it) - both))
        return self._stats_since(first, middle), self._stats_since(middle)

    @property
    def batches_per_second(self) -> float:
        """Batches per second in the interval."""
        return self.recent.batches / self.seconds

    @property
    def main_shares(self) -> dict[str, float]:
        """The shares of the interval that the main process spent in each state.

        The states are: waiting, in the training step, working in ``next``, and between two epochs or starting one.
        """
        recent = self.recent
        waiting = recent.waited_seconds + recent.first_seconds
        parts = {"waiting": waiting, "step": recent.step_seconds, "next": recent.own_seconds}
        shares = {name: min(1.0, seconds / self.seconds) for name, seconds in parts.items()}
        return shares | {"between": max(0.0, 1.0 - sum(shares.values()))}

    @cached_property
    def workers(self) -> tuple[WorkerView, ...]:
        """The workers by number."""
        spent = _totals(self._now, self._before).workers
        observed = zip(self.figures.workers, self.figures.totals.workers, spent, strict=True)
        return tuple(self._worker(number, *worker) for number, worker in enumerate(observed))

    def _worker(self, number: int, now: ObservedWorker, totals: WorkerTotals, spent: WorkerTotals) -> WorkerView:
        names = ("fetch", "collate", "pack", "idle", "starting")
        seconds = {name: getattr(spent, f"{name}_seconds") for name in names}
        whole = max(sum(seconds.values()) + spent.left_seconds, self.seconds)
        pid = self._now.pids[number]
        at_batch = now.state in _BUSY
        state = _BUSY.get(now.state, now.state)
        if state != "left" and pid in self._now.ended:
            state = "ended"
        elif pid and procfs.is_stopped(pid):
            state = "stopped"
        rollup = procfs.rollup(pid) if pid else {}
        # The mean excludes the current batch, which is compared with it.
        busy = totals.busy_seconds - (now.seconds_at_batch if at_batch else 0.0)
        return WorkerView(
            id=number,
            pid=pid,
            state=state,
            batch=now.batch if at_batch else None,
            seconds=now.seconds_at_batch if at_batch else now.seconds_in_state,
            index=now.index if at_batch else None,
            shares={name: part / whole for name, part in seconds.items()},
            fetch_cpu_share=(
                spent.fetch_cpu_seconds / spent.fetch_measured_seconds if spent.fetch_measured_seconds else None
            ),
            queued=now.queued,
            ready=now.ready,
            memory_bytes=procfs.resident(pid) if pid else None,
            pss_bytes=rollup.get("Pss"),
            private_bytes=private_bytes(pid, rollup) if pid else None,
            shared_bytes=now.warm,
            tasks=totals.tasks,
            usual_seconds=max(0.0, busy) / totals.tasks if totals.tasks else None,
        )

    @property
    def marked_workers(self) -> tuple[WorkerView, ...]:
        """The workers that are stuck or stopped, or have ended too early."""
        return tuple(worker for worker in self.workers if worker.is_marked)

    @property
    def state(self) -> str:
        """The state of the main process."""
        if procfs.is_stopped(self.pid):
            return "stopped"
        return "stopping" if self.figures.stopping else self.figures.state

    def as_dict(self) -> dict[str, Any]:
        """Returns the description for ``--json``."""
        verdict, seconds = self.verdict
        figures = self.figures
        settings = ("prefetch_factor", "in_order", "persistent", "pinning")
        return {
            "name": figures.name,
            "num_workers": len(self.workers),
            **{name: getattr(figures, name) for name in settings},
            "age_seconds": self.age_seconds,
            "interval_seconds": self.seconds,
            "main": {"state": self.state, "seconds": figures.seconds_in_state, "shares": self.main_shares},
            "batches_per_second": self.batches_per_second,
            "bytes_per_second": self.recent.bytes / self.seconds,
            "batches_per_second_since_start": self.total.batches / self.age_seconds,
            "epoch_batches": figures.epoch_batches,
            "workers": [worker.as_dict() for worker in self.workers],
            "stats": self.total.as_dict(),
            "verdict": asdict(verdict) | {"seconds": seconds},
        }


def stats_of(pid: int, workers: tuple[WorkerView, ...], now: Observation, since: Observation | None = None) -> Stats:
    """Returns the statistics of an iterator between two observations, or since its creation if ``since`` is None."""
    totals = _totals(now, since)
    times = list(map(_difference, now.times, since.times)) if since else now.times
    return Stats(
        name=now.figures.name,
        num_workers=len(workers),
        cores=_cores(pid),
        iterators=1,
        **fields_of_totals(totals),
        workers=tuple(
            worker_stats(
                view.id,
                spent,
                time,
                pid=view.pid or 0,
                alive=view.state not in ("left", "ended"),
                rss_bytes=view.memory_bytes or 0,
                private_bytes=view.private_bytes,
            )
            for view, spent, time in zip(workers, totals.workers, times, strict=True)
        ),
    )


def stats_for_verdict(stats: Stats, figures: Observed) -> Stats:
    """Returns the statistics for the verdict, with scheduling settings if the workers run on other machines.

    Settings that cannot be observed get placeholder values, which do not affect the advice.
    """
    if not figures.remote:
        return stats
    prefetch_factor, in_order = figures.prefetch_factor, figures.in_order
    settings = SchedulingStats(prefetch_factor, in_order, map_style=False, per_sample=False, remote=True)
    return replace(stats, scheduling=settings)


def _totals(now: Observation, since: Observation | None) -> Totals:
    """Returns the counters between two observations, or since the iterator's creation if ``since`` is None."""
    return now.figures.totals.since(since.figures.totals) if since else now.figures.totals


def _batches(observation: Observation) -> int:
    return observation.figures.totals.counts["batches"]


def _difference(now: WorkTime, before: WorkTime) -> WorkTime:
    """Returns the difference between two CPU times; ``NO_TIME`` if one is unknown."""
    if now.cpu is None or before.cpu is None:
        return NO_TIME
    queued = None if now.queued is None or before.queued is None else max(0.0, now.queued - before.queued)
    return WorkTime(max(0.0, now.cpu - before.cpu), queued)


def _cores(pid: int) -> int:
    """Returns the number of cores that a process may use according to its affinity.

    If the process is in the same cgroup as this process, the CPU quota limits the number, too.
    """
    try:
        affinity = len(os.sched_getaffinity(pid))
    except OSError:
        affinity = os.cpu_count() or 1
    own, other = (procfs.read(f"/proc/{it}/cgroup") for it in ("self", pid))
    shares_limits = affinity <= len(os.sched_getaffinity(0)) and own == other
    return usable_cores(affinity) if shares_limits else affinity
