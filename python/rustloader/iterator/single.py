"""Adds index streams, seeds, tables and the handling of failed samples to torch's single-process iterator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import _DatasetKind, _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from rustloader._core import gather
from rustloader.fetch import tables
from rustloader.fetch.failures import EmptyBatchError, Failure
from rustloader.fetch.guard import Guard
from rustloader.fetch.inline import StepFetcher
from rustloader.fetch.seeds import Seeding, Seeds
from rustloader.fetch.step import Step
from rustloader.iterator import adaptation, failures, fetches
from rustloader.iterator.failures import FailureCount
from rustloader.metrics import ledger
from rustloader.order.stream import stream
from rustloader.settings.config import LoaderConfig, resolve
from rustloader.system import moved_storages
from rustloader.system.interrupts import is_interrupt
from rustloader.system.protocols import LoaderLike, SingleIterator


def prepare(iterator: _BaseDataLoaderIter, loader: LoaderLike) -> None:
    """Applies a loader's options to its new iterator. Does nothing if the iterator's class is not torch's own."""
    if type(iterator) is not _SingleProcessDataLoaderIter:
        return
    iterator._sampler_iter = stream(iterator._index_sampler, iterator._sampler_iter)
    config = adaptation.adapted(loader, resolve(loader).changed(worker_threads=1))
    seeding = Seeding.of(loader, config, int(iterator._base_seed))
    prepare_fetcher(iterator, loader, config, seeding, batches=iterator._sampler_iter)
    if isinstance(iterator._dataset_fetcher, _CountingFetcher):
        iterator._sampler_iter = _IndexBatches(iterator._sampler_iter, iterator._dataset_fetcher)
    fetches.observe(iterator, loader, config)


def prepare_fetcher(
    iterator: SingleIterator,
    loader: LoaderLike,
    config: LoaderConfig,
    seeding: Seeding | None,
    epoch: int = 0,
    batches: Iterator[Any] | None = None,
) -> FailureCount | None:
    """Gives an iterator a fetcher that fetches batches as the loader's options require.

    Args:
        iterator: The iterator.
        loader: The loader.
        config: The loader's settings.
        seeding: The seeds of the epoch; None if they are torch's.
        epoch: Number of the epoch, used only if the seeds are torch's.
        batches: The iterator over the epoch's index batches. The fetcher then counts failed samples, and skips batches
            that have lost all of them. None if the iterator does that.

    Returns:
        The count of failed samples; None if ``on_error`` is "raise".
    """
    kind = iterator._dataset_kind
    seeds = None if seeding is None else Seeds(seeding, 1 if kind == _DatasetKind.Iterable else 0)
    count = guard = None
    if not config.raises:
        ledger.open_for(iterator, loader)
        count = failures.of(loader, config.max_errors, ledger.of(iterator).faults)
        base_seed = int(iterator._base_seed)
        if seeding is not None:
            base_seed, epoch = seeding.base_seed, seeding.epoch
        guard = Guard(
            config.on_error,
            iterator._dataset,
            base_seed=base_seed,
            epoch=epoch,
            limit=count.allowed,
            is_foreign=is_interrupt,
        )
    elif seeds is None:
        _gather_rows(iterator)
        return None
    step = Step(iterator._dataset, kind, iterator._auto_collation, seeds, guard)
    arguments = step, iterator._dataset_fetcher, lambda: _gather_rows(iterator)
    if count is None or batches is None:
        iterator._dataset_fetcher = StepFetcher(*arguments)
    else:
        iterator._dataset_fetcher = _CountingFetcher(*arguments, count, batches)
    if seeding is not None:
        seeding.note_begun(loader)
    return count


def _gather_rows(iterator: SingleIterator) -> None:
    """If the dataset of an iterator is a table, makes the iterator's fetcher gather all rows of a batch at once."""
    # Not if this process is a worker of another loader: there, torch's default_collate makes tensors in shared memory.
    if _utils.worker.get_worker_info() is None:
        moved_storages.watch()
        tables.use(iterator._dataset_fetcher, iterator._collate_fn, gather)


class _IndexBatches:
    """An iterator over an epoch's index batches, which raises the epoch's error once too many samples have failed."""

    def __init__(self, batches: Iterator[Any], fetcher: _CountingFetcher) -> None:
        self._batches, self._fetcher = batches, fetcher

    def __iter__(self) -> _IndexBatches:
        return self

    def __next__(self) -> Any:
        self._fetcher.count_failures()
        return next(self._batches)


class _CountingFetcher(StepFetcher):
    """A ``StepFetcher`` that counts failed samples, and skips batches that have lost all their samples.

    Args:
        step: As for ``StepFetcher``. It has a guard.
        fetcher: As for ``StepFetcher``.
        use_gather: As for ``StepFetcher``.
        count: The count of failed samples.
        batches: The iterator over the epoch's index batches.
    """

    def __init__(
        self, step: Step, fetcher: Any, use_gather: Callable[[], Any], count: FailureCount, batches: Iterator[Any]
    ) -> None:
        super().__init__(step, fetcher, use_gather)
        self._count, self._batches = count, batches
        self._delivered = 0
        # The failures that are being counted, and whether their batch has lost all its samples. After an interrupt, the
        # next call counts the rest.
        self._uncounted: tuple[list[Failure], bool] | None = None

    def fetch(self, index: Any) -> Any:
        """Fetches the batch for an index batch. If it has lost all its samples, fetches the batches of further index
        batches until one has samples. Raises the epoch's error if the failures exceed ``max_errors``."""
        assert self.step.guard is not None
        while True:
            data, is_empty = None, False
            try:
                data = super().fetch(index)
                failed = self.step.guard.failures()
            except EmptyBatchError as error:
                is_empty, failed = True, error.failures
            self._uncounted = failed, is_empty
            self.count_failures()
            if not is_empty:
                self._delivered += 1
                return data
            index = next(self._batches)

    def count_failures(self) -> None:
        """Counts the failures of the last batch, unless that is done. Raises the epoch's error if the failures exceed
        ``max_errors``."""
        if self._uncounted is not None:
            self._count.add(self._uncounted[0], self._delivered + 1, self._uncounted[1])
            self._uncounted = None
        if self._count.error is not None:
            raise self._count.error()
