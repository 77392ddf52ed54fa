"""``seed_by``: random numbers that depend on the place of a batch or a sample, and not on the worker that makes it."""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from rustloader._core import seed_words

# A seed fits into a signed 64-bit integer, so that a tensor can hold it.
MAX_SEED = (1 << 63) - 1
_NUMPY_SEED = (1 << 32) - 1
# The place of a batch itself; that of its sample k is k + 1. Collating has the batch's place.
_BATCH = 0
_FIRST_SAMPLE = 1
# The place of an iterable dataset's iterator, whose samples all have the first one.
_ITERATOR = 2


@dataclass(frozen=True)
class Seeding:
    """The seeds of an epoch.

    Attributes:
        by_sample: True seeds before each sample and before collating, False before each batch.
        base_seed: torch's draw for the first iterator of the loader.
        epoch: Number of epochs that the loader began before.
        first_ordinal: Number of the first batch, in the epoch that an iterator resumes.
        ahead: Numbers of later batches that were delivered before, and are not made again.
    """

    by_sample: bool
    base_seed: int
    epoch: int
    first_ordinal: int = 0
    ahead: tuple[int, ...] = ()


def ordinal_of(number: int, first_ordinal: int, ahead: Sequence[int]) -> int:
    """Returns the ordinal of the batch that a resumed epoch makes as its ``number``-th, from 0: the ordinals from
    ``first_ordinal`` on, without those in ``ahead``. Negative numbers are those of the batches just before."""
    ordinal = first_ordinal + number
    for delivered in sorted(ahead):
        if first_ordinal <= delivered <= ordinal:
            ordinal += 1
    return ordinal


class Apart(Enum):
    """The degree to which the samples of a batch can be told apart before they are made."""

    NO = 0  # the dataset makes the batch in one call
    ONE = 1  # the batch is one sample, or threads make its samples at the same time
    EACH = 2  # torch's fetcher takes them from the index batch, one after the other


class _Current(threading.local):
    seed: int | None = None


_current = _Current()


def sample_seed() -> int:
    """Returns the seed of the sample that this thread makes now.

    For code with random number generators of its own, in the dataset and in ``collate_fn`` of a loader with
    ``seed_by="sample"`` or ``seed_by="batch"``. With ``"sample"`` each sample has its own seed, and ``collate_fn``
    another one. With ``"batch"`` all samples of a batch and its ``collate_fn`` have the same. docs/reproducibility.md
    has the function that seeds come from; no later version changes it.

    Returns:
        An integer from 0 to 2**63 - 1.

    Raises:
        RuntimeError: This thread makes no sample of a loader with ``seed_by="sample"`` or ``"batch"``.

    Examples:
        >>> class Noise(rustloader.Dataset):
        ...     def __len__(self):
        ...         return 8
        ...
        ...     def __getitem__(self, index):
        ...         generator = torch.Generator().manual_seed(rustloader.sample_seed())
        ...         return torch.rand(3, generator=generator)
        >>> batches = list(rustloader.DataLoader(Noise(), num_workers=2, seed_by="sample"))
    """
    seed = _current.seed
    if seed is None:
        raise RuntimeError(
            "sample_seed() has no seed here: call it in the dataset or the collate_fn of a DataLoader with "
            'seed_by="sample" or seed_by="batch", in the thread that makes the sample'
        )
    return seed


def current() -> int | None:
    """Returns the seed of this thread's sample, or None."""
    return _current.seed


def set_current(seed: int | None) -> None:
    """Sets the seed of this thread's sample, and leaves the generators alone."""
    _current.seed = seed


class Seeds:
    """Seeds the generators of this process before user code makes a batch or a sample.

    Args:
        seeding: The seeds of the first epoch.
        worker: 0 for a map-style dataset; the worker's number + 1 for an iterable one, whose batches and samples are
            counted in each worker.
        first_task: Number of the first epoch's first task.

    Attributes:
        batches: Number of batches that were begun in this epoch. For an iterable dataset it is the next one's place.
        samples: The same for samples, which only an iterable dataset counts.
    """

    def __init__(self, seeding: Seeding, worker: int, first_task: int = 0) -> None:
        self._by_sample, self._base_seed, self._worker = seeding.by_sample, seeding.base_seed, worker
        self._epoch, self._first_task = seeding.epoch, first_task
        self._first_ordinal, self._ahead = seeding.first_ordinal, seeding.ahead
        self.batches = self.samples = 0
        # The number of the batch that is being made.
        self._ordinal = 0
        self._collating_apart = False

    def begin_epoch(self, epoch: int, first_task: int) -> None:
        """Begins an epoch at its first batch. Its batches are the tasks from ``first_task``."""
        self._epoch, self._first_task = epoch, first_task
        self._first_ordinal, self._ahead = 0, ()
        self.batches = self.samples = 0
        set_current(None)

    def begin_iterator(self) -> None:
        """Seeds for ``iter(dataset)`` in a later epoch of persistent workers, so that a worker that is restarted in it
        draws the same numbers as the dead one. In the first epoch both have torch's seeds of the worker."""
        if self._worker and self._first_task:
            self._seed(_ITERATOR, 0)
            set_current(None)

    def begin_batch(self, task: int, index: Any, apart: Apart) -> Any:
        """Seeds for a batch. Returns the index batch; where samples are apart, iterating over it seeds for each."""
        if self._worker:
            self._ordinal = self.batches
        elif self._ahead:
            self._ordinal = ordinal_of(task - self._first_task, self._first_ordinal, self._ahead)
        else:
            self._ordinal = self._first_ordinal + task - self._first_task
        self.batches += 1
        self._collating_apart = self._by_sample and apart is not Apart.NO
        if not self._collating_apart:
            self._seed(_BATCH, self._ordinal)
        elif apart is Apart.ONE:
            self._seed_sample(0)
        else:
            return _SeededIndices(index, self._seed_sample)
        return index

    def for_collating(self, collate_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``collate_fn``, which seeds first if the samples had seeds of their own."""
        if not self._by_sample:
            return collate_fn

        @functools.wraps(collate_fn)
        def collate(samples: Any) -> Any:
            if self._collating_apart:
                self._seed(_BATCH, self._ordinal)
            return collate_fn(samples)

        return collate

    def mark_sample(self, number: int) -> None:
        """Makes sample ``number`` of the batch this thread's, and leaves the generators alone, which threads share."""
        place = _FIRST_SAMPLE + number if self._by_sample else _BATCH
        _current.seed = self._words(place, self._ordinal)[0] & MAX_SEED

    def _seed_sample(self, number: int) -> None:
        if self._worker:
            self._seed(_FIRST_SAMPLE, self.samples)
            self.samples += 1
        else:
            self._seed(_FIRST_SAMPLE + number, self._ordinal)

    def _seed(self, place: int, ordinal: int) -> None:
        first, second, third, _ = self._words(place, ordinal)
        # Different words: torch and NumPy make the same stream of the same 32 bits.
        _current.seed = first & MAX_SEED
        # torch.manual_seed would also seed the GPUs, which takes 200 us.
        torch.default_generator.manual_seed(_current.seed)
        random.seed(second)
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:
            numpy_random.seed(third & _NUMPY_SEED)

    def _words(self, place: int, ordinal: int) -> list[int]:
        return seed_words(self._base_seed, place, ordinal, self._worker, self._epoch)


class _SeededIndices:
    """An index batch that seeds just before it gives out each index. torch's fetcher only iterates over it and takes
    its length."""

    def __init__(self, indices: Any, seed: Callable[[int], None]) -> None:
        self._indices, self._seed = indices, seed

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Any]:
        return _seeded(self._indices, self._seed)


def _seeded(indices: Iterable[Any], seed: Callable[[int], None]) -> Iterator[Any]:
    for number, index in enumerate(indices):
        seed(number)
        yield index
