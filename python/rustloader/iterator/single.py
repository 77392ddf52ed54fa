"""Prepares torch's iterator without workers: index streams, seeds, tables, failing samples. Its class stays torch's."""

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
from rustloader.iterator import failures, fetching, indices
from rustloader.metrics import ledger
from rustloader.settings import loader_state, names
from rustloader.settings.config import LoaderConfig, resolve
from rustloader.system import moved_storages
from rustloader.system.interrupts import is_interrupt
from rustloader.system.protocols import LoaderLike, SingleIterator
from rustloader.tracing import core as tracing


def prepare(iterator: _BaseDataLoaderIter, loader: LoaderLike) -> None:
    """Prepares a new iterator of a loader; leaves iterators of other classes than torch's alone."""
    if type(iterator) is not _SingleProcessDataLoaderIter:
        return
    iterator._sampler_iter = indices.stream(iterator._index_sampler, iterator._sampler_iter)
    config = fetching.adapted(loader, resolve(loader).changed(worker_threads=1))
    seeding = fetching.seeding(loader, config, int(iterator._base_seed))
    guarding = prepare_fetcher(iterator, loader, config, seeding)
    if guarding is not None:
        guard, count = guarding
        iterator._sampler_iter = _Indices(iterator._sampler_iter, count)
        iterator._dataset_fetcher = GuardedFetcher(
            iterator._dataset_fetcher, iterator._dataset_kind, guard, iterator._sampler_iter, count
        )
    tracing.follow_fetches(iterator, loader_state.of(loader), names.of(loader))


def prepare_fetcher(
    iterator: SingleIterator, loader: LoaderLike, config: LoaderConfig, seeding: Seeding | None, epoch: int = 0
) -> tuple[Guard, failures.FailureCount] | None:
    """Lets the fetcher of an iterator take the step that the options of its loader ask for.

    Args:
        iterator: The iterator.
        loader: The loader.
        config: Its settings.
        seeding: The seeds of the epoch, unless they are torch's.
        epoch: Number of the epoch under torch's seeds.

    Returns:
        The guard, which decides about failing samples, and their count; None without one.
    """
    kind = iterator._dataset_kind
    seeds = None if seeding is None else Seeds(seeding, 1 if kind == _DatasetKind.Iterable else 0)
    guarding = _guarded(iterator, loader, config, seeding, epoch)
    guard = None if guarding is None else guarding[0]
    if seeds is None and guard is None:
        _gather_rows(iterator)
        return None
    step = Step(iterator._dataset, kind, iterator._auto_collation, seeds, guard)
    iterator._dataset_fetcher = StepFetcher(step, iterator._dataset_fetcher, lambda: _gather_rows(iterator))
    if seeding is not None:
        fetching.note_begun(loader, seeding)
    return guarding


def _gather_rows(iterator: SingleIterator) -> None:
    """Lets the fetcher of an iterator gather the rows of a table."""
    # In a worker of another loader default_collate makes shared tensors.
    if _utils.worker.get_worker_info() is None:
        moved_storages.watch()
        tables.use(iterator._dataset_fetcher, iterator._collate_fn, gather)


def _guarded(
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


class _Indices:
    """The index batches of an epoch, which end with its error."""

    def __init__(self, batches: Iterator[Any], count: failures.FailureCount) -> None:
        self._batches, self._count = batches, count

    def __iter__(self) -> _Indices:
        return self

    def __next__(self) -> Any:
        if self._count.error is not None:
            raise self._count.error()
        return next(self._batches)


class GuardedFetcher:
    """A fetcher that passes over batches without samples.

    Args:
        inner: The fetcher, whose dataset is guarded.
        kind: Kind of the dataset, a value of torch's ``_DatasetKind``.
        guard: Decides about failing samples.
        batches: The index batches of the epoch.
        count: Counts failures.
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
        """Makes the batch of an index batch, or of the next one with samples. Raises beyond ``max_errors``."""
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
