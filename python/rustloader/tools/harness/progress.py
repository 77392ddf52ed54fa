"""A progress bar, if tqdm is installed and stderr is a terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import Any


class Progress:
    """A progress bar, as a context manager. ``total`` is a number of steps or seconds."""

    def __init__(self, total: float) -> None:
        self._bar: Any = None
        if not sys.stderr.isatty():
            return
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            form = "{percentage:3.0f}% |{bar}| {elapsed}  {desc}"
            self._bar = tqdm(total=total, leave=False, bar_format=form, dynamic_ncols=True)

    def say(self, text: str) -> None:
        """Shows a description."""
        if self._bar is not None:
            self._bar.set_description_str(text)

    def step(self, reached: float | None = None) -> None:
        """Moves the bar by one step, or to ``reached``, but not beyond its end."""
        if self._bar is not None:
            bar = self._bar
            bar.update(1 if reached is None else max(0.0, min(reached, bar.total) - bar.n))

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


def say(text: str) -> None:
    """Shows the current activity in one line on stderr, if stderr is a terminal. An empty string clears the line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
