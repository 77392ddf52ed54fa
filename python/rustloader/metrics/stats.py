"""``rustloader.Stats``, the result of ``rustloader.stats()``."""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rustloader.metrics.fields import CopyStats, StatsFields, WorkerStats
from rustloader.metrics.scalars import scalars
from rustloader.metrics.tables import headline, html, lines
from rustloader.metrics.verdict import Verdict, judge

if TYPE_CHECKING:  # `_core` exists only on Linux
    from rustloader._core import Counts, WorkerTotals
    from rustloader.metrics.cpu_time import WorkTime


# No `from __future__ import annotations`: field annotations must be types, not strings.
@dataclass(frozen=True, repr=False)
class Stats(StatsFields):
    """The statistics of a loader or an iterator so far, as returned by ``rustloader.stats()``.

    ``print(stats)`` shows text; a notebook shows tables. Times are in seconds of the monotonic clock. The training loop
    takes ``turnaround_seconds + next_seconds + step_seconds`` (``loop_seconds``). The program's own work between two
    epochs is not included.

    Attributes:
        name: The loader's name: the option ``name``, or the file and line that created it.
        num_workers: Number of workers of the loader or the iterator.
        cores: Number of processor cores that this process may use by affinity and CPU quota, rounded up.
        iterators: Number of iterators on the Rust engine, including those that have ended. If it is 0, all times below
            are 0, even if torch's own iterators did work.
        epochs: Number of epochs started.
        batches: Number of batches that the engine has delivered; for an iterator of torch's own loop, the number in its
            current epoch.
        bytes: Size of the engine's batches in bytes.
        next_seconds: Total time in ``next``.
        first_seconds: Part of ``next_seconds``: waiting for the first batch of each epoch.
        waited_seconds: Part of ``next_seconds``: waiting for the other batches.
        blocked_seconds: Part of ``waited_seconds``: waiting while later batches were ready (head-of-line blocking).
        sampler_seconds: Part of ``next_seconds``: drawing indices from the sampler and sending them. Measured only
            after a call of ``next`` that took 50 us or more, not counting waits.
        step_seconds: Time between two calls of ``next`` in one epoch: the training step.
        turnaround_seconds: Time in ``iter()``, which starts the workers or their next epoch, and time to end them.
        workers: One entry per worker, in order of worker number.
        slowest: The slowest batches so far, slowest first.
        blocking: The batches for which ``next`` waited while later ones were ready, longest wait first. The sum of all
            such waits is ``blocked_seconds``.
        recent_seconds: Seconds of work on each of the latest batches (at most 256), in order. ``verdict`` uses them to
            predict how much other settings would gain.
        scheduling: Settings of the latest iterator on the engine; None if there is no such iterator, or
            if its settings are unknown.
        large_attributes: The dataset's large lists, tuples and dicts of Python objects, largest first. The dataset
            is searched for them only if a worker has 64 MiB or more of private memory.
        arena: Use of shared memory.
        copies: Data that workers copied, pickled, or sent without copying.
        pinning: Work of the pin thread.
        transfers: Copies to the device, with ``prefetch_to_device``.
        faults: The faults from which epochs recovered: worker restarts, and failed samples.
        cache: Size of the dataset's cache, and its hits and misses in all processes; None without
            ``rustloader.cache``.
        cache_estimate: The estimated size of a cache of all samples; None if there is a cache, or if the size
            is unknown.
        core_users: Use of the processor cores while the workers of the latest iterator ran; None if unknown.
        fallbacks: Iterators that ran on torch's own loop. No other field includes their work.
        note: The reason why the engine has no statistics, with the remedy; empty if it has some.
        halves: The statistics of the first and of the second half of the batches, roughly, from which ``verdict`` sees
            whether they agree; empty if they are unknown. ``as_dict`` omits them.

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
        """Finds the bottleneck of the loader from these statistics.

        Returns:
            The bottleneck, with the remedy.

        Examples:
            >>> rustloader.Stats(batches=3).verdict().sentence
            'Too few batches to tell; ask again after 20.'
        """
        return judge(self)

    def as_dict(self, flat: bool = False) -> dict[str, Any]:
        """Returns the statistics as plain values that ``json`` can write.

        Args:
            flat: False (the default) returns nested dicts and lists. True returns only the numbers, as floats, with
                names such as ``waited_seconds`` and ``workers_0_fetch_seconds``, and omits ``recent_seconds`` and the
                lists in ``faults``.

        Returns:
            The statistics by name.

        Examples:
            >>> stats = rustloader.Stats(batches=3, num_workers=2)
            >>> stats.as_dict()["batches"], stats.as_dict(flat=True)["arena_blocks"]
            (3, 0.0)
        """
        nested = dataclasses.asdict(dataclasses.replace(self, halves=()), dict_factory=_with_lists)
        del nested["halves"]
        if not flat:
            return nested
        del nested["recent_seconds"]  # one value per batch, not a metric
        del nested["faults"]["failures"], nested["faults"]["deaths"]
        return dict(_flattened("", nested))

    def scalars(self) -> dict[str, float]:
        """Returns the main statistics as floats with stable names, for TensorBoard and Weights & Biases.

        The page on metrics lists the names. Values for workers are sums over all workers; ``as_dict(flat=True)`` has
        a value for each worker.

        Returns:
            The statistics by name. The names are the same for every loader, except that those of a cache appear only
            with a cache.

        Examples:
            >>> stats = rustloader.Stats(batches=4, next_seconds=1.0, waited_seconds=1.0, step_seconds=3.0)
            >>> scalars = stats.scalars()
            >>> scalars["batches"], scalars["wait_share"], scalars["batches_per_second"]
            (4.0, 0.25, 1.0)
        """
        return scalars(self)

    def __repr__(self) -> str:
        return f"<rustloader.Stats: {headline(self)}>"

    def __str__(self) -> str:
        return "\n".join(lines(self))

    def _repr_html_(self) -> str:
        return html(self, self.verdict())


# Pickles name the package that users import.
Stats.__module__ = "rustloader"


def _with_lists(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in items}


def _flattened(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yields the numbers in nested dicts and lists, each with a name: the keys on its path, joined by underscores."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from _flattened(f"{name}_{key}" if name else str(key), inner)
    elif isinstance(value, int | float):
        yield name, float(value)


def no_loader(source: Any) -> TypeError:
    """Returns the error for an object that is neither a loader nor an iterator, and so has no statistics."""
    name = type(source).__qualname__
    return TypeError(f"rustloader.stats() takes a DataLoader or its iterator, not an object of type {name}")


def check_interval(every: float) -> None:
    """Raises ValueError if ``every`` is not a valid interval between two reports."""
    if not every > 0:
        raise ValueError(f"every must be a positive number of seconds, got {every!r}")


def fields_of_counts(counts: "Counts", workers: Iterable["WorkerTotals"]) -> dict[str, Any]:
    """Returns the fields of ``Stats`` that come from the counters of an engine and its workers."""
    adopted = [(worker.adopted, worker.adopted_bytes) for worker in workers]
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
        "copies": CopyStats(
            counts.copies,
            counts.copied_bytes,
            counts.pickled,
            sum(number for number, _ in adopted),
            sum(bytes_ for _, bytes_ in adopted),
        ),
    }


def worker_stats(
    number: int,
    pid: int,
    alive: bool,
    rss_bytes: int,
    totals: "WorkerTotals",
    time: "WorkTime",
    private_bytes: int | None,
) -> WorkerStats:
    """Returns a worker's statistics from its counters, its CPU time and its memory."""
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
        fetch_cpu_seconds=totals.fetch_cpu,
        fetch_measured_seconds=totals.fetch_measured,
        private_bytes=private_bytes,
    )
