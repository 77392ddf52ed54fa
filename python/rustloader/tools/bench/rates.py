"""A loader on one engine: its rates and other figures, from the passes over it."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from rustloader.tools.bench.comparison import too_few
from rustloader.tools.bench.passes import Pass
from rustloader.tools.harness.rounds import Interval, median_interval


@dataclass
class SideRates:
    """A loader on one engine, with one setting.

    Attributes:
        batch_bytes: mean bytes of a batch.
        memory_bytes: peak memory of all its processes, less their memory before ``iter()``.
        steady: whether rates and processor time leave out the start of the workers; see ``settle()``.
    """

    passes: list[Pass] = field(default_factory=list)
    batch_bytes: float = 0.0
    memory_bytes: int | None = None
    steady: bool = False

    def median(self, name: str) -> float:
        """Returns the median of a figure over all passes."""
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
        """The reason why the rate is not reliable, or an empty text."""
        return too_few(len(self.passes), self.batches)

    @property
    def others_share(self) -> float:
        """The share of the cores that other processes used; 0 if unknown."""
        known = [one.others_share for one in self.passes if one.others_share is not None]
        return statistics.median(known) if known else 0.0

    @property
    def cores_used(self) -> float:
        """Mean number of cores that all processes together used."""
        return self.median("cpu_seconds_per_batch") * self.rate

    def _figures(self, name: str) -> list[float]:
        if self.steady and name in ("batches_per_second", "cpu_seconds_per_batch"):
            name = f"steady_{name}"
        return [getattr(one, name) for one in self.passes]

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures for JSON."""
        epochs = [asdict(one) for one in self.passes]
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


def settle_sides(sides: list[SideRates]) -> None:
    """Makes all rates leave out the start of the workers, if all passes allow it, so that rates stay comparable."""
    steady = all(one.steady_batches_per_second is not None for side in sides for one in side.passes)
    for side in sides:
        side.steady = steady
