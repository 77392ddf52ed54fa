"""The figures that ``bench`` has measured: medians, intervals, ratios, tables, JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rustloader.bench.comparison import Comparison, Interval, compare, median_interval, too_few
from rustloader.bench.layout import aligned, number, times
from rustloader.bench.passes import Pass
from rustloader.texts import duration, size

__all__ = ["Point", "Side", "settle", "starting", "sweep_table", "table"]


@dataclass
class Side:
    """One loader on one engine, with one number of workers."""

    passes: list[Pass] = field(default_factory=list)
    # Bytes of a batch.
    batch_bytes: float = 0.0
    # Peak memory of all its processes, beyond what there was before iter().
    memory_bytes: int | None = None
    # Whether rates and processor time leave out the start of the workers; see ``settle()``.
    steady: bool = False

    def median(self, name: str) -> float:
        """The median of a figure of all passes."""
        return statistics.median(self._figures(name))

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.median("batches_per_second")

    @property
    def rates(self) -> list[float]:
        """Batches per second of each pass."""
        return self._figures("batches_per_second")

    @property
    def interval(self) -> Interval:
        """The confidence interval of the rate."""
        return median_interval(self.rates)

    @property
    def batches(self) -> int:
        """Batches of all passes."""
        return sum(one.batches for one in self.passes)

    @property
    def too_few(self) -> str:
        """Why the rate is not to be relied on, or an empty text."""
        return too_few(len(self.passes), self.batches)

    @property
    def cores_used(self) -> float:
        """Cores that all processes together kept at work."""
        return self.median("cpu_seconds_per_batch") * self.rate

    def _figures(self, name: str) -> list[float]:
        if self.steady and name in ("batches_per_second", "cpu_seconds_per_batch"):
            name = f"steady_{name}"
        return [getattr(one, name) for one in self.passes]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        epochs = [asdict(one) for one in self.passes]
        for epoch in epochs:
            del epoch["batch_bytes"]  # measured in the warm-up alone
        return {
            "batches_per_second": self.rate,
            "interval": self.interval._asdict(),
            "megabytes_per_second": self.rate * self.batch_bytes / 1e6,
            "cpu_seconds_per_batch": self.median("cpu_seconds_per_batch"),
            "first_batch_seconds": self.median("first_batch_seconds"),
            "memory_bytes": self.memory_bytes,
            "batch_bytes": self.batch_bytes,
            "steady": self.steady,
            "epochs": epochs,
        }


@dataclass
class Point:
    """One number of workers."""

    workers: int
    torch: Side = field(default_factory=Side)
    # The same object as torch's where there are no workers: both are torch's own loop then.
    rustloader: Side = field(default_factory=Side)
    verdict: dict[str, Any] | None = None

    @property
    def alone(self) -> bool:
        """Whether torch's own loop was measured and nothing else."""
        return self.rustloader is self.torch

    @property
    def comparison(self) -> Comparison | None:
        """Which engine is faster; None where there is one alone."""
        if self.alone:
            return None
        batches = min(self.torch.batches, self.rustloader.batches)
        return compare(self.torch.rates, self.rustloader.rates, batches)

    @property
    def ratios(self) -> dict[str, float | None]:
        """How many times as good rustloader is as torch, by figure; above 1 rustloader is better."""
        ours, theirs = self.rustloader, self.torch
        comparison = self.comparison
        memory = None
        if ours.memory_bytes and theirs.memory_bytes is not None:
            memory = theirs.memory_bytes / ours.memory_bytes
        return {
            "batches_per_second": comparison.ratio if comparison else 1.0,
            "cpu_seconds_per_batch": _by(theirs, ours, "cpu_seconds_per_batch"),
            "first_batch_seconds": _by(theirs, ours, "first_batch_seconds"),
            "memory_bytes": memory,
        }

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        comparison = self.comparison
        return {
            "workers": self.workers,
            "torch": self.torch.as_dict(),
            "rustloader": self.rustloader.as_dict(),
            "ratio": self.ratios,
            "comparison": comparison.as_dict() if comparison else None,
            "verdict": self.verdict,
        }


def _by(theirs: Side, ours: Side, name: str) -> float | None:
    own = ours.median(name)
    return theirs.median(name) / own if own > 0 else None


def settle(points: Iterable[Point]) -> None:
    """Makes all rates leave out the start of the workers, if all passes allow it: only rates of one kind compare."""
    sides = [side for point in points for side in (point.torch, point.rustloader)]
    steady = all(one.steady_batches_per_second is not None for side in sides for one in side.passes)
    for side in sides:
        side.steady = steady


def starting(side: Side) -> dict[str, Any]:
    """The verdict where most of a whole epoch is the start of its workers; else empty. A loader's own statistics do not
    show it in epochs of a few batches.
    """
    first, whole = side.median("first_batch_seconds"), side.median("seconds")
    if first < whole / 2 or not all(one.complete for one in side.passes):
        return {}
    return {
        "kind": "starting",
        "sentence": "The start of the workers limits; persistent_workers=True keeps them from epoch to epoch.",
        "reason": f"the first batch takes {duration(first)} of an epoch's {duration(whole)}",
        "workers_needed": None,
    }


def table(point: Point) -> str:
    """All figures of one number of workers."""
    if point.alone:
        return aligned([("", "torch's own loop"), *((name, value) for name, value, *_ in _rows(point))])
    return aligned([("", "torch", "rustloader", "ratio"), *_rows(point)])


def _rows(point: Point) -> Iterator[tuple[str, str, str, str]]:
    theirs, ours, ratios, comparison = point.torch, point.rustloader, point.ratios, point.comparison
    rate = times(ratios["batches_per_second"])
    yield "batches/s", number(theirs.rate), number(ours.rate), rate
    interval = ours.interval
    whole = interval.low == min(ours.rates)
    title = "  lowest to highest" if whole else f"  {interval.confidence:.0%} confidence"
    between = f"{times(comparison.low)} to {times(comparison.high)}" if comparison else ""
    yield title, _between(theirs.interval), _between(interval), between
    megabytes_per_second = [number(side.rate * side.batch_bytes / 1e6) for side in (theirs, ours)]
    yield "MB/s", megabytes_per_second[0], megabytes_per_second[1], rate
    for title, name in (("CPU per batch", "cpu_seconds_per_batch"), ("first batch", "first_batch_seconds")):
        yield title, duration(theirs.median(name)), duration(ours.median(name)), times(ratios[name])
    yield "memory", _memory(theirs), _memory(ours), times(ratios["memory_bytes"])


def sweep_table(points: Iterable[Point], chosen: int | None) -> str:
    """The main figures of each number of workers, in a line for each engine."""
    rows = [("workers", "engine", "batches/s", "lowest to highest", "ratio", "CPU/batch", "first batch", "memory", "")]
    for point in points:
        for name in ("both",) if point.alone else ("torch", "rustloader"):
            side = point.torch if name == "both" else getattr(point, name)
            rows.append(
                (
                    "" if name == "rustloader" else str(point.workers),
                    "torch's loop" if name == "both" else name,
                    number(side.rate),
                    f"{number(min(side.rates))} to {number(max(side.rates))}",
                    times(point.ratios["batches_per_second"]) if name == "rustloader" else "",
                    duration(side.median("cpu_seconds_per_batch")),
                    duration(side.median("first_batch_seconds")),
                    _memory(side),
                    "<-" if point.workers == chosen and name != "torch" else "",
                )
            )
    return aligned(rows, left=2, gap=2)


def _memory(side: Side) -> str:
    return "-" if side.memory_bytes is None else size(side.memory_bytes)


def _between(interval: Interval) -> str:
    return f"{number(interval.low)} to {number(interval.high)}"
