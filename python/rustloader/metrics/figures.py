"""What ``rustloader.stats()`` gives."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rustloader._core import Counts, WorkerTotals
from rustloader.metrics.cpu_time import WorkTime
from rustloader.metrics.parts import (
    ArenaStats,
    CopyStats,
    Fallback,
    Figures,
    PinningStats,
    SlowBatch,
    WorkerStats,
)
from rustloader.metrics.tables import headline, html, lines
from rustloader.metrics.verdict import Verdict, judge

# No `from __future__ import annotations`: field annotations must be types, not strings.
__all__ = ["ArenaStats", "CopyStats", "Fallback", "PinningStats", "SlowBatch", "Stats", "WorkerStats"]


@dataclass(frozen=True, repr=False)
class Stats(Figures):
    """Holds what a loader or an iterator has done so far; ``rustloader.stats()`` makes it.

    ``print(stats)`` shows it as text, a notebook as a table. Times are in seconds of the monotonic clock. The time of
    the training loop is ``next_seconds + step_seconds``; what lies between two epochs is in neither.

    Attributes:
        num_workers: Number of workers of the loader, or of the iterator.
        cores: Number of processor cores that this process may use: affinity and CPU quota, rounded up.
        iterators: Number of iterators that the Rust engine has served, ended ones included. If it is 0, all times below
            are 0, whatever torch's own iterators did.
        epochs: Number of epochs begun.
        batches: Number of batches that the engine has delivered; for a live iterator of torch's own, those of its
            epoch.
        bytes: Bytes of the engine's batches.
        next_seconds: In ``next``, all of it.
        first_seconds: Part of ``next_seconds``: waiting for the first batch of an epoch.
        waited_seconds: Part of ``next_seconds``: waiting for any other batch.
        blocked_seconds: Part of ``waited_seconds``: while later batches were ready (head-of-line blocking).
        sampler_seconds: Part of ``next_seconds``: in the sampler, and sending what it gave. Measured only after a
            ``next`` that worked for 50 us or more.
        step_seconds: Between two calls of ``next`` in one epoch: the training step.
        workers: One entry for each worker, by its number.
        slowest: The slowest batches so far, the slowest first.
        arena: Shared memory.
        copies: Copies that could be avoided.
        pinning: The pin thread.
        fallbacks: Iterators that ran on torch's own loop; what they did is in no other figure.
        note: Why there are no figures, and what to do; empty where there are some.

    Examples:
        >>> loader = rustloader.DataLoader(range(64), batch_size=8, num_workers=2)
        >>> batches = list(loader)
        >>> stats = rustloader.stats(loader)
        >>> stats.batches, stats.epochs, len(stats.workers)
        (8, 1, 2)
        >>> print(stats.verdict().sentence)
        Too few batches to tell; ask again after 20.
    """

    def verdict(self) -> Verdict:
        """Judges what limits the loader, by these figures.

        Returns:
            What limits it, with the remedy.

        Examples:
            >>> rustloader.Stats(batches=3).verdict().sentence
            'Too few batches to tell; ask again after 20.'
        """
        return judge(self)

    def as_dict(self, flat: bool = False) -> dict[str, Any]:
        """Gives the figures as plain values that ``json`` can write.

        Args:
            flat: False (the default) gives nested dicts and lists. True gives the numbers alone, as floats, for
                TensorBoard and Prometheus, under names such as ``waited_seconds`` and ``workers_0_fetch_seconds``.

        Returns:
            The figures by name.

        Examples:
            >>> stats = rustloader.Stats(batches=3, num_workers=2)
            >>> stats.as_dict()["batches"], stats.as_dict(flat=True)["arena_blocks"]
            (3, 0.0)
        """
        nested = dataclasses.asdict(self, dict_factory=_with_lists)
        return dict(_flattened("", nested)) if flat else nested

    def __repr__(self) -> str:
        return f"<rustloader.Stats: {headline(self)}>"

    def __str__(self) -> str:
        return "\n".join(lines(self))

    def _repr_html_(self) -> str:
        return html(self, self.verdict())


# The module that users import it from: it is what pickles name.
Stats.__module__ = "rustloader"


def _with_lists(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in items}


def _flattened(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from _flattened(f"{name}_{key}" if name else str(key), inner)
    elif isinstance(value, int | float):
        yield name, float(value)


def no_loader(source: Any) -> TypeError:
    """The error for what has no statistics."""
    name = type(source).__qualname__
    return TypeError(f"rustloader.stats() takes a DataLoader or its iterator, not an object of type {name}")


def check_interval(every: float) -> None:
    """Raises the error for what is no number of seconds between two reports."""
    if not every > 0:
        raise ValueError(f"every must be a positive number of seconds, got {every!r}")


def counted(counts: Counts) -> dict[str, Any]:
    """The fields of ``Stats`` that an iterator's counters give."""
    return {
        "epochs": counts.epochs,
        "batches": counts.batches,
        "bytes": counts.bytes,
        "next_seconds": counts.next_seconds,
        "first_seconds": counts.first_seconds,
        "waited_seconds": counts.waited_seconds,
        "blocked_seconds": counts.blocked_seconds,
        "sampler_seconds": counts.sampler_seconds,
        "step_seconds": counts.step_seconds,
        "copies": CopyStats(counts.copies, counts.copied_bytes, counts.pickled),
    }


def worker_stats(
    number: int, pid: int, alive: bool, rss_bytes: int, totals: WorkerTotals, time: WorkTime
) -> WorkerStats:
    """What a worker's counters and its processor time give."""
    return WorkerStats(
        id=number,
        pid=pid,
        alive=alive,
        rss_bytes=rss_bytes,
        tasks=totals.tasks,
        starting_seconds=totals.starting,
        idle_seconds=totals.idle,
        fetch_seconds=totals.fetch,
        collate_seconds=totals.collate,
        pack_seconds=totals.pack + totals.publish,
        cpu_seconds=time.cpu,
        queued_seconds=time.queued,
        unmeasured_seconds=time.unmeasured,
    )
