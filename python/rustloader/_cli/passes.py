"""One pass over a loader, timed. Nothing here imports torch before a loader is at hand."""

from __future__ import annotations

import gc
import multiprocessing
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from rustloader._cli.machine import cpu_seconds

__all__ = ["Limits", "Mark", "Pass", "run_pass", "steady"]

# Seconds between two marks. To read the clocks of all processes costs some microseconds, which this makes small.
_BETWEEN = 0.05


class Limits(NamedTuple):
    """How far a pass goes, whichever comes first, and what it does with a batch."""

    # Batches; None: to the end of the epoch.
    batches: int | None
    # Seconds from the first batch on.
    seconds: float
    # Seconds that the training step takes, which sleeps.
    step: float = 0.0


class Mark(NamedTuple):
    """How far a pass has come."""

    batches: int
    # Of the clock.
    time: float
    # Processor time of all processes.
    cpu: float


@dataclass(frozen=True)
class Pass:
    """What a pass over a loader gave.

    Attributes:
        batches: batches taken.
        complete: whether the epoch came to its end.
        seconds: from ``iter()`` to the last batch.
        first_batch_seconds: from ``iter()`` to the first one.
        batches_per_second: the rate of all of it.
        cpu_seconds_per_batch: processor time of all processes.
        steady_batches_per_second, steady_cpu_seconds_per_batch: the same without the start of the workers, see
            ``steady()``; None where there are too few batches for that.
        batch_bytes: bytes of tensors, arrays and bytes objects of a batch, on average; 0 where nobody has looked.
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


def run_pass(loader: Any, limits: Limits, weigh: bool = False) -> Pass:
    """Iterates over a loader.

    Args:
        loader: a DataLoader.
        limits: where to end.
        weigh: look at the batches' bytes, which costs time.

    Raises:
        StopIteration: there was no batch at all.
    """
    from rustloader._cli.leaves import nbytes

    gc.collect()
    rhythm = max(1, loader.num_workers)
    # By then each worker has sent its first batches, and is sent a task for each batch that is taken.
    warm = rhythm * (loader.prefetch_factor or 1)
    taken, weight, complete = 0, 0, False
    begin = _mark(0)
    deadline = due = begin.time
    marks: list[Mark] = []
    iterator = iter(loader)
    try:
        batch = next(iterator)
        now = first = time.perf_counter()
        deadline += first - begin.time + limits.seconds
        while True:
            taken += 1
            if weigh:
                weight += nbytes(batch)
            del batch
            # Workers may end in step with each other: only marks at the same place of their round compare.
            if now >= due and taken >= warm and (taken - warm) % rhythm == 0:
                marks.append(_mark(taken))
                due = marks[-1].time + _BETWEEN
            if taken == limits.batches or now >= deadline:
                break
            if limits.step:
                time.sleep(limits.step)
            batch = next(iterator, marks)
            if batch is marks:
                complete = True
                break
            now = time.perf_counter()
    finally:
        end_iterator(loader, iterator)
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
    """Between which marks the rate is taken that leaves out the start of the workers, and the batches that they had
    ready: the first and the last one, if half of all batches lie there; else None.
    """
    if len(marks) >= 2 and 2 * (marks[-1].batches - marks[0].batches) >= batches:
        return marks[0], marks[-1]
    return None


def _rates(begin: Mark, end: Mark) -> tuple[float, float]:
    """Batches a second, and processor seconds a batch."""
    batches = end.batches - begin.batches
    return batches / (end.time - begin.time), (end.cpu - begin.cpu) / batches


def end_iterator(loader: Any, iterator: Any) -> None:
    """Ends the workers of a pass, but not those that are there for the next one as well."""
    if loader.persistent_workers and loader.num_workers > 0:
        return
    # A loader's class may have an iterator of its own about torch's.
    for end in ("_shutdown_workers", "close"):
        if hasattr(iterator, end):
            getattr(iterator, end)()
            return


def _mark(batches: int) -> Mark:
    cpu = cpu_seconds(worker.pid for worker in multiprocessing.active_children() if worker.pid is not None)
    return Mark(batches, time.perf_counter(), cpu)
