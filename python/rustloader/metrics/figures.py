"""``rustloader.Stats``, the result of ``rustloader.stats()``."""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rustloader.metrics.parts import CopyStats, Figures, WorkerStats
from rustloader.metrics.scalars import scalars
from rustloader.metrics.tables import headline, html, lines
from rustloader.metrics.verdict import Verdict, judge

if TYPE_CHECKING:  # other systems than Linux have no `_core`
    from rustloader._core import Counts, WorkerTotals
    from rustloader.metrics.cpu_time import WorkTime


# No `from __future__ import annotations`: field annotations must be types, not strings.
@dataclass(frozen=True, repr=False)
class Stats(Figures):
    """Holds the statistics of a loader or an iterator so far, as returned by ``rustloader.stats()``.

    ``print(stats)`` shows text, a notebook a table. Times are in seconds of the monotonic clock. The training loop
    takes ``next_seconds + step_seconds``; time between two epochs is in neither.

    Attributes:
        name: The loader's name: the option ``name``, or the file and the line that made it.
        num_workers: Number of workers of the loader, or of the iterator.
        cores: Number of processor cores that this process may use: affinity and CPU quota, rounded up.
        iterators: Number of iterators that the Rust engine has served, ended ones included. If 0, all times below are
            0, even if torch's own iterators did work.
        epochs: Number of epochs begun.
        batches: Number of batches that the engine has delivered; for a live torch iterator, those of its epoch.
        bytes: Bytes of the engine's batches.
        next_seconds: Total time in ``next``.
        first_seconds: Part of ``next_seconds``: waiting for the first batch of an epoch.
        waited_seconds: Part of ``next_seconds``: waiting for any other batch.
        blocked_seconds: Part of ``waited_seconds``: while later batches were ready (head-of-line blocking).
        sampler_seconds: Part of ``next_seconds``: in the sampler, and sending its indices. Measured only after a
            ``next`` that worked for 50 us or more.
        step_seconds: Between two calls of ``next`` in one epoch: the training step.
        workers: One entry for each worker, by its number.
        slowest: The slowest batches so far, the slowest first.
        blocking: The batches that later, finished ones waited for, the longest wait first. All such waits together are
            ``blocked_seconds``.
        recent_seconds: Seconds of work on each of the last batches, up to 256, the latest last. `verdict` predicts from
            them the gain of other settings.
        scheduling: Settings of the last iterator; None if the engine has served none, or if they are unknown.
        large_attributes: The dataset's large lists, tuples and dicts of Python objects, the largest first. Looked for
            only if a worker has 64 MiB or more of private memory.
        arena: Shared memory.
        copies: Copies that could be avoided.
        pinning: The pin thread.
        transfers: Copies to the device, with ``prefetch_to_device``.
        faults: The faults that epochs have survived: restarts of workers, and failed samples.
        cache: Content of the dataset's cache, and the counters of its use by all processes; None without
            ``rustloader.cache``.
        cache_estimate: The estimated size of a cache of all samples; None if there is one, or if it is unknown.
        core_users: The use of the processor cores while the workers of the last iterator ran; None if unknown.
        fallbacks: Iterators that ran on torch's own loop; no other figure includes their work.
        note: The reason why there are no figures, with the remedy; empty where there are some.

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
        """Finds the limit of the loader from these figures.

        Returns:
            The limit, with the remedy.

        Examples:
            >>> rustloader.Stats(batches=3).verdict().sentence
            'Too few batches to tell; ask again after 20.'
        """
        return judge(self)

    def as_dict(self, flat: bool = False) -> dict[str, Any]:
        """Returns the figures as plain values that ``json`` can write.

        Args:
            flat: False (the default) gives nested dicts and lists. True gives the numbers alone, as floats, under names
                such as ``waited_seconds`` and ``workers_0_fetch_seconds``, without ``recent_seconds`` and the lists of
                ``faults``.

        Returns:
            The figures by name.

        Examples:
            >>> stats = rustloader.Stats(batches=3, num_workers=2)
            >>> stats.as_dict()["batches"], stats.as_dict(flat=True)["arena_blocks"]
            (3, 0.0)
        """
        nested = dataclasses.asdict(self, dict_factory=_with_lists)
        if not flat:
            return nested
        del nested["recent_seconds"]  # one value per batch, no metric
        del nested["faults"]["failures"], nested["faults"]["deaths"]
        return dict(_flattened("", nested))

    def scalars(self) -> dict[str, float]:
        """Returns the main figures as floats under names that stay, for TensorBoard and Weights & Biases.

        The page on metrics lists the names. Figures of workers are sums over all of them; ``as_dict(flat=True)`` has
        those of each.

        Returns:
            The figures by name, the same names for every loader; those of a cache only with one.

        Examples:
            >>> stats = rustloader.Stats(batches=4, next_seconds=1.0, waited_seconds=1.0, step_seconds=3.0)
            >>> found = stats.scalars()
            >>> found["batches"], found["wait_share"], found["batches_per_second"]
            (4.0, 0.25, 1.0)
        """
        return scalars(self)

    def __repr__(self) -> str:
        return f"<rustloader.Stats: {headline(self)}>"

    def __str__(self) -> str:
        return "\n".join(lines(self))

    def _repr_html_(self) -> str:
        return html(self, self.verdict())


# Pickles name the module that users import from.
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
    """Returns the error for an object without statistics."""
    name = type(source).__qualname__
    return TypeError(f"rustloader.stats() takes a DataLoader or its iterator, not an object of type {name}")


def check_interval(every: float) -> None:
    """Raises ValueError unless ``every`` is a valid interval between two reports."""
    if not every > 0:
        raise ValueError(f"every must be a positive number of seconds, got {every!r}")


def counted(counts: "Counts", workers: Iterable["WorkerTotals"]) -> dict[str, Any]:
    """Returns the fields of ``Stats`` that come from an iterator's counters, and from its workers' sums."""
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
    """Returns a worker's statistics from its counters, its processor time and its memory."""
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
