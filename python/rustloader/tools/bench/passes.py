"""Times a pass over a loader. Importing this module does not import torch."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rustloader.system.cores import busy_seconds, share_of_cores
from rustloader.tools.harness.machine import cpu_seconds
from rustloader.tools.probe.side import end_workers

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# Minimum seconds between two marks. Reading the CPU clocks of all processes takes a few microseconds.
_MARK_INTERVAL = 0.05
# Minimum seconds between two progress callbacks.
_CALLBACK_INTERVAL = 0.25


class Limits(NamedTuple):
    """The limits of a pass.

    Attributes:
        batches: maximum number of batches; None for the whole epoch.
        seconds: maximum seconds after the first batch.
        step: seconds to sleep per batch, to simulate a training step.
    """

    batches: int | None
    seconds: float
    step: float = 0.0


class Watcher(Protocol):
    """Receives progress callbacks of a pass."""

    def on_start(self, iterator: Iterator[Any]) -> None:
        """Called once the workers have been started."""

    def on_progress(self) -> None:
        """Called after a batch. ``run_pass`` calls it at most a few times per second."""

    def on_error(self, error: Exception) -> None:
        """Called if the pass raises, before the loader's workers are shut down."""


class Mark(NamedTuple):
    """The progress of a pass: the number of batches, the time in seconds, and the CPU time of all processes."""

    batches: int
    time: float
    cpu: float


@dataclass(frozen=True)
class Pass:
    """The measurements of one pass over a loader.

    Attributes:
        batches: number of batches.
        complete: whether the epoch ended before a limit was reached.
        seconds: time from ``iter()`` to the last batch.
        first_batch_seconds: time from ``iter()`` to the first batch.
        batches_per_second: rate over the whole pass.
        cpu_seconds_per_batch: CPU time of all processes per batch.
        steady_batches_per_second: rate without the start of the workers (see ``steady()``); None if there are too few
            batches.
        steady_cpu_seconds_per_batch: CPU time per batch without the start of the workers; None if there are too
            few batches.
        batch_bytes: mean bytes of tensors, arrays and bytes objects in a batch; 0 if they were not counted.
        others_share: share of the cores that other processes used during the pass, from 0 to 1; None if unknown.
    """

    batches: int
    complete: bool
    seconds: float
    first_batch_seconds: float
    batches_per_second: float
    cpu_seconds_per_batch: float
    steady_batches_per_second: float | None = None
    steady_cpu_seconds_per_batch: float | None = None
    batch_bytes: float = 0.0
    others_share: float | None = None


def run_pass(
    loader: DataLoader[Any],
    limits: Limits,
    count_bytes: Callable[[Any], int] | None = None,
    watcher: Watcher | None = None,
) -> Pass:
    """Iterates over a DataLoader until the epoch ends or a limit is reached. Returns the measurements.

    ``count_bytes`` returns the size of a batch in bytes; its time counts as part of the pass. Raises StopIteration if
    the loader is empty.
    """
    gc.collect()
    busy, begin = busy_seconds(), _mark(0)
    with _iterating(loader, watcher) as iterator:
        return _pass(loader, iterator, limits, count_bytes, watcher, begin, busy)


@contextlib.contextmanager
def _iterating(loader: DataLoader[Any], watcher: Watcher | None) -> Iterator[Any]:
    """Creates and yields an iterator. Shuts down its workers afterwards, unless they are persistent."""
    iterator = iter(loader)
    try:
        if watcher is not None:
            watcher.on_start(iterator)
        yield iterator
    except Exception as error:
        if watcher is not None:
            watcher.on_error(error)
        raise
    finally:
        if not (loader.persistent_workers and loader.num_workers > 0):
            end_workers(iterator)


def _pass(
    loader: DataLoader[Any],
    iterator: Iterator[Any],
    limits: Limits,
    count_bytes: Callable[[Any], int] | None,
    watcher: Watcher | None,
    begin: Mark,
    busy: float | None,
) -> Pass:
    round_length = max(1, loader.num_workers)
    # The number of batches that are requested at the start. Each later one is requested when an earlier one is taken.
    first_steady = round_length * (loader.prefetch_factor or 1)
    taken, total_bytes, complete = 0, 0, False
    marks: list[Mark] = []
    batch = next(iterator)
    now = first = due = next_callback = time.perf_counter()
    deadline = first + limits.seconds
    while True:
        taken += 1
        if count_bytes is not None:
            total_bytes += count_bytes(batch)
        del batch
        # Workers may finish in lockstep, so marks are comparable only at the same position in a round of the workers.
        if now >= due and taken >= first_steady and (taken - first_steady) % round_length == 0:
            marks.append(_mark(taken))
            due = marks[-1].time + _MARK_INTERVAL
        if watcher is not None and now >= next_callback:
            watcher.on_progress()
            next_callback = now + _CALLBACK_INTERVAL
        if taken == limits.batches or now >= deadline:
            break
        if limits.step:
            time.sleep(limits.step)
        batch = next(iterator, marks)
        if batch is marks:
            complete = True
            break
        now = time.perf_counter()
    end = _mark(taken)
    rate, cpu = _rates(begin, end._replace(time=now))
    window = steady(marks, taken)
    steady_rate, steady_cpu = (None, None) if window is None else _rates(*window)
    return Pass(
        batches=taken,
        complete=complete,
        seconds=now - begin.time,
        first_batch_seconds=first - begin.time,
        batches_per_second=rate,
        cpu_seconds_per_batch=cpu,
        steady_batches_per_second=steady_rate,
        steady_cpu_seconds_per_batch=steady_cpu,
        batch_bytes=total_bytes / taken,
        others_share=_share_of_others(begin, end, busy),
    )


def _share_of_others(begin: Mark, end: Mark, busy_before: float | None) -> float | None:
    """Returns the share of the cores that other processes used."""
    busy = busy_seconds()
    if busy is None or busy_before is None:
        return None
    return share_of_cores(busy - busy_before - (end.cpu - begin.cpu), end.time - begin.time)


def steady(marks: list[Mark], batches: int) -> tuple[Mark, Mark] | None:
    """Returns the first and the last mark if at least half of all batches are between them; otherwise None.

    A rate between the marks excludes the start of the workers and the batches that were ready before the first mark.
    """
    if len(marks) >= 2 and 2 * (marks[-1].batches - marks[0].batches) >= batches:
        return marks[0], marks[-1]
    return None


def _rates(begin: Mark, end: Mark) -> tuple[float, float]:
    """Returns the batches per second, and the seconds of CPU time per batch."""
    batches = end.batches - begin.batches
    return batches / (end.time - begin.time), (end.cpu - begin.cpu) / batches


def _mark(batches: int) -> Mark:
    """Returns a mark for the current time."""
    cpu = cpu_seconds(worker.pid for worker in multiprocessing.active_children() if worker.pid is not None)
    return Mark(batches, time.perf_counter(), cpu)
