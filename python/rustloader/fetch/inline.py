"""Fetching in the main process, for ``num_workers=0``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rustloader.fetch import seeds
from rustloader.fetch.step import Step
from rustloader.system.generators import GeneratorStates


class StepFetcher:
    """A stand-in for torch's fetcher that makes batches with a ``Step``. Seeding does not change the program's
    generators: they are restored after each batch.

    Args:
        step: The step, which uses the fetcher.
        fetcher: torch's fetcher.
        use_gather: See ``Step.use``.

    Attributes:
        step: The step.
        inner: torch's fetcher.
        seeds: The seeds, with their counters; None leaves seeding to torch.
        number: Number of the next batch among those that this process makes in the epoch.
    """

    def __init__(self, step: Step, fetcher: Any, use_gather: Callable[[], Any] | None = None) -> None:
        self.step, self.inner, self.seeds = step, fetcher, step.seeds
        if step.seeds is not None:
            fetcher.collate_fn = step.collating(fetcher.collate_fn)
        step.use(fetcher, use_gather)
        self.number = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "inner"), name)

    def fetch(self, index: Any) -> Any:
        """Makes a batch from an index batch, like torch's method."""
        number = self.number
        self.number += 1
        with contextlib.nullcontext() if self.seeds is None else _keeping_generators():
            return self.step.fetch(number, index)

    def go_back(self, batches: int) -> None:
        """Lowers ``number`` by ``batches``. With a map-style dataset, the next batches then get the seeds of the last
        ``batches`` batches again."""
        self.number -= batches


@contextlib.contextmanager
def _keeping_generators() -> Iterator[None]:
    """Restores the generators after the body has seeded them. Also restores the sample seed of an outer loader, whose
    dataset may be iterating over this loader."""
    outer = seeds.current()
    with GeneratorStates():
        try:
            yield
        finally:
            seeds.set_current(outer)
