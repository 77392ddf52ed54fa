"""Index streams: torch's index batches, cut from arrays with 8 bytes per index instead of lists of Python ints.

A stream replaces the Python generator that iterates over one of these samplers of torch:

* a BatchSampler over a SequentialSampler, a RandomSampler or a DistributedSampler;
* a RandomSampler without a BatchSampler;
* the sampler of an iterable dataset, with or without a BatchSampler.

A stream yields the same ints and lists in the same order. From every random generator that the program can see, it
draws exactly when torch would. All other samplers, including subclasses and samplers with replaced methods, keep
torch's Python generator. So does a RandomSampler with replacement, because torch draws its indices in small chunks.

An exception raised by a signal handler ends a Python generator, and with it the epoch. It does not end a stream.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import sys
from collections.abc import Callable, Iterator
from types import CodeType, GeneratorType
from typing import Any

import numpy as np
import torch
from torch.utils.data import dataloader, distributed, sampler
from torch.utils.data.dataloader import _InfiniteConstantSampler
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from rustloader._core import IndexStream, call_into
from rustloader.iterator.starts import Start, shard, shard_start
from rustloader.system.interrupts import is_interrupt
from rustloader.system.torch_side import known_code

# Number of indices in each array of a SequentialSampler's stream.
_CHUNK = 8192

# A function that returns the next array of indices, and None after the last one.
_NextArray = Callable[[], "np.ndarray | None"]

BATCHES = known_code(BatchSampler.__iter__, sampler, "iter sampler drop_last batch_size zip itertools islice")
RANDOM = known_code(
    RandomSampler.__iter__,
    sampler,
    "len data_source generator int torch empty int64 random_ item Generator manual_seed replacement range num_samples "
    "randint tolist randperm",
)
SUBSET = known_code(SubsetRandomSampler.__iter__, sampler, "torch randperm len indices generator tolist")
WEIGHTED = known_code(
    WeightedRandomSampler.__iter__,
    sampler,
    "torch multinomial weights num_samples replacement generator iter tolist",
)
SEQUENTIAL = known_code(SequentialSampler.__iter__, sampler, "iter range len data_source")
CONSTANT = known_code(_InfiniteConstantSampler.__iter__, dataloader, "")
SHARD = known_code(
    DistributedSampler.__iter__,
    distributed,
    # Older versions use an assert statement; newer ones raise an AssertionError with a message.
    "shuffle torch Generator manual_seed seed epoch randperm len dataset tolist list range drop_last total_size math "
    "ceil rank num_replicas num_samples iter",
    "shuffle torch Generator manual_seed seed epoch randperm len dataset tolist list range drop_last total_size math "
    "ceil AssertionError rank num_replicas num_samples iter",
)


def stream(index_sampler: Any, torch_iterator: Iterator[Any], start: Start | None = None) -> Iterator[Any]:
    """Returns the index stream of a sampler, or ``torch_iterator`` if the sampler has no stream.

    Args:
        index_sampler: The source of a loader's index batches.
        torch_iterator: ``iter(index_sampler)``, before its first step.
        start: A start from an earlier run, from which the stream reproduces the order; or an empty one, in which the
            stream records the start of its order. None if the start is not needed.
    """
    if type(index_sampler) is BatchSampler:
        inner = vars(index_sampler).get("sampler")
        if not _is_fresh(torch_iterator, BATCHES, index_sampler):
            return torch_iterator
        if _is_endless(inner) and type(vars(index_sampler).get("batch_size")) is int:
            return Endless(index_sampler)
        if _has_arrays(inner):
            begin = functools.partial(_begin_batches, index_sampler, start)
            return IndexStream(torch_iterator, index_sampler, begin, _size_of, is_interrupt)
    elif type(index_sampler) is _InfiniteConstantSampler and _is_fresh(torch_iterator, CONSTANT, index_sampler):
        return itertools.repeat(None)
    elif type(index_sampler) is RandomSampler and _has_arrays(index_sampler):
        if _is_fresh(torch_iterator, RANDOM, index_sampler):
            begin_indices = functools.partial(_begin, index_sampler, start)
            return IndexStream(torch_iterator, None, begin_indices, _size_of, is_interrupt)
    return torch_iterator


class Endless:
    """The endless index batches of an iterable dataset, which contain None instead of indices."""

    def __init__(self, batches: BatchSampler) -> None:
        self._batches = batches

    def __iter__(self) -> Endless:
        return self

    def __next__(self) -> list[None]:
        return [None] * self._batches.batch_size


def _is_endless(inner: Any) -> bool:
    """Returns True if a sampler is the one that torch uses for iterable datasets, with torch's code."""
    return type(inner) is _InfiniteConstantSampler and _code_of(_InfiniteConstantSampler) is CONSTANT is not None


def _has_arrays(inner: Any) -> bool:
    """Returns True if a stream can take a sampler's indices from arrays."""
    if type(inner) is RandomSampler:
        return RANDOM is not None and _code_of(RandomSampler) is RANDOM and vars(inner).get("replacement") is False
    if type(inner) is SequentialSampler:
        return SEQUENTIAL is not None and _code_of(SequentialSampler) is SEQUENTIAL
    return type(inner) is DistributedSampler and SHARD is not None and _code_of(DistributedSampler) is SHARD


def _code_of(cls: type) -> CodeType | None:
    return getattr(cls.__iter__, "__code__", None)  # type: ignore[attr-defined]


def _is_fresh(iterator: Iterator[Any], code: CodeType | None, index_sampler: Any) -> bool:
    """Returns True if an iterator is torch's own generator over ``index_sampler``, and has not made its first step."""
    return (
        type(iterator) is GeneratorType
        and iterator.gi_code is code
        and inspect.getgeneratorstate(iterator) == inspect.GEN_CREATED
        and inspect.getgeneratorlocals(iterator).get("self") is index_sampler
    )


# A stream calls the following functions in its first `next`, because that is when torch's generator reads its sampler.


def _begin_batches(batches: BatchSampler, start: Start | None) -> tuple[_NextArray, int | None] | None:
    """Returns the source of a BatchSampler's arrays, and the batch size if all batches must have it (``drop_last``).

    Returns None if the stream must use torch's generator instead.
    """
    begun = _begin(batches.sampler, start)
    if begun is None or not batches.drop_last:
        return begun
    size: Any = batches.batch_size
    return begun[0], size if type(size) is int and 0 <= size < 2**32 else len([None] * size)


def _begin(inner: Any, start: Start | None) -> tuple[_NextArray, None] | None:
    """Returns the source of a sampler's arrays and None, which stands for no batch size. Returns just None if the
    stream must use torch's generator instead."""
    if not _has_arrays(inner):
        return None
    if type(inner) is RandomSampler:
        return _Permutations(inner, start), None
    if type(inner) is SequentialSampler:
        return functools.partial(next, _consecutive(len(inner.data_source)), None), None
    array = _shard(inner, start)
    return None if array is None else (functools.partial(next, iter([array]), None), None)


def _size_of(size: Any) -> int:
    """Returns a ``batch_size`` of any type as an int. If it is invalid, raises the error that ``islice`` raises in
    torch."""
    itertools.islice((), size)
    return sys.maxsize if size is None else operator.index(size)


def _consecutive(size: int) -> Iterator[np.ndarray]:
    """Returns an iterator over arrays of limited size that together hold the numbers from 0 to ``size - 1``. The
    iterator runs only C code, so an interrupt cannot lose an array."""
    starts = range(0, size, _CHUNK)
    return map(np.arange, starts, itertools.chain(starts[1:], (size,)))


class _Permutations:
    """A callable that returns the permutations of a RandomSampler, one per call, and then None.

    It draws each permutation when torch would. If a signal handler raises during a call, the next call returns the
    permutation that was already drawn; none is drawn twice.
    """

    def __init__(self, inner: RandomSampler, start: Start | None) -> None:
        self._sampler: Any = inner
        self._start = Start() if start is None else start
        # Whether the generator's state must be recorded before the next draw.
        self._must_record = start is not None
        self._generator: Any = None
        self._is_private = False
        self._size = 0
        # A range whose length is the number of complete permutations that remain.
        self._whole = range(0)
        self._ended = False
        # Holds a permutation that an interrupted call drew but did not return.
        self._drawn: list[torch.Tensor] = []

    def __call__(self) -> np.ndarray | None:
        if self._generator is None:
            self._begin()
        if self._ended:
            return None
        whole, ended = self._whole[1:], not self._whole
        if ended and self._is_private and self._sampler.num_samples % self._size == 0:
            # Here torch draws a permutation that it does not use. With a private generator, the draw can be omitted.
            self._ended = True
            return None
        if not self._drawn:
            if self._must_record and not self._is_private:
                self._start.note({"generator": self._generator.get_state()})
            call_into(self._drawn, functools.partial(torch.randperm, self._size, generator=self._generator))
        array = _array(self._drawn[0])
        if ended:
            array = array[: self._sampler.num_samples % self._size]
        # Atomic for signal handlers.
        self._whole, self._ended, self._drawn, self._must_record = whole, ended, [], False
        return array

    def _begin(self) -> None:
        inner = self._sampler
        size = len(inner.data_source)
        generator, self._is_private = self._start.generator_of(inner)
        self._whole = range(inner.num_samples // size)
        self._size = size
        self._generator = generator


def _array(permutation: torch.Tensor) -> np.ndarray:
    """Returns a permutation as a contiguous array. A plain CPU tensor is not copied."""
    if type(permutation) is torch.Tensor and permutation.device.type == "cpu":
        return permutation.numpy()
    return np.array(permutation.tolist(), np.int64)


def _shard(inner: Any, start: Start | None) -> np.ndarray | None:
    """Returns the indices of a DistributedSampler. Uses the start from an earlier run if ``start`` has one; otherwise
    records the start there.

    Returns None if the sampler's settings are not plain ints, or if torch's generator would raise an error for them.
    """
    if start is not None:
        if start.given is not None:
            return shard(start.given)
        start.note(shard_start(inner))
    rank, replicas, total, count = inner.rank, inner.num_replicas, inner.total_size, inner.num_samples
    if any(type(value) is not int for value in (rank, replicas, total, count)) or not 0 <= rank < replicas:
        return None
    size = len(inner.dataset)
    fits = size >= total >= 0 if inner.drop_last else size == total or 0 < size < total
    if not fits or len(range(rank, total, replicas)) != count:
        return None
    if not inner.shuffle:
        indices = np.arange(rank, total, replicas)
        if total > size:
            indices %= size
        return indices
    generator = torch.Generator()
    generator.manual_seed(inner.seed + inner.epoch)
    permutation = _array(torch.randperm(size, generator=generator))
    own = permutation[rank : min(size, total) : replicas]
    # The padding repeats the permutation from its start.
    padding = np.arange(rank + len(own) * replicas, total, replicas) % max(size, 1)
    return np.concatenate([own, permutation[padding]])
