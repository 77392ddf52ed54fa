"""Adapts a loader's number of workers from epoch to epoch if it has ``num_workers="auto"``."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from typing import Any

from torch.utils.data.dataloader import _DatasetKind

from rustloader._core import Totals
from rustloader.auto import arguments
from rustloader.auto.decision import Epoch, History, Limit, decide
from rustloader.metrics import ledger
from rustloader.metrics.cpu_time import WorkTime
from rustloader.metrics.memory import Allowance, private_bytes
from rustloader.remote.context import is_remote
from rustloader.settings import loader_state, options
from rustloader.settings.config import LoaderConfig
from rustloader.system.cores import effective_cores, ranks_on_cores
from rustloader.system.formatting import count_of, size
from rustloader.system.protocols import IteratorLike, LoaderLike

logger = logging.getLogger("rustloader")

# Share of the free memory that additional workers may use, and the maximum number of workers whose memory use is read.
_MEMORY_PART, _WORKERS_READ = 0.5, 4
# Attributes in which the iterable datasets of common libraries store their number of shards.
_SHARDS = ("num_shards", "n_shards")
_HELD_TEXT = 'num_workers="auto" of the DataLoader %s stays at %s, although its loop waits for batches: %s'
_SEEDS_TEXT = (
    'random numbers in the workers of a DataLoader depend on the number of workers, which num_workers="auto" has '
    'changed; seed_by="sample" makes them independent of it'
)


class Tuner:
    """The number of workers of a loader, and the measurements on which the next decision is based.

    Attributes:
        count: Number of workers in the latest epoch; before the first epoch and after `pin`, in the next epoch.
        watch: The measurements of the latest epoch; None if there are none.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._history = History()
        self.watch: Watch | None = None
        # True if `pin` has set the number for the next epoch.
        self._is_pinned = False
        self._memory: Limit | None = None
        self._allowance = Allowance()

    def pin(self, count: int) -> None:
        """Fixes the number of workers for the next epoch: the next call of `reconsider` does not change it."""
        self.count, self._is_pinned = count, True

    def reconsider(self, loader: LoaderLike, config: LoaderConfig) -> None:
        """Sets the number of workers for the epoch that is about to start, and logs any change that `decide` makes."""
        watch, self.watch = self.watch, None
        is_pinned, self._is_pinned = self._is_pinned, False
        if is_pinned:
            return
        limits = [] if is_remote(loader.multiprocessing_context) else _limits_of_affinity(config)
        self.count = min([self.count, *(int(limit.maximum) for limit in limits)])
        if watch is None:
            return
        epoch = watch.epoch()
        if self._memory is not None:
            limits.append(self._memory)
        if loader._dataset_kind == _DatasetKind.Iterable:
            limits += _limits_of_shards(loader.dataset, watch)
        decision = decide(epoch, effective_cores() / ranks_on_cores(), limits, self._history)
        self._history = decision.history
        if decision.held_by and loader_state.of(loader).first_time(_HELD_TEXT):
            logger.info(_HELD_TEXT, config.name, count_of(decision.workers, "worker"), decision.held_by)
        if decision.workers != self.count:
            text = 'num_workers="auto" of the DataLoader %s over %s: %s instead of %s, because %s'
            dataset, workers = type(loader.dataset).__qualname__, count_of(decision.workers, "worker")
            logger.info(text, config.name, dataset, workers, self.count, decision.reason)
            self.count = decision.workers
            if config.seed_by == "worker" and loader_state.of(loader).first_time(_SEEDS_TEXT):
                logger.info(_SEEDS_TEXT)

    def note_memory(self, pids: Iterable[int]) -> None:
        """Reads how much private memory the running workers use, and limits their number accordingly.

        The reads take up to 1 % of the running time.
        """
        free = arguments.free_memory()
        sizes = []
        for pid in list(pids)[:_WORKERS_READ]:
            if not self._allowance.has_remaining():
                break
            since = time.monotonic()
            sizes.append(private_bytes(pid) or 0)
            self._allowance.spend(since)
        taken = max(sizes, default=0)
        if free is not None and taken:
            text = f"a worker takes {size(taken)} of memory, and {size(free)} is free"
            self._memory = Limit(self.count + int(_MEMORY_PART * free / taken), text)


class Watch:
    """The measurements of an iterator since the creation of this object, which must come after that of the iterator's
    engine and before the epoch's first task."""

    def __init__(self, iterator: IteratorLike, workers: int) -> None:
        self._ledger, self._workers = ledger.of(iterator).detached(), workers
        self._before, self._times_before = self._ledger.totals(), self._ledger.cpu_times()

    def epoch(self) -> Epoch:
        after, times = self._ledger.totals(), _time(self._ledger.cpu_times())
        counts, before = after.since(self._before).counts, _time(self._times_before)
        busy = _busy(after) - _busy(self._before)
        return Epoch(
            workers=self._workers,
            batches=counts["batches"],
            step=counts["step_seconds"],
            own=max(0.0, counts["next_seconds"] - counts["first_seconds"] - counts["waited_seconds"]),
            waited=counts["waited_seconds"],
            tasks=sum(self.tasks(after)),
            busy=busy,
            cpu=(times.cpu or 0.0) - (before.cpu or 0.0),
            measured=busy - (times.unmeasured - before.unmeasured),
            queued=(times.queued or 0.0) - (before.queued or 0.0),
        )

    def tasks(self, after: Totals | None = None) -> list[int]:
        """Returns the number of batches that each worker has made since the start of the epoch."""
        before = [worker.tasks for worker in self._before.workers]
        now = [worker.tasks for worker in (after or self._ledger.totals()).workers]
        return [tasks - earlier for tasks, earlier in zip(now, before + [0] * len(now), strict=False)]


def of(loader: LoaderLike) -> Tuner | None:
    """Returns the tuner of a loader that has "auto", as its own argument or from ``install()``; otherwise None."""
    own = loader_state.has_auto(loader)
    if not own and not (options.current().get("num_workers") and loader.num_workers > 0):
        return None
    state = loader_state.of(loader)
    tuner: Tuner | None = state.tuner
    if tuner is None:
        tuner = state.tuner = Tuner(loader.num_workers if own else arguments.initial_workers())
    if own:
        # The loader's attribute takes precedence: a copy of a loader has the number of its original, but a new tuner.
        tuner.count = loader.num_workers
    return tuner


def follow(loader: LoaderLike, config: LoaderConfig) -> Tuner | None:
    """Lets a loader's tuner choose the number of workers for the epoch that is about to start, and returns the tuner.
    Returns None if the loader does not have "auto"."""
    tuner = of(loader)
    if tuner is not None:
        own = loader_state.has_auto(loader)
        tuner.reconsider(loader, config)
        if own:
            loader_state.set_auto(loader, tuner.count)
    return tuner


def pin(loader: LoaderLike, count: int) -> bool:
    """Sets the number of workers for the next epoch of a loader with "auto". If the loader does not have "auto", does
    nothing and returns False."""
    own, tuner = loader_state.has_auto(loader), of(loader)
    if tuner is None:
        return False
    tuner.pin(count)
    if own:
        loader_state.set_auto(loader, count)
    return True


def _limits_of_affinity(config: LoaderConfig) -> list[Limit]:
    cores = config.worker_affinity
    if cores is None or isinstance(cores, str):
        return []
    return [Limit(len(cores), f"worker_affinity has {count_of(len(cores), 'entry')}")]


def _limits_of_shards(dataset: Any, watch: Watch) -> list[Limit]:
    """Returns the limits that follow from an iterable dataset: the number of shards that it reports and, if not all
    workers had data, the number of those that did."""
    limits = []
    for name in _SHARDS:
        value = None
        with contextlib.suppress(Exception):  # may run the dataset's code
            value = getattr(dataset, name, None)
        if type(value) is int and value > 0:
            limits.append(Limit(value, f"the dataset has {count_of(value, 'shard')}"))
    tasks = watch.tasks()
    had_data = sum(count > 0 for count in tasks)
    if 0 < had_data < len(tasks):
        limits.append(Limit(had_data, f"only {count_of(had_data, 'worker')} had data"))
    return limits


def _busy(totals: Totals) -> float:
    return sum(worker.busy_seconds for worker in totals.workers)


def _time(times: list[WorkTime]) -> WorkTime:
    return WorkTime(
        sum(time.cpu or 0.0 for time in times),
        sum(time.queued or 0.0 for time in times),
        sum(time.unmeasured for time in times),
    )
