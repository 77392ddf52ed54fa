"""Stateful samplers, with the same names as in ``torchdata.stateful_dataloader.sampler``.

A ``StatefulDataLoader`` can resume torch's own samplers without these classes. They are for programs that save a
sampler's state separately, or that were written for torchdata's samplers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler
from torch.utils.data import sampler as torch_sampler
from torch.utils.data.dataloader import _InfiniteConstantSampler
from torch.utils.data.distributed import DistributedSampler

from rustloader._core import call_into
from rustloader.stateful_dataloader.schema import INNER_ITER_STATE, INNER_STATE, SAMPLES_YIELDED
from rustloader.stateful_dataloader.stateful import Stateful

__all__ = ["BatchSampler", "RandomSampler", "StatefulDistributedSampler"]


class RandomSampler(Sampler[int]):
    """Yields indices in random order; its iterator has a state.

    Unlike torch's class, it always has a generator, and draws from it as soon as an iterator is created.

    Args:
        data_source: Dataset whose length is the number of indices.
        replacement: True draws with replacement (default: False).
        num_samples: Number of indices per epoch (default: None, the length of the dataset).
        generator: Determines the order (default: None, a new generator seeded from torch's global one).

    Raises:
        TypeError: ``replacement`` is not a bool.
        ValueError: ``num_samples`` is not a positive integer.

    Examples:
        >>> indices = RandomSampler(range(4), generator=torch.Generator().manual_seed(0))
        >>> iterator = iter(indices)
        >>> first = next(iterator)
        >>> state = iterator.state_dict()
        >>> rest = list(iterator)
        >>> iterator = iter(indices)
        >>> iterator.load_state_dict(state)
        >>> list(iterator) == rest
        True
    """

    def __init__(
        self,
        data_source: Sized,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.data_source = data_source
        self.replacement = replacement
        self._num_samples = num_samples
        if generator is None:
            generator = torch.Generator()
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        self.generator = generator
        if not isinstance(replacement, bool):
            raise TypeError(f"replacement should be a boolean value, but got replacement={replacement}")
        count = self.num_samples
        if not isinstance(count, int) or count <= 0:
            raise ValueError(f"num_samples should be a positive integer value, but got num_samples={count}")

    @property
    def num_samples(self) -> int:
        """Number of indices per epoch."""
        return len(self.data_source) if self._num_samples is None else self._num_samples

    def __iter__(self) -> Iterator[int]:
        return _RandomIterator(self)

    def __len__(self) -> int:
        return self.num_samples


class _RandomIterator(Iterator[int]):
    """An iterator over an epoch of a RandomSampler.

    Its state is the generator's state at the start of the epoch, and the number of indices yielded.
    """

    # Number of indices per draw when drawing with replacement.
    _CHUNK = 32

    def __init__(self, sampler: RandomSampler) -> None:
        self._sampler = sampler
        self._size = len(sampler.data_source)
        self._count = sampler.num_samples
        self._begin(sampler.generator.get_state())

    def _begin(self, state: torch.Tensor) -> None:
        """Starts at the first index. ``state`` is the current state of the generator."""
        self._state = state
        self.yielded = 0
        # The next chunk of indices if it has been drawn but is not yet in use: at most one tensor.
        self._next: list[torch.Tensor] = []
        # The chunk in use, and the number of indices yielded before it.
        self._drawn, self._before = self._draw_function()().tolist(), 0

    def _draw_function(self) -> Callable[[], torch.Tensor]:
        """Returns the function that draws the next indices."""
        generator = self._sampler.generator
        if self._sampler.replacement:
            size = (self._CHUNK,)
            return functools.partial(torch.randint, self._size, size, dtype=torch.int64, generator=generator)
        return functools.partial(torch.randperm, self._size, generator=generator)

    def __next__(self) -> int:
        if self.yielded == self._count:
            raise StopIteration
        if self.yielded - self._before == len(self._drawn):
            if not self._next:
                call_into(self._next, self._draw_function())
            drawn = self._next[0].tolist()
            # Atomic for signal handlers.
            self._drawn, self._before, self._next = drawn, self.yielded, []
        # Atomic for signal handlers.
        index = self._drawn[self.yielded - self._before]
        self.yielded += 1
        return index

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.yielded, "generator": self._state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        yielded, state = state_dict["yielded"], state_dict["generator"]
        self._sampler.generator.set_state(state)
        self._begin(state)
        for _ in itertools.islice(self, yielded):
            pass


class BatchSampler(torch_sampler.BatchSampler):
    """Yields the indices of another sampler in batches; its iterator has a state.

    The state contains the states of the sampler and of its iterator, if they have any. If neither has one, resuming
    iterates over the sampler again and skips the indices that were already yielded.

    Args:
        sampler: Yields the indices.
        batch_size: Indices per batch.
        drop_last: True drops the last batch if it is not full.

    Raises:
        ValueError: In the same cases as torch's class.

    Examples:
        >>> batches = iter(BatchSampler(range(5), batch_size=2, drop_last=False))
        >>> next(batches)
        [0, 1]
        >>> batches.state_dict()
        {'samples_yielded': 2}
    """

    def __iter__(self) -> Iterator[list[int]]:
        return _BatchIterator(self)


class _BatchIterator(Iterator[list[int]]):
    """An iterator over an epoch of a BatchSampler."""

    def __init__(self, batches: torch_sampler.BatchSampler) -> None:
        self._sampler: Any = batches.sampler
        self._batch_size: int = batches.batch_size
        self._drop_last: bool = batches.drop_last
        self._indices: Iterator[int] = iter(self._sampler)
        # The batch that is being filled.
        self._pending: list[int] = []
        self.samples_yielded = 0

    def __next__(self) -> list[int]:
        batch = self._pending
        # `islice` would call `iter`, and a sampler that is its own iterator might then start over.
        batch.extend(map(next, itertools.repeat(self._indices, self._batch_size - len(batch))))
        count = len(batch)
        if not count or (self._drop_last and count < self._batch_size):
            raise StopIteration
        # Atomic for signal handlers.
        self._pending = []
        self.samples_yielded += count
        return batch

    def state_dict(self) -> dict[str, Any]:
        return batch_state(self.samples_yielded, self._sampler, self._indices)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples_yielded = state_dict[SAMPLES_YIELDED]
        self._indices = load_batch_state(state_dict, self._sampler)
        self._pending = []


def batch_state(samples_yielded: int, sampler: Any, indices: Any) -> dict[str, Any]:
    """Returns the state of an iterator over batches, with the states of its sampler and of the sampler's iterator."""
    state: dict[str, Any] = {SAMPLES_YIELDED: samples_yielded}
    if isinstance(sampler, Stateful):
        state[INNER_STATE] = sampler.state_dict()
    if isinstance(indices, Stateful):
        state[INNER_ITER_STATE] = indices.state_dict()
    return state


def load_batch_state(state: Mapping[str, Any], sampler: Any) -> Iterator[Any]:
    """Loads a state from ``batch_state`` and returns an iterator over the remaining indices.

    Raises:
        ValueError: ``state`` contains the state of a sampler or of its iterator, but this sampler or iterator cannot
            load a state.
    """
    if INNER_STATE in state:
        as_stateful(sampler).load_state_dict(state[INNER_STATE])
    indices = iter(sampler)
    if INNER_ITER_STATE in state:
        as_stateful(indices).load_state_dict(state[INNER_ITER_STATE])
    has_state = isinstance(sampler, Stateful) or isinstance(indices, Stateful)
    if not has_state and not isinstance(sampler, _InfiniteConstantSampler):
        return itertools.islice(indices, state[SAMPLES_YIELDED], None)
    return indices


def as_stateful(sampler: Any) -> Stateful:
    """Returns a sampler or iterator unchanged, typed as a stateful object.

    Raises:
        ValueError: The sampler or iterator cannot save and load a state.
    """
    if not isinstance(sampler, Stateful):
        raise ValueError(
            f"the state includes that of a sampler, but {type(sampler).__qualname__} lacks state_dict or "
            "load_state_dict: load the state into a loader with the same sampler, or start without a state"
        )
    return sampler


class StatefulDistributedSampler(DistributedSampler[Any]):
    """torch's DistributedSampler, made stateful. Its state is the number of indices yielded in the current epoch.

    A loaded state takes effect at the next ``iter()``. States do not contain the epoch: call ``set_epoch`` as with
    torch's class. States of newer torchdata versions do contain the epoch, and loading such a state sets it.

    Args:
        dataset: Dataset whose indices are divided among the ranks.
        num_replicas: Number of ranks (default: None, that of the process group).
        rank: Rank of this process (default: None, its rank in the process group).
        shuffle: True shuffles the indices (default: True).
        seed: Seed of the order, the same on all ranks (default: 0).
        drop_last: If the indices do not divide evenly among the ranks, True drops the last of them, and False repeats
            the first (default: False).

    Attributes:
        yielded: Number of indices that the current epoch has yielded.
        next_yielded: Number of indices that the next epoch skips, or None.

    Raises:
        ValueError: ``rank`` is out of range.
        RuntimeError: ``num_replicas`` or ``rank`` is missing, and there is no process group.

    Examples:
        >>> indices = StatefulDistributedSampler(range(6), num_replicas=2, rank=0, shuffle=False)
        >>> indices.load_state_dict({"yielded": 1})
        >>> list(indices)
        [2, 4]
    """

    _YIELDED = "yielded"
    _EPOCH = "epoch"

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.yielded = 0
        self.next_yielded: int | None = None

    def __iter__(self) -> Iterator[Any]:
        # Reset here, so that a state taken before the first index does not count the previous epoch.
        self.yielded = 0
        return self._yield()

    def _yield(self) -> Iterator[Any]:
        # The loaded state is consumed at the first index, because loaders create iterators that they never use.
        self.yielded, self.next_yielded = self.next_yielded or 0, None
        for index in itertools.islice(super().__iter__(), self.yielded, None):
            self.yielded += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of indices yielded in the current epoch.

        After a load, and until the next epoch yields an index, returns the number of indices that the next epoch skips.
        """
        return {self._YIELDED: self.yielded if self.next_yielded is None else self.next_yielded}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes the next epoch skip the indices that were already yielded.

        Raises:
            ValueError: ``yielded`` in the state is missing or negative.
        """
        if self._YIELDED not in state_dict:
            raise ValueError(
                f"a state of StatefulDistributedSampler must have the key {self._YIELDED!r}, got {state_dict!r}: load "
                "what its state_dict() returned"
            )
        yielded = state_dict[self._YIELDED]
        if yielded < 0:
            raise ValueError(
                f"{self._YIELDED!r} in the state of StatefulDistributedSampler must not be negative, got {yielded}"
            )
        if self._EPOCH in state_dict:
            self.set_epoch(state_dict[self._EPOCH])
        self.next_yielded = yielded
