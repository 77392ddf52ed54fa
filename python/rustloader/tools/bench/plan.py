"""Plans the settings and the duration of a run of ``bench``, and checks that its plot can be written."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import Any

from rustloader.system.formatting import count_of, duration
from rustloader.tools.bench.settings import SWEPT, settings_of
from rustloader.tools.harness.layout import listed
from rustloader.tools.probe.factory import Unusable

# Default maximum duration in seconds of an epoch, and of all epochs with one setting.
_DEFAULT_SECONDS, _DEFAULT_BUDGET = 3.0, 60.0
# Default budgets and default durations of epochs leave time for at least this many epochs per setting: eight pairs.
_MIN_EPOCHS = 16
# With several settings: minimum seconds per setting, and the seconds per setting that the error message suggests.
_MIN_SECONDS, _ENOUGH_SECONDS = 5.0, 12.0


class BenchPlan:
    """The plan of a run.

    Raises ``Unusable`` if the options leave nothing to compare, or the budget is too small for the settings.

    Attributes:
        settings: the settings to measure, with torch's own loop last.
        requested: number of requested settings; torch's own loop counts only if --workers includes 0.
        epochs: number of epochs on each engine; None to measure until the result is clear or the budget is spent.
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
        self._batches: int | None = options.batches
        if self.epochs is None and options.budget is None:
            self.budget = max(_DEFAULT_BUDGET, _MIN_EPOCHS * self.seconds) * len(self.settings)
        elif self.epochs is None:
            self.budget = float(options.budget)
            if self.requested > 1 and self.budget < _MIN_SECONDS * self.requested:
                enough = _ENOUGH_SECONDS * self.requested
                raise Unusable(
                    f"{self.budget:g} s is not enough for {self.requested} settings; pass --budget {enough:g}"
                )
            self.seconds = options.seconds or min(_DEFAULT_SECONDS, self.budget / len(self.settings) / _MIN_EPOCHS)

    @property
    def steps(self) -> int:
        """Number of warm-ups and epochs to run if the number of epochs is fixed; otherwise 0."""
        engines = 2 + bool(self._options.ray) + bool(self._options.cache)
        sides = sum(1 if setting.workers == 0 else engines for setting in self.settings)
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
        ray = self._options.ray
        text = f"epochs of {'torch, rustloader and rustloader on Ray' if ray else 'torch and rustloader'}"
        if self.epochs is not None:
            text = f"{count_of(self.epochs, 'epoch')} of torch and of rustloader"
            if ray:
                text = f"{count_of(self.epochs, 'epoch')} of torch, of rustloader and of rustloader on Ray"
        text += f" in turn, each {length}"
        if varied := list(self._varied()):
            text = f"with {', '.join(varied)}: {text}"
        if self.budget is None:
            return text
        budget = f"{self.budget / 60:.0f} min" if self.budget > 90 else f"{self.budget:g} s"
        return f"{text}; up to {budget} after a warm-up, or until the result is clear"


def check_plot(path: str) -> None:
    """Raises ``Unusable`` if a plot cannot be drawn, or cannot be written to ``path``. Called before measuring."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
        from matplotlib.figure import Figure
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "matplotlib":
            raise Unusable("--plot needs matplotlib: pip install 'rustloader[plot]'") from None
        raise Unusable(f"--plot needs matplotlib, but importing it failed: {error}") from None
    suffix = os.path.splitext(path)[1].removeprefix(".").lower()
    supported = sorted(FigureCanvasBase.get_supported_filetypes())
    if suffix not in supported:
        known = listed([f".{name}" for name in supported], "or")
        raise Unusable(f"--plot {path}: the file name must end in {known}")
    try:
        # Some formats need other programs: .pgf needs LaTeX.
        Figure(figsize=(1, 1)).savefig(io.BytesIO(), format=suffix)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise Unusable(f"--plot {path}: matplotlib cannot write .{suffix} files here: {reason}") from None
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise Unusable(f"--plot {path}: there is no folder {folder}")
    if os.path.isdir(path):
        raise Unusable(f"--plot {path}: this is a folder; pass the name of a file")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise Unusable(f"--plot {path}: no permission to write there")
