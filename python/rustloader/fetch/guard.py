"""``on_error``: samples that fail are left out or replaced where torch's fetcher asks for them."""

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
from rustloader.fetch import torchs
from rustloader.fetch.failures import EmptyBatchError, Failure, Reported, failure_of
from rustloader.fetch.tables import TableFetcher

# Replacements that are tried for a sample, before its error is raised.
ATTEMPTS = 10
# Failures of an iterable dataset without a sample in between, after which the error is raised.
IN_A_ROW = 1000
_U64 = (1 << 64) - 1
# In the place of a worker's number: no seed of a sample has the same words.
_REPLACEMENTS = _U64
# A sample that is left out.
NOTHING = object()


def replacement(base_seed: int, epoch: int, index: int, attempt: int, length: int) -> int:
    """Returns another index of a dataset of this length, at least 2, to replace a failed one. ``attempt`` counts from
    0.
    """
    other = seed_words(base_seed & _U64, attempt, index & _U64, _REPLACEMENTS, epoch)[0] % (length - 1)
    return other + (other >= index % length)


class Guard:
    """Decides about the samples that fail, and keeps their failures until the batch is sent.

    Args:
        policy: "skip", "replace" or a function of (index, exception).
        dataset: The dataset, for its length.
        base_seed: Part of the choice of replacements, with ``epoch``.
        epoch: The same.
        worker_id: Number of the worker, or None.
        limit: Number of failures that the epoch may have, if it is known.
        poison: By task, the texts of the errors that some places in its index batch have instead of a sample.
        check: Called between samples that fail; raises if the worker has to leave.
        at_sample: Called with the place of a sample that is made alone, so that a death can be put down to it. Where
            torch's fetcher walks through the index batch, the batch shows the places itself.
        is_foreign: Whether an error has nothing to do with the sample, given the error that was handled before.

    Attributes:
        epoch: Number of the epoch.
        in_a_row: Failures of an iterable dataset since its last sample.
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
        # Failures of the batch that is made now, each with its place. Threads add to them.
        self._by_place: list[tuple[int, Failure]] = []
        self._poison: Mapping[int, str] = {}
        self._handled: BaseException | None = None
        self.in_a_row = 0

    def attach(self, fetcher: Any, kind: int, several: Callable[[Any], Any] | None = None) -> Any:
        """Guards a new fetcher, whose class is torch's.

        Args:
            fetcher: The fetcher.
            kind: Kind of the dataset, a value of torch's ``_DatasetKind``.
            several: Makes a dataset of (place, index) into one that makes several samples at the same time.

        Returns:
            The dataset that makes the samples.
        """
        if kind == _DatasetKind.Iterable:
            self.in_a_row = 0
            fetcher.dataset_iter = GuardedIterator(fetcher.dataset_iter, self)
            return fetcher.dataset
        if isinstance(fetcher, TableFetcher):
            # Keeps its attributes, which programs can reach without workers.
            table: Any = fetcher
            table.__class__ = _GuardedTable
            table.guard = self
            return table.dataset
        source = torchs.by_sample(fetcher.dataset)
        fetcher.dataset = GuardedDataset(source, self, several)
        return source

    def begin(self, task: int = 0) -> None:
        """Begins a batch: forgets the failures of the last one."""
        self._by_place = []
        self._poison = self._all_poison.get(task, {})
        self._handled = sys.exception()

    def failures(self) -> list[Failure]:
        """Returns the failures of the current batch, in the order of its samples."""
        # Threads find them in any order. The sort keeps the order of those of one place.
        return [failure for _, failure in sorted(self._by_place, key=operator.itemgetter(0))]

    def take_failures(self) -> list[Failure]:
        """Returns the failures of the current batch, and forgets them."""
        failures = self.failures() if self._by_place else []
        self._by_place = []
        return failures

    def reported(self, batch: Any) -> Any:
        """Returns the batch, with the failures of its samples if there are any."""
        return Reported(batch, self.failures()) if self._by_place else batch

    def why_empty(self, error: Exception, kind: int) -> list[Failure] | None:
        """Returns the failures that ``error`` of the fetcher stands for; None: it stands for itself.

        The end of an iterable dataset comes after them: the fetcher is asked again.
        """
        if isinstance(error, EmptyBatchError):
            return error.failures
        if isinstance(error, StopIteration) and kind == _DatasetKind.Iterable and self._by_place:
            return self.failures()
        return None

    def has_failures(self) -> bool:
        """Returns True if a sample of the current batch has failed."""
        return bool(self._by_place)

    def is_poisoned(self) -> bool:
        """Returns True if a sample of the current batch must not be made."""
        return bool(self._poison)

    def is_foreign(self, error: Exception) -> bool:
        """Returns True if an error has nothing to do with the sample: a signal handler has raised it."""
        return self._is_foreign(error, self._handled)

    def empty(self) -> EmptyBatchError:
        """Returns the error in place of a batch without samples."""
        return EmptyBatchError(self.failures())

    def sample(self, place: int, index: Any, fetch: Callable[[Any], Any]) -> Any:
        """Makes a sample, or decides about its replacement. Raises if the batch has to fail."""
        # Also for a sample that is passed over: what takes its place may kill, too.
        if self.at_sample is not None:
            self.at_sample(place)
        text = self._poison.get(place)
        try:
            if text is not None:
                raise WorkerDiedError(text)
            return fetch(index)
        except Exception as error:
            return self.instead_of(place, index, error, fetch)

    def instead_of(self, place: int, index: Any, error: Exception, fetch: Callable[[Any], Any]) -> Any:
        """Decides about the replacement of a sample that has failed. Raises if the batch has to fail."""
        if self.is_foreign(error):
            _raise(error)
        self.check()
        if self._policy == "skip":
            self._note(place, index, error, "skipped")
            return NOTHING
        if self._policy == "replace":
            return self._replaced(place, index, error, fetch)
        return self._substitute(place, index, error)

    def instead_of_next(self, error: Exception) -> Any:
        """Decides about an error of an iterable dataset's iterator. Raises if the batch has to fail."""
        if self.is_foreign(error):
            _raise(error)
        self.check()
        self.in_a_row += 1
        if self.in_a_row > IN_A_ROW:
            self.in_a_row = 0
            _raise(error)
        if callable(self._policy):
            return self._substitute(0, None, error)
        self._note(0, None, error, "skipped")
        if self._limit is not None and len(self._by_place) > self._limit:
            # The main process ends the epoch.
            raise self.empty() from None
        return NOTHING

    def _note(self, place: int, index: Any, error: Exception, action: str) -> None:
        self._by_place.append((place, failure_of(index, error, action, self._worker_id)))

    def _substitute(self, place: int, index: Any, error: Exception) -> Any:
        """Returns the sample that the program's function gives in place of a failed one."""
        assert callable(self._policy)
        try:
            sample = self._policy(index, error)
        except StopIteration as stop:
            # It would end the epoch.
            raise RuntimeError("the on_error function raised StopIteration") from stop
        self._note(place, index, error, "replaced")
        return sample

    def _replaced(self, place: int, index: Any, error: Exception, fetch: Callable[[Any], Any]) -> Any:
        """Returns another sample of the dataset. Raises the sample's own error if all that were tried fail."""
        number, length = self._number(index, error)
        first = error
        try:
            for attempt in range(ATTEMPTS if length > 1 else 0):
                self._note(place, index, error, "replaced")
                index = replacement(self._base_seed, self.epoch, number, attempt, length)
                try:
                    return fetch(index)
                except Exception as again:
                    if self.is_foreign(again):
                        raise
                    self.check()
                    error = again
            _raise(first)
        finally:
            # A frame that keeps its error is a cycle.
            del first, error

    def _number(self, index: Any, error: Exception) -> tuple[int, int]:
        """Returns a failed sample's index, and the length of the dataset."""
        try:
            return operator.index(index), len(self._dataset)
        except (TypeError, NotImplementedError):
            raise TypeError(
                'on_error="replace" needs indices that are integers and a dataset with a length, got the index '
                f'{reprlib.repr(index)} of a {type(self._dataset).__qualname__}; use "skip" or a function'
            ) from error


def _raise(error: BaseException) -> NoReturn:
    """Raises an error again, without a frame that keeps it."""
    try:
        raise error
    finally:
        del error


class GuardedIterator:
    """An iterator of an iterable dataset that continues after an error.

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
                # A fetcher may ask once more, for the failures before the end.
                self._advance = functools.partial(next, iter(()))
                raise
            except Exception as error:
                sample = guard.instead_of_next(error)
                if sample is not NOTHING:
                    return sample
            else:
                guard.in_a_row = 0
                return sample


class GuardedDataset:
    """A map-style dataset without the samples that fail. torch's fetcher asks it for whole batches.

    Args:
        source: The dataset.
        guard: Decides about errors.
        several: As for ``Guard.attach``.
    """

    def __init__(self, source: Any, guard: Guard, several: Callable[[Any], Any] | None = None) -> None:
        self.source, self._guard = source, guard
        # Makes the samples of (place, index) pairs at the same time.
        self._several = None if several is None else several(_Placed(source, guard))

    def __getitem__(self, index: Any) -> Any:
        """Returns the only sample of a loader without batches."""
        sample = self._guard.sample(0, index, self._item)
        if sample is NOTHING:
            raise self._guard.empty()
        return sample

    def __getitems__(self, indices: Any) -> Any:
        guard = self._guard
        if self._several is not None:
            samples = self._several.__getitems__(_Places(indices))
        elif getattr(self.source, "__getitems__", None):
            samples = self._as_batch(indices)
        elif guard.is_poisoned():
            samples = [guard.sample(place, index, self._item) for place, index in enumerate(indices)]
        else:
            samples = self._by_sample(indices)
        if not guard.has_failures():
            return samples
        samples = [sample for sample in samples if sample is not NOTHING]
        if not samples:
            raise guard.empty()
        return samples

    def _item(self, index: Any) -> Any:
        return self.source[index]

    def _by_sample(self, indices: Any) -> list[Any]:
        """Makes the batch of torch's fetcher from an index batch, at the same speed while nothing fails."""
        source, samples = self.source, []
        left = enumerate(indices)
        place, index = -1, None
        while True:
            try:
                for place, index in left:  # noqa: B007
                    samples.append(source[index])
                return samples
            except Exception as error:
                if place < len(samples):  # an error of the index batch
                    raise
                samples.append(self._guard.instead_of(place, index, error, self._item))

    def _as_batch(self, indices: Any) -> Any:
        """Makes a batch by ``__getitems__`` of the dataset; if it fails, it is called for each sample alone."""
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
            sample = guard.sample(place, index, self._one_sample)
            if type(sample) is not _Alone:
                samples.append(sample)
            elif isinstance(sample.samples, list | tuple):
                samples.extend(sample.samples)
            else:
                raise TypeError(
                    "on_error asks for the samples of a failed batch one by one: __getitems__ of "
                    f"{type(self.source).__qualname__} must return a list of samples, got "
                    f"{type(sample.samples).__qualname__}"
                )
        return samples

    def _one_sample(self, index: Any) -> Any:
        return _Alone(self.source.__getitems__([index]))


class _Alone:
    """The result of ``__getitems__`` for one index."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples


class _Places:
    """An index batch as (place, index) pairs."""

    def __init__(self, indices: Any) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return iter(enumerate(self._indices))

    def __length_hint__(self) -> int:
        return operator.length_hint(self._indices, sys.maxsize)


class _Placed:
    """A guarded dataset of (place, index) pairs, for threads."""

    def __init__(self, source: Any, guard: Guard) -> None:
        self._fetch, self._guard = source.__getitem__, guard

    def __getitem__(self, pair: tuple[int, Any]) -> Any:
        return self._guard.sample(*pair, self._fetch)


class _GuardedTable(TableFetcher):
    """A table's fetcher that leaves a batch that fails to the guard."""

    guard: Guard

    def fetch(self, possibly_batched_index: Any) -> Any:
        try:
            return super().fetch(possibly_batched_index)
        except Exception as error:
            if self.guard.is_foreign(error):
                raise
        # By sample: the parts of a batch that the gather has read are read again.
        table = GuardedDataset(torchs.by_sample(self.dataset), self.guard)
        return _MapDatasetFetcher(table, self.auto_collation, self.collate_fn, self.drop_last).fetch(
            possibly_batched_index
        )


def unguarded(source: Any) -> Any:
    """Returns the dataset or iterator that a guard stands in for; anything else as it is."""
    return source.source if isinstance(source, GuardedDataset | GuardedIterator) else source
