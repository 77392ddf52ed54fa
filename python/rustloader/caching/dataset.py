"""The cached dataset, which keeps the samples of another dataset."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Subset

from rustloader._core import CacheTable, copy_of
from rustloader.caching import nodes
from rustloader.caching.comparing import Outcome, are_equal, compare
from rustloader.caching.nodes import Origin
from rustloader.caching.usage import CacheUsage
from rustloader.caching.wrapper import Wrapper
from rustloader.sharing.pickling import descriptor_of, dumps, register
from rustloader.system.generators import GeneratorStates

logger = logging.getLogger("rustloader")

_T_co = TypeVar("_T_co", covariant=True)
_MISSING = object()
# Bits of the events that are logged. Each is logged once, by one of the processes that use the cache.
_FULL, RANDOM, _REFUSED, _FAILED, _EPOCH, _INDEX = 1, 2, 4, 8, 16, 32


def usage_of(table: CacheTable) -> CacheUsage:
    """Returns the usage of a cache."""
    return CacheUsage(**table.usage())


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


class CachedDataset(Wrapper[_T_co]):
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
        sample: Any = self.table.get(index, _MISSING) if type(index) is int else _MISSING
        if sample is _MISSING:
            row = self._row(index)
            # An int with a row is not looked up again, because that would count a second miss.
            if type(index) is not int or row is None:
                sample = self._find(row, index)
            if sample is _MISSING:
                sample = self._make_sample(row, index)
        return sample if self.then is None else self.then(sample)

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
        """Returns the sample in the cache, if it is there. Counts a hit, or a miss for each sample of the index."""
        if row is not None:
            sample = self.table.get(row, _MISSING)
            return self._due_sample(row, index) if sample is _MISSING else sample
        self.table.count_misses(_count(index, self.dataset))
        is_number = isinstance(index, int) or (isinstance(index, torch.Tensor) and index.ndim == 0)
        if is_number and type(index) is not int and self.table.first_time(_INDEX):
            logger.warning(
                "cache(): samples at indices of type %s are made each time, because such an index may be more than its "
                "value: pass int(index)",
                type(index).__name__,
            )
        return _MISSING

    def _make_sample(self, row: int | None, index: Any) -> Any:
        """Makes a sample, and keeps it if the cache has a row for it. With ``then``, returns a copy, and making the
        sample in the main thread leaves the random number generators unchanged."""
        if row is not None and (sample := self._due_sample(row, index)) is not _MISSING:
            return sample
        if self.then is None:
            return self._made(row, index)
        if threading.current_thread() is not threading.main_thread():
            return _copy(self._made(row, index))
        generators = GeneratorStates()
        try:
            return _copy(self._made(row, index))
        finally:
            generators.restore()

    def _made(self, row: int | None, index: Any) -> Any:
        sample = self.dataset[index]
        if row is not None:
            self._keep(row, sample, lambda: self.dataset[index])
        return sample

    def _keep(self, row: int, sample: Any, make_again: Callable[[], Any]) -> None:
        self._store(row, sample, make_again)
        if self.table.is_due(row):
            # Another program has stored this row in the meantime.
            self._compare(row, make_again, sample)

    def _store(self, row: int, sample: Any, make_again: Callable[[], Any]) -> None:
        table = self.table
        if not table.takes(row):
            return
        if table.take_probe():
            self._probe(row, sample, make_again)
        try:
            full = table.put(row, sample, dumps)
        except MemoryError:
            # Only the cache lacks memory. The sample itself has been made.
            return
        except OSError as error:
            if table.first_time(_FAILED):
                logger.warning("cache(): samples can no longer be written; the cache accepts no more: %s", error)
            return
        except Exception as error:
            table.never(row)
            if table.first_time(_REFUSED):
                logger.warning(
                    "cache(): sample %d (%s) cannot be kept and is made each time: %s",
                    row,
                    type(sample).__name__,
                    f"{type(error).__name__}: {error}",
                )
            return
        if full is not None and table.first_time(_FULL):
            self._log_full_cache(full)

    def _set_epoch(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.usage().samples_bytes > 0 and self.table.first_time(_EPOCH):
            logger.warning(
                "cache(): set_epoch() of %s has no effect on samples that are already in the cache. Move the steps "
                "that depend on the epoch into then=, or do not cache this dataset",
                type(self.dataset).__name__,
            )
        return method(*args, **kwargs)

    def _log_full_cache(self, why: str) -> None:
        usage = self.usage()
        kept = usage.samples_bytes
        if why == "full":
            text = (
                "cache(): the limit of %d bytes is reached: %d bytes of samples are kept; the others are made each time"
            )
            logger.info(text, usage.limit, kept)
        else:
            text = "cache(): no room for more samples: %d bytes of samples are kept; the others are made each time"
            logger.warning(text, kept)

    def _probe(self, row: int, sample: Any, make_again: Callable[[], Any]) -> None:
        """Makes a sample a second time, and warns that the dataset is random if the two differ."""
        generators = GeneratorStates()
        try:
            again = make_again()
        except Exception as error:
            logger.debug("cache(): sample %d cannot be made a second time: %r", row, error)
            return
        finally:
            generators.restore()
        if not are_equal(sample, again):
            self._warn_of_randomness(row)

    def _warn_of_randomness(self, row: int) -> None:
        if self.table.first_time(RANDOM):
            logger.warning(
                "cache(): sample %d of %s differs when it is made again: the cache keeps the first result, so all "
                "epochs see the same sample. Move random steps into a function of the sample, and pass that as then=",
                row,
                type(self.dataset).__name__,
            )

    # Samples in a file that another program has stored

    def _due_sample(self, row: int, index: Any) -> Any:
        """Returns the sample of a row that must be compared before it is used."""
        if not self.table.is_due(row):
            return _MISSING
        self._compare(row, partial(self._make_sample_again, index))
        return self.table.get(row, _MISSING)

    def _compare(self, row: int, make: Callable[[], Any], made: Any = None) -> None:
        """Compares the sample of a row with that of the dataset, which may have ``made`` it already.

        Raises:
            ValueError: They differ, or two others did: the file belongs to another dataset.
        """
        table = self.table
        if (differing := table.differing_row) is None:
            start = time.perf_counter()
            kept = table.peek(row, _MISSING)
            if kept is _MISSING:
                return
            outcome = compare(kept, make, made)
            table.compared(row, outcome is not Outcome.OTHER, time.perf_counter() - start)
            if outcome is Outcome.RANDOM:
                self._warn_of_randomness(row)
            if outcome is not Outcome.OTHER:
                return
            differing = row
        raise ValueError(
            f"{self._origin.path} is the cache of another dataset: sample {differing} of {type(self.dataset).__name__} "
            "differs there; give another path, or remove the file. Pass another version= whenever the samples change"
        )

    def _make_sample_again(self, index: Any) -> Any:
        return self.dataset[index]


class _CachedBatches(CachedDataset[_T_co]):
    """A cached dataset with ``__getitems__``, which makes the missing samples of a batch in one call."""

    def __getitems__(self, indices: Any) -> Any:
        indices = list(indices)
        rows = [self._row(index) for index in indices]
        samples = [self._find(row, index) for row, index in zip(rows, indices, strict=True)]
        missing = [position for position, sample in enumerate(samples) if sample is _MISSING]
        if missing:
            generators = None if self.then is None else GeneratorStates()
            try:
                made = self.dataset.__getitems__([indices[position] for position in missing])
                if not isinstance(made, list) or len(made) != len(missing):
                    return self._whole_batch(indices, made if len(missing) == len(indices) else None)
                for position, sample in zip(missing, made, strict=True):
                    if (row := rows[position]) is not None:
                        self._keep(row, sample, partial(self._make_sample_again, indices[position]))
                    samples[position] = sample if self.then is None else _copy(sample)
            finally:
                if generators is not None:
                    generators.restore()
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

    def _make_sample_again(self, index: Any) -> Any:
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
