"""The cached dataset, which keeps the samples of another dataset."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Subset

from rustloader._core import CacheBatch, CacheTable, copy_of
from rustloader.caching import nodes
from rustloader.caching.keeping import EPOCH, INDEX, MISSING, Keeping, usage_of
from rustloader.caching.nodes import Origin
from rustloader.caching.usage import CacheUsage
from rustloader.sharing.pickling import descriptor_of, dumps, register
from rustloader.system.generators import GeneratorStates

logger = logging.getLogger("rustloader")

_T_co = TypeVar("_T_co", covariant=True)
# Small samples of a batch are written to the cache together: once they have about this number of bytes, or after the
# first sample that ends later than this number of seconds.
_WRITE_FROM, _WRITE_AFTER = 64 << 10, 0.01
# Types of the indices that have a row. An instance of any other type may be more than its value, even if it is an int.
_INDEX_TYPES = {int, *(np.dtype(letter).type for letter in np.typecodes["AllInteger"])}


def cached_of(dataset: Any, table: CacheTable, then: Callable[[Any], Any] | None, origin: Origin) -> CachedDataset[Any]:
    """Returns the cached dataset, which has ``__getitems__`` if the dataset makes batches itself, and the other special
    methods of the dataset."""
    inner = dataset
    # A Subset makes batches only if its dataset does.
    while type(inner) is Subset:
        inner = inner.dataset
    makes_batches = callable(getattr(inner, "__getitems__", None))
    base: type[CachedDataset[Any]] = _CachedBatches if makes_batches else CachedDataset
    kind = base.class_for(dataset)
    register(kind, _reduce_cached)
    return kind(dataset, table, then, origin)


class CachedDataset(Keeping[_T_co]):
    """A dataset with a cache, made by ``rustloader.cache``.

    Attributes:
        dataset: The dataset whose samples are kept.
        then: The function that is applied to each sample after the cache, or None.
        table: The table of the samples in the cache.

    Examples:
        >>> dataset = torch.utils.data.TensorDataset(torch.arange(3))
        >>> cached = rustloader.cache(dataset, then=lambda sample: sample[0] + 1)
        >>> [int(sample) for sample in cached], len(cached), cached.tensors[0].tolist()
        ([1, 2, 3], 3, [0, 1, 2])
    """

    def __init__(self, dataset: Any, table: CacheTable, then: Callable[[Any], Any] | None, origin: Origin) -> None:
        super().__init__(dataset=dataset, then=then, table=table, _origin=origin)

    def __getitem__(self, index: Any) -> _T_co:
        sample: Any = self.table.get(index, MISSING) if type(index) is int else MISSING
        if sample is MISSING:
            row = self._row(index)
            if type(index) is int and row is not None:
                # The row has just been looked up.
                sample = self._due_sample(row, index)
            else:
                sample = self._find(row, index)
            if sample is MISSING:
                sample = self._make_sample(row, index)
        return sample if self.then is None else self.then(sample)

    def batch(self, indices: list[Any], iterate: Callable[[list[Any]], Iterable[Any]]) -> list[Any] | None:
        """Returns the samples at some indices. The missing samples are made one after another, before ``then``
        is called, so that the random number generators are saved only once.

        Args:
            indices: The indices.
            iterate: Iterates over indices. Its code runs before each sample is made, and before ``then`` is called.

        Returns:
            The samples; None if they must be requested one at a time: an index has no row, a missing sample is
            requested twice, or a sample must first be compared.
        """
        table, then = self.table, self.then
        found = table.get_all(indices, MISSING)
        if found is None:
            return None
        samples, missing = found
        rows = [indices[position] for position in missing]
        if len(set(rows)) < len(rows) or (table.opening and any(map(table.is_due, rows))):
            return None
        try:
            self._make_missing(samples, missing, rows, iterate)
        except Exception:
            if then is not None:
                # An error of `then` for an earlier sample precedes this one.
                for sample in itertools.takewhile(lambda sample: sample is not MISSING, samples):
                    then(sample)
            raise
        if then is None:
            return samples
        return [then(sample) for _, sample in zip(iterate(indices), samples, strict=True)]

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return partial(self._set_epoch, value) if name == "set_epoch" and callable(value) else value

    def __repr__(self) -> str:
        usage = self.usage()
        return f"<CachedDataset of {self.dataset!r}: {usage.samples_bytes} of {usage.limit} bytes>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        if nodes.is_packing():
            name = nodes.name_of(self.table)
            return _on_node, (self.dataset, self.then, self._origin, self.table.rows, name)
        raise TypeError(
            "a cached dataset cannot be pickled: only processes of this program can access the memory of its samples. "
            "Pickle its dataset (`cached.dataset`), and call rustloader.cache() after unpickling it"
        )

    def __copy__(self) -> CachedDataset[_T_co]:
        return type(self)(self.dataset, self.table, self.then, self._origin)

    def __deepcopy__(self, memo: Any) -> CachedDataset[_T_co]:
        # The samples are the same, so both datasets share one cache.
        dataset, then = copy.deepcopy((self.dataset, self.then), memo)
        return type(self)(dataset, self.table, then, self._origin)

    def usage(self) -> CacheUsage:
        """Returns the sizes and counters of the cache.

        Examples:
            >>> cached = rustloader.cache(torch.utils.data.TensorDataset(torch.zeros(3, 5)), memory="1MiB")
            >>> samples = [cached[1], cached[1]]
            >>> cached.usage().hits, cached.usage().misses
            (1, 1)
        """
        return usage_of(self.table)

    # Reading and keeping

    def _row(self, index: Any) -> int | None:
        """Returns the row of an index, or None if the cache has none for it."""
        row = int(index) if type(index) in _INDEX_TYPES else -1
        return row if 0 <= row < self.table.rows else None

    def _find(self, row: int | None, index: Any) -> Any:
        """Returns the sample in the cache, if it is there. Counts a hit; for an index without a row, a miss for each of
        its samples."""
        if row is not None:
            sample = self.table.get(row, MISSING)
            return self._due_sample(row, index) if sample is MISSING else sample
        self.table.count(0, _count(index, self.dataset))
        is_number = isinstance(index, int) or (isinstance(index, torch.Tensor) and index.ndim == 0)
        if is_number and type(index) is not int and self.table.first_time(INDEX):
            logger.warning(
                "cache(): samples at indices of type %s are made each time, because such an index may be more than its "
                "value: pass int(index)",
                type(index).__name__,
            )
        return MISSING

    def _make_sample(self, row: int | None, index: Any) -> Any:
        """Makes a sample, and keeps it if the cache has a row for it. With ``then``, returns a copy."""
        if row is not None:
            self.table.count(0, 1)
        with self._keeping_generators():
            sample = self.dataset[index]
            if row is not None:
                self._probe(row, index, sample)
                self._keep(row, index, sample)
            return sample if self.then is None else _copy(sample)

    def _make_missing(
        self, samples: list[Any], missing: list[int], rows: list[int], iterate: Callable[[list[int]], Iterable[int]]
    ) -> None:
        """Makes the samples at the positions ``missing`` of a batch, whose rows are ``rows``, and keeps them. If one
        fails, keeps those before it."""
        if not rows:
            self.table.count(len(samples), 0)
            return
        dataset, batch = self.dataset, CacheBatch(self.table)
        made, may_probe, write_at = 0, True, time.perf_counter() + _WRITE_AFTER
        with self._keeping_generators():
            try:
                for row, position in zip(iterate(rows), missing, strict=False):
                    sample = dataset[row]
                    made += 1
                    may_probe = may_probe and self._probe(row, row, sample)
                    # The dataset may return the same object again with other values, so the sample is copied now.
                    # In a file, each is kept at once, for comparison with those of other programs.
                    size = 0 if self._origin.path else batch.add(row, sample)
                    if not size:
                        self._keep(row, row, sample)
                    if size > _WRITE_FROM or time.perf_counter() > write_at:
                        self._store(batch.write)
                        write_at = time.perf_counter() + _WRITE_AFTER
                    samples[position] = sample if self.then is None else _copy(sample)
            finally:
                self._store(batch.write)
                has_failed = made < len(missing)
                end = missing[made] if has_failed else len(samples)
                self.table.count(end - made, made + has_failed)

    def _keeping_generators(self) -> contextlib.AbstractContextManager[object]:
        """Returns a context in which samples are made. With ``then``, it leaves the random number generators unchanged,
        except in other threads, which share them."""
        is_main = threading.current_thread() is threading.main_thread()
        return GeneratorStates() if self.then is not None and is_main else contextlib.nullcontext()

    def _set_epoch(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.usage().samples_bytes > 0 and self.table.first_time(EPOCH):
            logger.warning(
                "cache(): set_epoch() of %s has no effect on samples that are already in the cache. Move the steps "
                "that depend on the epoch into then=, or do not cache this dataset",
                type(self.dataset).__name__,
            )
        return method(*args, **kwargs)


class _CachedBatches(CachedDataset[_T_co]):
    """A cached dataset with ``__getitems__``, which makes the missing samples of a batch in one call."""

    def __getitems__(self, indices: Any) -> Any:
        indices = list(indices)
        rows = [self._row(index) for index in indices]
        samples = [self._find(row, index) for row, index in zip(rows, indices, strict=True)]
        missing = [position for position, sample in enumerate(samples) if sample is MISSING]
        if missing:
            self.table.count(0, sum(rows[position] is not None for position in missing))
            with self._keeping_generators():
                made = self.dataset.__getitems__([indices[position] for position in missing])
                if not isinstance(made, list) or len(made) != len(missing):
                    return self._whole_batch(indices, made if len(missing) == len(indices) else None)
                for position, sample in zip(missing, made, strict=True):
                    row, index = rows[position], indices[position]
                    if row is not None:
                        self._probe(row, index, sample)
                        self._keep(row, index, sample)
                    samples[position] = sample if self.then is None else _copy(sample)
        return samples if self.then is None else [self.then(sample) for sample in samples]

    def _whole_batch(self, indices: list[Any], batch: Any) -> Any:
        """Returns the batch of a dataset whose ``__getitems__`` does not return a list with one sample for each index.
        The cache keeps none of it."""
        if self.then is not None:
            raise TypeError(
                f"then= needs samples, but __getitems__ of {type(self.dataset).__name__} does not return a list with "
                "one sample for each index"
            )
        return self.dataset.__getitems__(indices) if batch is None else batch

    def _make_again(self, index: Any) -> Any:
        return self.dataset.__getitems__([index])[0]


def _copy(sample: Any) -> Any:
    """Returns the copy of a sample that the cache would return, so that ``then`` may change it in place: the sample may
    share memory with the dataset."""
    try:
        return copy_of(sample, dumps)
    except Exception:
        # A sample that cannot be pickled, or not be unpickled.
        try:
            return copy.deepcopy(sample)
        except Exception:
            return sample


def _count(index: Any, dataset: Any) -> int:
    """Returns the number of samples of a dataset that an index selects."""
    if isinstance(index, slice):
        return len(range(*index.indices(len(dataset))))
    is_sequence = isinstance(index, list) or (isinstance(index, (np.ndarray, torch.Tensor)) and index.ndim > 0)
    return len(index) if is_sequence else 1


# Pickling with ForkingPickler, for other processes on this machine


def _reduce_table(table: CacheTable) -> tuple[Any, ...]:
    return descriptor_of(table, partial(CacheTable, opening=table.opening))


def _reduce_cached(cached: CachedDataset[Any]) -> tuple[Any, ...]:
    return cached_of, (cached.dataset, cached.table, cached.then, cached._origin)


register(CacheTable, _reduce_table)
register(CachedDataset, _reduce_cached)
register(_CachedBatches, _reduce_cached)


def _on_node(dataset: Any, then: Any, origin: Origin, rows: int, name: str) -> CachedDataset[Any]:
    """Returns the cached dataset on another machine, whose workers share a separate cache."""
    return cached_of(dataset, nodes.table_of(name, dataset, rows, origin), then, origin)
