"""Fetching in the main process, for ``num_workers=0``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rustloader.fetch import seeds
from rustloader.fetch.step import Step
from rustloader.system.generators import GeneratorStates


class StepFetcher:
    """Takes a step for each batch, in place of torch's fetcher. Seeds leave the program's generators as they were.

    Args:
        step: The step, which takes the fetcher.
        fetcher: torch's fetcher.
        gathers: As in `Step.use`.

    Attributes:
        inner: torch's fetcher.
        seeds: The seeds, with their counters; None: torch's.
        number: Number of the next batch among those that are made for this epoch.
    """

    def __init__(self, step: Step, fetcher: Any, gathers: Callable[[], Any] | None = None) -> None:
        self._step, self.inner, self.seeds = step, fetcher, step.seeds
        if step.seeds is not None:
            fetcher.collate_fn = step.collating(fetcher.collate_fn)
        step.use(fetcher, gathers)
        self.number = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "inner"), name)

    def fetch(self, index: Any) -> Any:
        """Makes a batch, as torch's fetcher does."""
        number = self.number
        self.number += 1
        with contextlib.nullcontext() if self.seeds is None else _streams_kept():
            return self._step.fetch(number, index)

    def go_back(self, batches: int) -> None:
        """Rewinds, so that the last batches come next: with a map-style dataset they get the seeds that they
        had."""
        self.number -= batches


@contextlib.contextmanager
def _streams_kept() -> Iterator[None]:
    """Restores the generators that seeds are set in, and the seed of an outer loader's sample."""
    outer = seeds.current()
    states = GeneratorStates()
    try:
        yield
    finally:
        seeds.set_current(outer)
        states.restore()
