"""Implements the option ``on_error``: leaves out or replaces failed samples when torch's fetcher requests them."""

from __future__ import annotations

import functools
import operator
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from torch.utils.data import _DatasetKind
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from rustloader._core import seed_words
from rustloader.errors import WorkerDiedError
from rustloader.fetch import torch_fetcher
from rustloader.fetch.failures import BatchWithFailures, EmptyBatchError, Failure, failure_of
from rustloader.fetch.tables import CachedFetcher, TableFetcher

# Maximum number of replacements that are tried for a sample before its error is raised.
MAX_ATTEMPTS = 10
# Maximum number of consecutive failures of an iterable dataset before its error is raised.
MAX_CONSECUTIVE_FAILURES = 1000
_U64 = (1 << 64) - 1
# The argument `worker` of `seed_words` that chooses a replacement. No worker has this number, so the words differ from
# those of every sample's seed.
_REPLACEMENT_WORD = _U64
# Takes the place of a sample that is left out.
LEFT_OUT = object()


def replacement(base_seed: int, epoch: int, index: int, attempt: int, length: int) -> int:
    """Returns the index that replaces a failed one in a dataset of at least 2 samples. ``attempt`` counts from 0."""
    other = seed_words(base_seed & _U64, attempt, index & _U64, _REPLACEMENT_WORD, epoch)[0] % (length - 1)
    return other + (other >= index % length)


class Guard:
    """Decides what happens to samples that fail, and keeps their failures until the batch is sent.

    Args:
        policy: "skip", "replace" or a function of (index, exception).
        dataset: The dataset, for its length.
        base_seed: Determines the replacements, together with ``epoch``.
        epoch: Number of the epoch.
        worker_id: ID of the worker; None without workers.
        limit: Maximum number of failures in the epoch; None if there is no limit or it is unknown.
        poison: The poison samples: for each task number and position in the task's index batch, the message of the
            error that replaces the sample.
        check: Called at each failed sample; raises an error if the worker has to stop.
        at_sample: Called before a sample is made separately, with the sample's position in the index batch, so that a
            death can be attributed to the sample. If torch's fetcher iterates over the index batch, the index batch
            itself reports the positions.
        is_foreign: Returns True if an error has nothing to do with the sample. The second argument is the error that
            was being handled when the batch began, or None.

    Attributes:
        epoch: Number of the epoch.
        consecutive_failures: Number of failures of an iterable dataset since its last sample.
    """

    def __init__(
        self,
        policy: str | Callable[[Any, Exception], Any],
        dataset: Any,
        *,
        base_seed: int,
        epoch: int,
        worker_id: int | None = None,
        limit: int | None = None,
        poison: Mapping[int, Mapping[int, str]] | None = None,
        check: Callable[[], object] = lambda: None,
        at_sample: Callable[[int], object] | None = None,
        is_foreign: Callable[[BaseException, BaseException | None], bool] = lambda error, handled: False,
    ) -> None:
        self._policy, self._dataset = policy, dataset
        self._base_seed, self.epoch = base_seed, epoch
        self._worker_id, self._limit = worker_id, limit
        self._all_poison = poison or {}
        self.check = check
        self.at_sample = at_sample
        self._is_foreign = is_foreign
        # Failures in the current batch, each with the sample's position. Several threads may add to this list.
        self._by_place: list[tuple[int, Failure]] = []
        self._poison: Mapping[int, str] = {}
        self._handled: BaseException | None = None
        self.consecutive_failures = 0

    def attach(self, fetcher: Any, kind: int, parallel: Callable[[Any], Any] | None = None) -> Any:
        """Guards a new fetcher whose class is torch's.

        Args:
            fetcher: The fetcher.
            kind: Kind of the dataset, a value of torch's ``_DatasetKind``.
            parallel: Wraps a dataset that is indexed with (position, index) pairs, so that several samples are made at
                the same time; None makes one after another.

        Returns:
            The dataset that makes the samples.
        """
        if kind == _DatasetKind.Iterable:
            self.consecutive_failures = 0
            fetcher.dataset_iter = GuardedIterator(fetcher.dataset_iter, self)
            return fetcher.dataset
        # The fetcher remains the same object: without workers, programs can access its attributes.
        table: Any = fetcher
        if isinstance(fetcher, CachedFetcher):
            # The guard makes each sample separately, because it may fail or kill the worker.
            table.__class__ = _MapDatasetFetcher
        elif isinstance(fetcher, TableFetcher):
            table.__class__ = _GuardedTable
            table.guard = self
            return table.dataset
        source = torch_fetcher.by_sample(fetcher.dataset)
        fetcher.dataset = GuardedDataset(source, self, parallel)
        return source

    def begin(self, task: int = 0) -> None:
        """Begins a batch, and forgets the failures of the previous one."""
        self._by_place = []
        self._poison = self._all_poison.get(task, {})
        self._handled = sys.exception()

    def failures(self) -> list[Failure]:
        """Returns the failures of the current batch, in the order of its samples."""
        # Threads record failures in any order. The sort is stable, so failures at the same position stay in order.
        return [failure for _, failure in sorted(self._by_place, key=operator.itemgetter(0))]

    def with_failures(self, batch: Any) -> Any:
        """Returns the batch, wrapped with the failures of its samples if there are any."""
        return BatchWithFailures(batch, self.failures()) if self._by_place else batch

    def has_failures(self) -> bool:
        """Returns True if a sample of the current batch has failed."""
        return bool(self._by_place)

    def is_poisoned(self) -> bool:
        """Returns True if the current batch contains a poison sample, which must not be made."""
        return bool(self._poison)

    def is_foreign(self, error: Exception) -> bool:
        """Returns True if an error has nothing to do with the sample, because a signal handler raised it."""
        return self._is_foreign(error, self._handled)

    def empty_batch_error(self) -> EmptyBatchError:
        """Returns the error to raise for a batch without samples."""
        return EmptyBatchError(self.failures())

    def sample(self, place: int, index: Any, fetch: Callable[[Any], Any]) -> Any:
        """Returns a sample, its replacement, or ``LEFT_OUT``. Raises an error if the batch has to fail."""
        # Also called before a poison sample, because its replacement may kill the worker, too.
        if self.at_sample is not None:
            self.at_sample(place)
        text = self._poison.get(place)
        try:
            if text is not None:
                raise WorkerDiedError(text)
            return fetch(index)
        except Exception as error:
            return self.handle_failure(place, index, error, fetch)

    def handle_failure(self, place: int, index: Any, error: Exception, fetch: Callable[[Any], Any]) -> Any:
        """Returns the replacement of a failed sample, or ``LEFT_OUT``. Raises an error if the batch has to fail."""
        if self.is_foreign(error):
            _raise(error)
        self.check()
        if self._policy == "skip":
            self._record(place, index, error, "skipped")
            return LEFT_OUT
        if self._policy == "replace":
            return self._replacement_sample(place, index, error, fetch)
        return self._substitute(place, index, error)

    def handle_iterator_failure(self, error: Exception) -> Any:
        """Returns the replacement of a sample after an error of an iterable dataset's iterator, or ``LEFT_OUT``. Raises
        an error if the batch has to fail."""
        if self.is_foreign(error):
            _raise(error)
        self.check()
        self.consecutive_failures += 1
        if self.consecutive_failures > MAX_CONSECUTIVE_FAILURES:
            self.consecutive_failures = 0
            _raise(error)
        if callable(self._policy):
            return self._substitute(0, None, error)
        self._record(0, None, error, "skipped")
        if self._limit is not None and len(self._by_place) > self._limit:
            # The main process then ends the epoch.
            raise self.empty_batch_error() from None
        return LEFT_OUT

    def _record(self, place: int, index: Any, error: Exception, action: str) -> None:
        self._by_place.append((place, failure_of(index, error, action, self._worker_id)))

    def _substitute(self, place: int, index: Any, error: Exception) -> Any:
        """Calls the program's on_error function, and returns its sample instead of the failed one."""
        assert callable(self._policy)
        try:
            sample = self._policy(index, error)
        except StopIteration as stop:
            # StopIteration would end the epoch.
            raise RuntimeError("the on_error callback raised StopIteration") from stop
        self._record(place, index, error, "replaced")
        return sample

    def _replacement_sample(self, place: int, index: Any, error: Exception, fetch: Callable[[Any], Any]) -> Any:
        """Returns another sample of the dataset. Raises the original error if all attempts fail."""
        failed_index, length = self._index_and_length(index, error)
        first = error
        try:
            for attempt in range(MAX_ATTEMPTS if length > 1 else 0):
                self._record(place, index, error, "replaced")
                index = replacement(self._base_seed, self.epoch, failed_index, attempt, length)
                try:
                    return fetch(index)
                except Exception as new_error:
                    if self.is_foreign(new_error):
                        raise
                    self.check()
                    error = new_error
            _raise(first)
        finally:
            # A frame that refers to its error forms a reference cycle.
            del first, error

    def _index_and_length(self, index: Any, error: Exception) -> tuple[int, int]:
        """Returns a failed sample's index as an integer, and the length of the dataset."""
        try:
            return operator.index(index), len(self._dataset)
        except (TypeError, NotImplementedError):
            raise TypeError(
                'on_error="replace" needs integer indices and a dataset with a length, got index '
                f'{reprlib.repr(index)} of a {type(self._dataset).__qualname__}; use "skip" or a function'
            ) from error


def _raise(error: BaseException) -> NoReturn:
    """Raises an error again, without a frame that refers to it."""
    try:
        raise error
    finally:
        del error


class GuardedIterator:
    """Wraps the iterator of an iterable dataset, and continues after its errors.

    Attributes:
        source: The dataset's iterator.
    """

    def __init__(self, iterator: Iterator[Any], guard: Guard) -> None:
        self.source, self._guard = iterator, guard
        self._advance: Callable[[], Any] = functools.partial(next, iterator)

    def __iter__(self) -> GuardedIterator:
        return self

    def __next__(self) -> Any:
        guard = self._guard
        while True:
            try:
                sample = self._advance()
            except StopIteration:
                # After failures just before the end, a fetcher calls this method once more. The dataset's iterator must
                # not be called again.
                self._advance = functools.partial(next, iter(()))
                raise
            except Exception as error:
                sample = guard.handle_iterator_failure(error)
                if sample is not LEFT_OUT:
                    return sample
            else:
                guard.consecutive_failures = 0
                return sample


class GuardedDataset:
    """A map-style dataset whose failed samples are left out or replaced. torch's fetcher calls its ``__getitems__``
    once per batch.

    Args:
        source: The dataset.
        guard: Decides what happens to samples that fail.
        parallel: See ``Guard.attach``.
    """

    def __init__(self, source: Any, guard: Guard, parallel: Callable[[Any], Any] | None = None) -> None:
        self.source, self._guard = source, guard
        # Makes the samples of (position, index) pairs in threads; None without threads.
        self._parallel = None if parallel is None else parallel(_PlacedSamples(source, guard))

    def __getitem__(self, index: Any) -> Any:
        """Returns a sample for a loader with ``batch_size=None``."""
        sample = self._guard.sample(0, index, self._item)
        if sample is LEFT_OUT:
            raise self._guard.empty_batch_error()
        return sample

    def __getitems__(self, indices: Any) -> Any:
        guard = self._guard
        if self._parallel is not None:
            samples = self._parallel.__getitems__(_PlacedIndices(indices))
        elif getattr(self.source, "__getitems__", None):
            samples = self._as_batch(indices)
        elif guard.is_poisoned():
            samples = [guard.sample(place, index, self._item) for place, index in enumerate(indices)]
        else:
            samples = self._by_sample(indices)
        if not guard.has_failures():
            return samples
        samples = [sample for sample in samples if sample is not LEFT_OUT]
        if not samples:
            raise guard.empty_batch_error()
        return samples

    def _item(self, index: Any) -> Any:
        return self.source[index]

    def _by_sample(self, indices: Any) -> list[Any]:
        """Makes the samples of a batch one at a time, as fast as torch's fetcher while none fails."""
        source, samples = self.source, []
        remaining = enumerate(indices)
        place, index = -1, None
        while True:
            try:
                for place, index in remaining:  # noqa: B007
                    samples.append(source[index])
                return samples
            except Exception as error:
                if place < len(samples):  # the index batch itself raised the error
                    raise
                samples.append(self._guard.handle_failure(place, index, error, self._item))

    def _as_batch(self, indices: Any) -> Any:
        """Makes a batch with the dataset's ``__getitems__``. If the batch fails, calls that method for each sample
        separately."""
        guard = self._guard
        if not guard.is_poisoned():
            try:
                return self.source.__getitems__(indices)
            except Exception as error:
                if guard.is_foreign(error):
                    raise
        samples: list[Any] = []
        for place, index in enumerate(indices):
            guard.check()
            sample = guard.sample(place, index, self._single)
            if type(sample) is not _SingleResult:
                samples.append(sample)
            elif isinstance(sample.samples, list | tuple):
                samples.extend(sample.samples)
            else:
                raise TypeError(
                    "on_error fetches the samples of a failed batch one at a time: __getitems__ of "
                    f"{type(self.source).__qualname__} must return a list of samples, got "
                    f"{type(sample.samples).__qualname__}"
                )
        return samples

    def _single(self, index: Any) -> Any:
        return _SingleResult(self.source.__getitems__([index]))


class _SingleResult:
    """The result of ``__getitems__`` for one index."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples


class _PlacedIndices:
    """An index batch as (position, index) pairs."""

    def __init__(self, indices: Any) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return iter(enumerate(self._indices))

    def __length_hint__(self) -> int:
        return operator.length_hint(self._indices, sys.maxsize)


class _PlacedSamples:
    """A guarded dataset that is indexed with (position, index) pairs, for threads."""

    def __init__(self, source: Any, guard: Guard) -> None:
        self._fetch, self._guard = source.__getitem__, guard

    def __getitem__(self, pair: tuple[int, Any]) -> Any:
        return self._guard.sample(*pair, self._fetch)


class _GuardedTable(TableFetcher):
    """A table's fetcher that, if a batch fails, fetches the batch again with a guard."""

    guard: Guard

    def fetch(self, possibly_batched_index: Any) -> Any:
        try:
            return super().fetch(possibly_batched_index)
        except Exception as error:
            if self.guard.is_foreign(error):
                raise
        # Fetches the entire batch again, one sample at a time.
        table = GuardedDataset(torch_fetcher.by_sample(self.dataset), self.guard)
        return _MapDatasetFetcher(table, self.auto_collation, self.collate_fn, self.drop_last).fetch(
            possibly_batched_index
        )


def unguarded(source: Any) -> Any:
    """Returns the dataset or iterator that a guarded one wraps. Returns any other object unchanged."""
    return source.source if isinstance(source, GuardedDataset | GuardedIterator) else source
