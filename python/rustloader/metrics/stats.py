"""``rustloader.Stats``, the result of ``rustloader.stats()``."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rustloader.metrics.fields import ArenaStats, CopyStats, PinningStats, StatsFields, WorkerStats
from rustloader.metrics.tables import headline, html, lines
from rustloader.metrics.verdict import Verdict, judge
from rustloader.system.figures import figures_of

if TYPE_CHECKING:  # `_core` exists only on Linux
    from rustloader._core import Totals, WorkerTotals
    from rustloader.metrics.cpu_time import WorkTime


# No `from __future__ import annotations`: field annotations must be types, not strings.
@dataclass(frozen=True, repr=False)
class Stats(StatsFields):
    __doc__ = StatsFields.__doc__

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
        loop = self.next_seconds + self.step_seconds
        values: dict[str, float] = {
            "batches_per_second": self.batches / self.loop_seconds if self.loop_seconds else 0.0,
            "wait_share": (self.first_seconds + self.waited_seconds) / loop if loop else 0.0,
        }
        parts: list[tuple[type, Sequence[Any]]] = [(StatsFields, [self]), (WorkerStats, self.workers)]
        parts += [(type(part), [part]) for part in (self.arena, self.faults, self.transfers)]
        if self.cache is not None:
            parts.append((type(self.cache), [self.cache]))
            lookups = self.cache.hits + self.cache.misses
            values["cache_hit_share"] = self.cache.hits / lookups if lookups else 0.0
        for kind, those in parts:
            scalars = [it for it in figures_of(kind) if it.is_scalar]
            values |= {it.name: sum(getattr(part, it.field) for part in those) for it in scalars}
        return {name: float(value) for name, value in values.items()}

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


def fields_of_totals(totals: "Totals") -> dict[str, Any]:
    """Returns the fields of ``Stats`` that come from the counters of an engine."""
    counts, workers = totals.counts, totals.workers
    adopted = sum(worker.adopted for worker in workers), sum(worker.adopted_bytes for worker in workers)
    return {
        **{field.name: counts[field.name] for field in dataclasses.fields(StatsFields) if field.name in counts},
        "arena": ArenaStats(totals.leased, totals.warm, totals.high_water, totals.blocks),
        "copies": CopyStats(counts["copies"], counts["copied_bytes"], counts["pickled"], *adopted),
        "pinning": PinningStats(totals.pin_threads > 0, counts["pinned"], counts["pinning_seconds"]),
    }


def worker_stats(number: int, totals: "WorkerTotals", time: "WorkTime", **others: Any) -> WorkerStats:
    """Returns a worker's statistics: its counters, its CPU time and other fields, such as its memory."""
    names = [field.name for field in dataclasses.fields(WorkerStats)]
    counted = {name: getattr(totals, name) for name in names if hasattr(totals, name)}
    times = {"cpu_seconds": time.cpu, "queued_seconds": time.queued, "unmeasured_seconds": time.unmeasured}
    return WorkerStats(**counted | times | others | {"id": number})
