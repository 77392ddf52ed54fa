"""One pass over a loader, timed. Nothing here imports torch before there is a loader."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from rustloader.probe.machine import cpu_seconds
from rustloader.probe.side import end_workers

__all__ = ["Limits", "Mark", "Pass", "Watcher", "iterating", "run_pass", "steady"]

# Seconds between two marks. Reading the clocks of all processes takes some microseconds; the interval makes that small.
_BETWEEN = 0.05
# Seconds between two signs of life.
_BEAT = 0.25


class Limits(NamedTuple):
    """Where a pass ends, whichever comes first, and what it does with each batch."""

    # Batches; None: to the end of the epoch.
    batches: int | None
    # Seconds from the first batch on.
    seconds: float
    # Seconds that the simulated training step sleeps.
    step: float = 0.0


class Watcher(Protocol):
    """Receives progress callbacks of a pass."""

    def began(self, iterator: Any) -> None:
        """The workers have been started."""

    def beat(self) -> None:
        """Batches have come since the last time. Called a few times per second at most."""

    def failed(self, error: Exception) -> None:
        """The loader has raised an error; its workers are as it left them."""


class Mark(NamedTuple):
    """How far a pass has come: batches, seconds of the clock, processor time of all processes."""

    batches: int
    time: float
    cpu: float


@dataclass(frozen=True)
class Pass:
    """The figures of one pass over a loader.

    Attributes:
        batches: batches taken.
        complete: whether the epoch ended by itself.
        seconds: from ``iter()`` to the last batch.
        first_batch_seconds: from ``iter()`` to the first one.
        batches_per_second: the rate over all of these seconds.
        cpu_seconds_per_batch: processor time of all processes.
        steady_batches_per_second, steady_cpu_seconds_per_batch: the same without the start of the workers, see
            ``steady()``; None if there are too few batches.
        batch_bytes: mean bytes of tensors, arrays and bytes objects in a batch; 0 if they were not counted.
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


def run_pass(loader: Any, limits: Limits, weigh: bool = False, watcher: Watcher | None = None) -> Pass:
    """Iterates over a loader.

    Args:
        loader: a DataLoader.
        limits: where to end.
        weigh: whether to count the bytes of the batches, which takes time.
        watcher: receives progress callbacks.

    Raises:
        StopIteration: there was no batch at all.
    """
    gc.collect()
    begin = _mark(0)
    with iterating(loader, watcher) as iterator:
        return _pass(loader, iterator, limits, weigh, watcher, begin)


@contextlib.contextmanager
def iterating(loader: Any, watcher: Watcher | None) -> Iterator[Any]:
    """A new iterator, whose workers are ended afterwards, unless they are persistent."""
    iterator = iter(loader)
    try:
        if watcher is not None:
            watcher.began(iterator)
        yield iterator
    except Exception as error:
        if watcher is not None:
            watcher.failed(error)
        raise
    finally:
        if not (loader.persistent_workers and loader.num_workers > 0):
            end_workers(iterator)


def _pass(loader: Any, iterator: Any, limits: Limits, weigh: bool, watcher: Watcher | None, begin: Mark) -> Pass:
    from rustloader.probe.leaves import nbytes

    rhythm = max(1, loader.num_workers)
    # By then each worker has sent its first batches, and is sent a task for each batch that is taken.
    warm = rhythm * (loader.prefetch_factor or 1)
    taken, weight, complete = 0, 0, False
    marks: list[Mark] = []
    batch = next(iterator)
    now = first = due = beat = time.perf_counter()
    deadline = first + limits.seconds
    while True:
        taken += 1
        if weigh:
            weight += nbytes(batch)
        del batch
        # Workers may end in step with each other: only marks at the same place of their round compare.
        if now >= due and taken >= warm and (taken - warm) % rhythm == 0:
            marks.append(_mark(taken))
            due = marks[-1].time + _BETWEEN
        if watcher is not None and now >= beat:
            watcher.beat()
            beat = now + _BEAT
        if taken == limits.batches or now >= deadline:
            break
        if limits.step:
            time.sleep(limits.step)
        batch = next(iterator, marks)
        if batch is marks:
            complete = True
            break
        now = time.perf_counter()
    rate, cpu = _rates(begin, Mark(taken, now, _mark(taken).cpu))
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
        batch_bytes=weight / taken,
    )


def steady(marks: list[Mark], batches: int) -> tuple[Mark, Mark] | None:
    """The marks between which a rate leaves out the start of the workers, and the batches that they had ready then: the
    first and the last one, if at least half of all batches lie between them; else None.
    """
    if len(marks) >= 2 and 2 * (marks[-1].batches - marks[0].batches) >= batches:
        return marks[0], marks[-1]
    return None


def _rates(begin: Mark, end: Mark) -> tuple[float, float]:
    """Batches per second, and processor seconds per batch."""
    batches = end.batches - begin.batches
    return batches / (end.time - begin.time), (end.cpu - begin.cpu) / batches


def _mark(batches: int) -> Mark:
    cpu = cpu_seconds(worker.pid for worker in multiprocessing.active_children() if worker.pid is not None)
    return Mark(batches, time.perf_counter(), cpu)
