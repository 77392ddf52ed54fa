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


class SeededFetcher:
    """torch's fetcher, with seeds before each batch or sample.

    The program's own generators are afterwards as if nothing had been drawn.
    """

    def __init__(self, fetcher: Any, kind: int, seeding: seeds.Seeding) -> None:
        self._fetcher, self._kind = fetcher, kind
        self._seeds = seeds.Seeds(seeding, 1 if kind == _DatasetKind.Iterable else 0)
        self._batches = 0
        fetcher.collate_fn = self._seeds.for_collating(fetcher.collate_fn)
        if kind == _DatasetKind.Map and torchs.is_own(kind):
            fetcher.dataset = torchs.by_sample(fetcher.dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_fetcher"), name)

    def fetch(self, index: Any) -> Any:
        """Makes a batch, as torch's fetcher does."""
        fetcher, batch = self._fetcher, self._batches
        self._batches += 1
        with _streams_kept():
            return fetcher.fetch(self._seeds.begin_batch(batch, index, self._apart()))

    def _apart(self) -> seeds.Apart:
        fetcher = self._fetcher
        batched = fetcher.auto_collation
        if not torchs.is_own(self._kind) or torchs.takes_batches(self._kind, fetcher.dataset, batched):
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
