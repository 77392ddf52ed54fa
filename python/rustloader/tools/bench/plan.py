"""Plans the settings and the duration of a run of ``bench``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rustloader.system.formatting import count_of, duration
from rustloader.tools.bench.settings import SWEPT, settings_of
from rustloader.tools.harness.layout import listed
from rustloader.tools.probe.factory import Unusable

# Default maximum duration in seconds of an epoch, and of all epochs with one setting.
_DEFAULT_SECONDS, _DEFAULT_BUDGET = 3.0, 60.0
# Default budgets and default durations of epochs leave time for at least this many epochs of each loader.
_MIN_EPOCHS = 8
# With several settings: minimum seconds per setting, and the seconds per setting that the error message suggests.
_MIN_SECONDS, _ENOUGH_SECONDS = 5.0, 12.0


class BenchPlan:
    """The plan of a run.

    Raises ``Unusable`` if the options leave nothing to compare, or the budget is too small for the settings.

    Attributes:
        settings: the settings to measure, with torch's own loop last.
        requested: number of requested settings; torch's own loop counts only if --workers includes 0.
        epochs: number of epochs of each loader; None to measure until the result is clear or the budget is spent.
        budget: seconds for all measurements; None with a fixed number of epochs.
        seconds: maximum duration of an epoch in seconds.
    """

    def __init__(self, options: Any) -> None:
        if options.workers == [0]:
            raise Unusable(
                "With `num_workers=0`, torch's own loop runs; there is nothing to accelerate. "
                "To compare it with workers, pass --workers 0,2"
            )
        self.settings = list(settings_of(options))
        self.requested = len(self.settings) - (0 not in (options.workers or ()))
        self._options = options
        self.epochs: int | None = options.epochs
        self.seconds: float = options.seconds or _DEFAULT_SECONDS
        self.budget: float | None = None
        # Epochs per setting: torch's, and those of each factory on the engine.
        least = _MIN_EPOCHS * (1 + len(options.factories))
        self._batches: int | None = options.batches
        if self.epochs is None and options.budget is None:
            self.budget = max(_DEFAULT_BUDGET, least * self.seconds) * len(self.settings)
        elif self.epochs is None:
            self.budget = float(options.budget)
            if self.requested > 1 and self.budget < _MIN_SECONDS * self.requested:
                enough = _ENOUGH_SECONDS * self.requested
                raise Unusable(
                    f"{self.budget:g} s is not enough for {self.requested} settings; pass --budget {enough:g}"
                )
            self.seconds = options.seconds or min(_DEFAULT_SECONDS, self.budget / len(self.settings) / least)

    @property
    def steps(self) -> int:
        """Number of warm-ups and epochs to run if the number of epochs is fixed; otherwise 0."""
        with_workers = 1 + len(self._options.factories)
        sides = sum(1 if setting.workers == 0 else with_workers for setting in self.settings)
        return sides * (1 + self.epochs) if self.epochs else 0

    def share(self, spent: float, remaining: int) -> float:
        """Returns the seconds for the next of ``remaining`` settings, after ``spent`` seconds of measurements."""
        return max(0.0, (self.budget or 0.0) - spent) / remaining

    def _varied(self) -> Iterator[str]:
        """Yields the values to sweep, as text. Leaves out a single number of workers, which the result shows."""
        if self._options.workers and len(self._options.workers) > 1:
            yield f"{listed(self._options.workers)} workers"
        for name in SWEPT:
            if values := getattr(self._options, name):
                yield f"{name}={listed(values)}"

    def __str__(self) -> str:
        length = f"at most {duration(self.seconds)}"
        if self._batches is not None:
            length += f" or {count_of(self._batches, 'batch')}"
        loaders = ["torch", "rustloader", *self._options.factories[1:]]
        text = "epochs" if self.epochs is None else count_of(self.epochs, "epoch")
        text += f" of {listed(loaders)} in turn, each {length}"
        if varied := list(self._varied()):
            text = f"with {', '.join(varied)}: {text}"
        if self.budget is None:
            return text
        budget = f"{self.budget / 60:.0f} min" if self.budget > 90 else f"{self.budget:g} s"
        return f"{text}; up to {budget} after a warm-up, or until the result is clear"
