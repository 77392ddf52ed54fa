"""Adds index streams, seeds, tables and the handling of failed samples to torch's single-process iterator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import _DatasetKind, _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from rustloader._core import gather
from rustloader.fetch import tables
from rustloader.fetch.guard import Guard
from rustloader.fetch.inline import StepFetcher
from rustloader.fetch.seeds import Seeding, Seeds
from rustloader.fetch.step import Step
from rustloader.iterator import adaptation, failures, fetches
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
    guard_and_count = prepare_fetcher(iterator, loader, config, seeding)
    if guard_and_count is not None:
        guard, count = guard_and_count
        iterator._sampler_iter = _IndexBatches(iterator._sampler_iter, count)
        iterator._dataset_fetcher = GuardedFetcher(
            iterator._dataset_fetcher, iterator._dataset_kind, guard, iterator._sampler_iter, count
        )
    fetches.observe(iterator, loader, config)


def prepare_fetcher(
    iterator: SingleIterator, loader: LoaderLike, config: LoaderConfig, seeding: Seeding | None, epoch: int = 0
) -> tuple[Guard, failures.FailureCount] | None:
    """Gives an iterator a fetcher that fetches batches as the loader's options require.

    Args:
        iterator: The iterator.
        loader: The loader.
        config: The loader's settings.
        seeding: The seeds of the epoch; None if they are torch's.
        epoch: Number of the epoch, used only if the seeds are torch's.

    Returns:
        The guard, which decides what happens to failed samples, and the count of them; None if ``on_error`` is "raise".
    """
    kind = iterator._dataset_kind
    seeds = None if seeding is None else Seeds(seeding, 1 if kind == _DatasetKind.Iterable else 0)
    guard_and_count = _guard_and_count(iterator, loader, config, seeding, epoch)
    guard = None if guard_and_count is None else guard_and_count[0]
    if seeds is None and guard is None:
        _gather_rows(iterator)
        return None
    step = Step(iterator._dataset, kind, iterator._auto_collation, seeds, guard)
    iterator._dataset_fetcher = StepFetcher(step, iterator._dataset_fetcher, lambda: _gather_rows(iterator))
    if seeding is not None:
        seeding.note_begun(loader)
    return guard_and_count


def _gather_rows(iterator: SingleIterator) -> None:
    """If the dataset of an iterator is a table, makes the iterator's fetcher gather all rows of a batch at once."""
    # Not if this process is a worker of another loader: there, torch's default_collate makes tensors in shared memory.
    if _utils.worker.get_worker_info() is None:
        moved_storages.watch()
        tables.use(iterator._dataset_fetcher, iterator._collate_fn, gather)


def _guard_and_count(
    iterator: SingleIterator, loader: LoaderLike, config: LoaderConfig, seeding: Seeding | None, epoch: int
) -> tuple[Guard, failures.FailureCount] | None:
    if config.raises:
        return None
    base_seed = int(iterator._base_seed)
    if seeding is not None:
        base_seed, epoch = seeding.base_seed, seeding.epoch
    ledger.open_for(iterator, loader)
    count = failures.of(loader, config.max_errors, ledger.of(iterator).faults)
    guard = Guard(
        config.on_error,
        iterator._dataset,
        base_seed=base_seed,
        epoch=epoch,
        limit=count.allowed,
        is_foreign=is_interrupt,
    )
    return guard, count


class _IndexBatches:
    """An iterator over an epoch's index batches, which raises the epoch's error once too many samples have failed."""

    def __init__(self, batches: Iterator[Any], count: failures.FailureCount) -> None:
        self._batches, self._count = batches, count

    def __iter__(self) -> _IndexBatches:
        return self

    def __next__(self) -> Any:
        if self._count.error is not None:
            raise self._count.error()
        return next(self._batches)


class GuardedFetcher:
    """A fetcher that counts failed samples, and skips batches that have lost all their samples.

    Args:
        inner: The fetcher that calls the guard.
        kind: The dataset's kind, a value of torch's ``_DatasetKind``.
        guard: Decides what happens to failed samples.
        batches: The iterator over the epoch's index batches.
        count: The count of failed samples.
    """

    def __init__(
        self, inner: Any, kind: int, guard: Guard, batches: Iterator[Any], count: failures.FailureCount
    ) -> None:
        self.inner, self._kind, self._guard = inner, kind, guard
        self._batches, self._count = batches, count
        self._delivered = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "inner"), name)

    def fetch(self, index: Any) -> Any:
        """Fetches the batch for an index batch. If all its samples have failed, draws further index batches until a
        batch has samples. Raises the epoch's error if the failures exceed ``max_errors``."""
        guard = self._guard
        while True:
            try:
                data = self.inner.fetch(index)
            except Exception as error:
                failed = guard.why_empty(error, self._kind)
                if failed is None:
                    raise
            else:
                self._add(guard.failures())
                self._delivered += 1
                return data
            self._add(failed)
            index = next(self._batches)

    def _add(self, failed: list[Any]) -> None:
        if failed:
            error = self._count.add(failed, self._delivered + 1)
            if error is not None:
                raise error()
