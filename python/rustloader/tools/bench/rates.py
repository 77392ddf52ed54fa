"""Summarizes the passes over a loader on one engine: rates, CPU time and memory."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from rustloader.tools.bench.comparison import too_few
from rustloader.tools.bench.passes import Pass
from rustloader.tools.harness.rounds import Interval, median_interval


@dataclass
class SideRates:
    """The passes over a loader on one engine, with one setting.

    Attributes:
        passes: the measurements of each pass.
        batch_bytes: mean size of a batch in bytes.
        memory_bytes: peak memory of the loader's processes, minus their memory before ``iter()``; None if unknown.
        steady: whether rates and CPU time exclude the start of the workers; see ``make_sides_comparable()``.
        about: description of the loader; see ``BenchSide.about``.
    """

    passes: list[Pass] = field(default_factory=list)
    batch_bytes: float = 0.0
    memory_bytes: int | None = None
    steady: bool = False
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def is_remote(self) -> bool:
        """True if the workers run on other machines, so that CPU time and memory do not include them."""
        return bool(self.about.get("remote"))

    @property
    def batch_size(self) -> int:
        """Samples per batch; 1 if unknown."""
        return self.about.get("batch_size") or 1

    def median(self, name: str) -> float:
        """Returns the median of an attribute of ``Pass``; if ``steady`` is set, of its steady variant, if any."""
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
        """Total number of batches in all passes."""
        return sum(pass_.batches for pass_ in self.passes)

    @property
    def too_few(self) -> str:
        """The reason why the rate is not reliable; empty if the rate is reliable."""
        return too_few(len(self.passes), self.batches)

    @property
    def others_share(self) -> float:
        """The median share of the cores that other processes used; 0 if unknown."""
        known = [pass_.others_share for pass_ in self.passes if pass_.others_share is not None]
        return statistics.median(known) if known else 0.0

    @property
    def cores_used(self) -> float:
        """Mean number of cores that all processes used together."""
        return self.median("cpu_seconds_per_batch") * self.rate

    def _figures(self, name: str) -> list[float]:
        """Returns the values of an attribute of ``Pass``; if ``steady`` is set, of its steady variant, if any."""
        if self.steady and name in ("batches_per_second", "cpu_seconds_per_batch"):
            name = f"steady_{name}"
        return [getattr(pass_, name) for pass_ in self.passes]

    def as_dict(self) -> dict[str, Any]:
        """Returns the results for JSON."""
        epochs = [asdict(pass_) for pass_ in self.passes]
        for epoch in epochs:
            del epoch["batch_bytes"]  # only the warm-up measures it
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


def make_sides_comparable(sides: list[SideRates]) -> None:
    """Makes rates comparable by setting ``steady`` of all sides: True if all passes have a steady rate, else False."""
    steady = all(pass_.steady_batches_per_second is not None for side in sides for pass_ in side.passes)
    for side in sides:
        side.steady = steady
