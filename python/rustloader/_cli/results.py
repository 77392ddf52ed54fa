"""What ``bench`` has measured: medians, ratios, tables, JSON, and which number of workers will do."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rustloader._cli.passes import Pass

__all__ = ["WITHIN", "Point", "Side", "best", "counted", "headline", "settle", "sweep_table", "table"]

# A number of workers will do if its rate is at most this part below the best one.
WITHIN = 0.05


@dataclass
class Side:
    """One loader on one engine, with one number of workers."""

    passes: list[Pass] = field(default_factory=list)
    # Bytes of a batch.
    batch_bytes: float = 0.0
    # The most memory of all its processes, beyond what there was before iter().
    memory_bytes: int | None = None
    # Rates and processor time without the start of the workers; see ``settle()``.
    steady: bool = False

    def median(self, name: str) -> float:
        """Of a figure of all passes."""
        return statistics.median(self._figures(name))

    @property
    def rate(self) -> float:
        """Batches a second."""
        return self.median("batches_per_second")

    @property
    def rates(self) -> list[float]:
        """Of each pass."""
        return self._figures("batches_per_second")

    def _figures(self, name: str) -> list[float]:
        if self.steady and name in ("batches_per_second", "cpu_seconds_per_batch"):
            name = f"steady_{name}"
        return [getattr(one, name) for one in self.passes]

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest rate of a pass."""
        rates = self.rates
        return min(rates), max(rates)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        epochs = [asdict(one) for one in self.passes]
        for epoch in epochs:
            del epoch["batch_bytes"]  # nobody has looked
        return {
            "batches_per_second": self.rate,
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
    def ratios(self) -> dict[str, float | None]:
        """How many times as good rustloader is as torch, by figure; above 1 is better."""
        ours, theirs = self.rustloader, self.torch
        memory = None
        if ours.memory_bytes and theirs.memory_bytes is not None:
            memory = theirs.memory_bytes / ours.memory_bytes
        return {
            "batches_per_second": ours.rate / theirs.rate,
            "cpu_seconds_per_batch": _by(theirs, ours, "cpu_seconds_per_batch"),
            "first_batch_seconds": _by(theirs, ours, "first_batch_seconds"),
            "memory_bytes": memory,
        }

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "workers": self.workers,
            "torch": self.torch.as_dict(),
            "rustloader": self.rustloader.as_dict(),
            "ratio": self.ratios,
            "verdict": self.verdict,
        }


def _by(theirs: Side, ours: Side, name: str) -> float | None:
    own = ours.median(name)
    return theirs.median(name) / own if own > 0 else None


def settle(points: list[Point]) -> None:
    """Has all rates be those without the start of the workers, if all passes have them: only the same compares."""
    sides = [side for point in points for side in (point.torch, point.rustloader)]
    steady = all(one.steady_batches_per_second is not None for side in sides for one in side.passes)
    for side in sides:
        side.steady = steady


def best(rates: dict[int, float]) -> int:
    """The fewest workers whose rate is at most ``WITHIN`` below the best one."""
    enough = (1 - WITHIN) * max(rates.values())
    return min(workers for workers, rate in rates.items() if rate >= enough)


def counted(count: int, noun: str) -> str:
    """A number with its noun: "1 worker", "2,000 batches"."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{ending}"


def headline(point: Point) -> str:
    """Who is faster, in a sentence; not more exact than the passes are."""
    ratio = point.ratios["batches_per_second"] or 0.0
    (low, high), (their_low, their_high) = point.rustloader.range, point.torch.range
    if low <= their_high and their_low <= high:
        return f"As fast as each other, as far as these epochs tell ({ratio:.2f}x)."
    if ratio > 1:
        return f"rustloader is {ratio:.3g} times as fast as torch."
    return f"rustloader is slower than torch, {ratio:.2f}x."


def table(point: Point) -> str:
    """All figures of one number of workers."""
    theirs, ours, ratios = point.torch, point.rustloader, point.ratios
    if ours is theirs:
        rows = [(name, value) for name, value, *_ in _rows(ours, ours, ratios)]
        return _aligned([("", "torch's own loop"), *rows])
    return _aligned([("", "torch", "rustloader", "ratio"), *_rows(theirs, ours, ratios)])


def _rows(theirs: Side, ours: Side, ratios: dict[str, float | None]) -> Iterator[tuple[str, ...]]:
    rate = ratios["batches_per_second"]
    yield "batches/s", _number(theirs.rate), _number(ours.rate), _times(rate)
    yield "  of the epochs", _range(theirs), _range(ours), ""
    megabytes = [_number(side.rate * side.batch_bytes / 1e6) for side in (theirs, ours)]
    yield "MB/s", *megabytes, _times(rate)
    for title, name in (("CPU a batch", "cpu_seconds_per_batch"), ("first batch", "first_batch_seconds")):
        yield title, _time(theirs.median(name)), _time(ours.median(name)), _times(ratios[name])
    yield "memory", _memory(theirs), _memory(ours), _times(ratios["memory_bytes"])


def sweep_table(points: Iterable[Point], chosen: int) -> str:
    """The main figures of each number of workers."""
    rows: list[tuple[str, ...]] = [
        ("workers", "batches/s", "", "ratio", "CPU a batch", "", "first batch", "", "memory", "", ""),
        ("", "torch", "rustloader", "", "torch", "rustloader", "torch", "rustloader", "torch", "rustloader", ""),
    ]
    for point in points:
        same = point.rustloader is point.torch
        row = [str(point.workers), _number(point.torch.rate), "=" if same else _number(point.rustloader.rate)]
        row.append("" if same else _times(point.ratios["batches_per_second"]))
        for name in ("cpu_seconds_per_batch", "first_batch_seconds"):
            row += [_time(point.torch.median(name)), "=" if same else _time(point.rustloader.median(name))]
        row += [_memory(point.torch), "=" if same else _memory(point.rustloader)]
        rows.append((*row, "<-" if point.workers == chosen else ""))
    return _aligned(rows)


def _aligned(rows: list[tuple[str, ...]]) -> str:
    """Columns under each other: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("   ".join(cells).rstrip())
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{3 if value < 1 else 2 if value < 10 else 1}f}"


def _range(side: Side) -> str:
    low, high = side.range
    return f"{_number(low)}..{_number(high)}"


def _time(seconds: float) -> str:
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds < 1000 / scale:
            return f"{seconds * scale:.3g} {unit}" if seconds * scale < 100 else f"{seconds * scale:.0f} {unit}"
    return f"{seconds:.3g} s"


def _memory(side: Side) -> str:
    return "-" if side.memory_bytes is None else f"{side.memory_bytes / 1e6:,.0f} MB"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"
