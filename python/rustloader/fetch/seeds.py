"""Implements the option ``seed_by``: random numbers that depend on the position of a batch or sample in the epoch, not
on the worker that makes it."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from rustloader._core import seed_words
from rustloader.settings import loader_state
from rustloader.settings.config import LoaderConfig, original
from rustloader.system.generators import loaded_numpy_random
from rustloader.system.protocols import LoaderLike

# The largest seed. It fits in a signed 64-bit integer, so that a tensor can hold it.
MAX_SEED = (1 << 63) - 1
_NUMPY_SEED = (1 << 32) - 1
# The argument `place` of `seed_words`: 0 for a batch and for collating it, and k + 1 for sample k of the batch.
_BATCH = 0
_FIRST_SAMPLE = 1
# The `place` of an iterable dataset's iterator. The samples of such a dataset all have `_FIRST_SAMPLE`.
_ITERATOR = 2


@dataclass(frozen=True)
class Seeding:
    """The seeds of an epoch.

    Attributes:
        by_sample: True: seed before each sample and before collating. False: seed before each batch.
        base_seed: The base seed that torch drew for the first iterator of the loader.
        epoch: Number of epochs that the loader began before this one.
        first_ordinal: Ordinal of the first batch to make, in a resumed epoch.
        ahead: Ordinals of later batches that were already delivered and are not made again.
    """

    by_sample: bool
    base_seed: int
    epoch: int
    first_ordinal: int = 0
    ahead: tuple[int, ...] = ()

    @staticmethod
    def of(loader: LoaderLike, config: LoaderConfig, drawn: int) -> Seeding | None:
        """Returns the seeds of a loader's next epoch; None if they are torch's.

        ``drawn`` is the base seed that torch drew for the iterator. It is used only if this is the loader's first
        epoch.
        """
        if config.seed_by == "worker":
            return None
        return Seeding(config.seed_by == "sample", drawn, 0).of_next_epoch(loader)

    def of_next_epoch(self, loader: LoaderLike) -> Seeding:
        """Returns the seeds of a loader's next epoch. If no epoch of the loader has started yet, their base seed is
        that of these seeds."""
        base_seed, epoch = loader_state.epochs(original(loader)) or (self.base_seed, 0)
        return Seeding(self.by_sample, base_seed, epoch)

    def note_begun(self, loader: LoaderLike) -> None:
        """Counts the epoch of a loader, which has started with these seeds. An epoch whose start failed or was
        interrupted is not counted, so the next epoch gets the same number."""
        loader_state.set_epochs(original(loader), self.base_seed, self.epoch + 1)


def ordinal_of(number: int, first_ordinal: int, ahead: Sequence[int]) -> int:
    """Returns the ordinal of batch ``number``, from 0, in a resumed epoch. The epoch's ordinals start at
    ``first_ordinal`` and leave out those in ``ahead``. Negative numbers denote the batches just before the first."""
    ordinal = first_ordinal + number
    for delivered in sorted(ahead):
        if first_ordinal <= delivered <= ordinal:
            ordinal += 1
    return ordinal


class SampleAccess(Enum):
    """The way in which the samples of a batch are accessed. It determines where the generators can be seeded."""

    TOGETHER = 0  # the dataset makes the batch in one call
    ONE = 1  # the batch is a single sample, or threads make its samples at the same time
    EACH = 2  # torch's fetcher makes one sample after another from the index batch


class _Current(threading.local):
    seed: int | None = None


_current = _Current()


def sample_seed() -> int:
    """Returns the seed of the sample that this thread is making.

    Use it to seed random number generators of your own in the dataset or the ``collate_fn`` of a loader with
    ``seed_by="sample"`` or ``seed_by="batch"``. With ``"sample"`` each sample has its own seed, and ``collate_fn`` has
    another one. With ``"batch"`` all samples of a batch and its ``collate_fn`` have the same seed.
    docs/reproducibility.md describes how the seeds are computed; later versions compute the same seeds.

    Returns:
        An integer from 0 to 2**63 - 1.

    Raises:
        RuntimeError: This thread is not making a sample of a loader with ``seed_by="sample"`` or ``"batch"``.

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
            "sample_seed() is not available here: call it in the dataset or the collate_fn of a DataLoader with "
            'seed_by="sample" or seed_by="batch", in the thread that makes the sample'
        )
    return seed


def current() -> int | None:
    """Returns the seed of this thread's sample, or None."""
    return _current.seed


def set_current(seed: int | None) -> None:
    """Sets the seed of this thread's sample, without seeding the generators."""
    _current.seed = seed


class Seeds:
    """Seeds the generators of this process before user code makes a batch or a sample.

    Args:
        seeding: The seeds of the first epoch.
        worker: 0 for a map-style dataset; the worker's ID + 1 for an iterable one, whose batches and samples each
            worker counts separately.
        first_task: Number of the first epoch's first task.

    Attributes:
        batches: Number of batches begun in this epoch. For an iterable dataset it is the ordinal of the next batch.
        samples: Number of samples begun in this epoch, counted only for an iterable dataset.
    """

    def __init__(self, seeding: Seeding, worker: int, first_task: int = 0) -> None:
        self._by_sample, self._base_seed, self._worker = seeding.by_sample, seeding.base_seed, worker
        self._epoch, self._first_task = seeding.epoch, first_task
        self._first_ordinal, self._ahead = seeding.first_ordinal, seeding.ahead
        self.batches = self.samples = 0
        # The ordinal of the current batch.
        self._ordinal = 0
        self._seeds_collating = False

    def begin_epoch(self, epoch: int, first_task: int) -> None:
        """Begins an epoch at its first batch. Its batches are the tasks from ``first_task`` on."""
        self._epoch, self._first_task = epoch, first_task
        self._first_ordinal, self._ahead = 0, ()
        self.batches = self.samples = 0
        set_current(None)

    def begin_iterator(self) -> None:
        """Seeds the generators for ``iter(dataset)`` in a later epoch of persistent workers. A worker that is restarted
        in that epoch then draws the same numbers as its predecessor. In the first epoch, both use the seeds that torch
        gives the worker."""
        if self._worker and self._first_task:
            self._seed(_ITERATOR, 0)
            set_current(None)

    def begin_batch(self, task: int, index: Any, access: SampleAccess) -> Any:
        """Seeds the generators for a batch, and returns its index batch. With ``SampleAccess.EACH`` and seeds by
        sample, iterating over the index batch seeds the generators for each sample."""
        if self._worker:
            self._ordinal = self.batches
        elif self._ahead:
            self._ordinal = ordinal_of(task - self._first_task, self._first_ordinal, self._ahead)
        else:
            self._ordinal = self._first_ordinal + task - self._first_task
        self.batches += 1
        self._seeds_collating = self._by_sample and access is not SampleAccess.TOGETHER
        if not self._seeds_collating:
            self._seed(_BATCH, self._ordinal)
        elif access is SampleAccess.ONE:
            self._seed_sample(0)
        else:
            return _SeededIndices(index, self._seed_sample)
        return index

    def for_collating(self, collate_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a ``collate_fn`` that first seeds the generators if each sample had its own seed."""
        if not self._by_sample:
            return collate_fn

        @functools.wraps(collate_fn)
        def collate(samples: Any) -> Any:
            if self._seeds_collating:
                self._seed(_BATCH, self._ordinal)
            return collate_fn(samples)

        return collate

    def mark_sample(self, number: int) -> None:
        """Sets this thread's sample seed to the seed of sample ``number`` of the batch. Does not seed the generators,
        which all threads share."""
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
        # Each generator gets a different word: torch and NumPy would make the same stream from the same 32 bits.
        _current.seed = first & MAX_SEED
        # torch.manual_seed would also seed the GPUs, which takes 200 us.
        torch.default_generator.manual_seed(_current.seed)
        random.seed(second)
        numpy_random = loaded_numpy_random()
        if numpy_random is not None:
            numpy_random.seed(third & _NUMPY_SEED)

    def _words(self, place: int, ordinal: int) -> list[int]:
        return seed_words(self._base_seed, place, ordinal, self._worker, self._epoch)


class _SeededIndices:
    """An index batch that seeds the generators just before it yields each index. torch's fetcher only iterates over it
    and takes its length."""

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
