"""Seeded fetching in the main process, for ``num_workers=0``."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import _DatasetKind

from rustloader.fetch import seeds, torchs
from rustloader.fetch.guard import unguarded


class SeededFetcher:
    """torch's fetcher, with seeds before each batch or sample.

    The program's own generators are afterwards as if nothing had been drawn.

    Attributes:
        inner: torch's fetcher.
        seeds: The seeds, with their counters.
        number: Number of the next batch among those that are made for this epoch.
    """

    def __init__(self, fetcher: Any, kind: int, seeding: seeds.Seeding) -> None:
        self.inner, self._kind = fetcher, kind
        self.seeds = seeds.Seeds(seeding, 1 if kind == _DatasetKind.Iterable else 0)
        self.number = 0
        fetcher.collate_fn = self.seeds.for_collating(fetcher.collate_fn)
        if kind == _DatasetKind.Map and torchs.is_own(kind):
            fetcher.dataset = torchs.by_sample(fetcher.dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "inner"), name)

    def fetch(self, index: Any) -> Any:
        """Makes a batch, as torch's fetcher does."""
        number = self.number
        self.number += 1
        with _streams_kept():
            return self.inner.fetch(self.seeds.begin_batch(number, index, self._apart()))

    def go_back(self, batches: int) -> None:
        """Makes the next batches those before the present one: with a map-style dataset they get the seeds that they
        had."""
        self.number -= batches

    def _apart(self) -> seeds.Apart:
        fetcher = self.inner
        batched = fetcher.auto_collation
        dataset = unguarded(fetcher.dataset)
        if not torchs.is_own(self._kind) or torchs.takes_batches(self._kind, dataset, batched):
            return seeds.Apart.NO
        return seeds.Apart.EACH if batched else seeds.Apart.ONE


@contextlib.contextmanager
def _streams_kept() -> Iterator[None]:
    """Restores the generators that seeds are set in, and the seed of an outer loader's sample."""
    outer = seeds.current()
    torchs_state = torch.default_generator.get_state()
    pythons_state = random.getstate()
    numpy_random = sys.modules.get("numpy.random")
    numpys_state = None if numpy_random is None else numpy_random.get_state(legacy=False)
    try:
        yield
    finally:
        seeds.set_current(outer)
        torch.default_generator.set_state(torchs_state)
        random.setstate(pythons_state)
        if numpy_random is not None:
            numpy_random.set_state(numpys_state)
