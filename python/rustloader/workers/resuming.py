"""Resuming: states of the dataset and its iterator are loaded, and batches after them are fetched again and dropped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import _DatasetKind

from rustloader.fetch import torchs
from rustloader.fetch.inline import StepFetcher
from rustloader.workers.snapshots import WorkerStart, is_stateful


def load_dataset(dataset: Any, start: WorkerStart) -> None:
    """Loads the state of a dataset, before its iterator is made."""
    if start.dataset_state is not None and is_stateful(dataset):
        dataset.load_state_dict(start.dataset_state)


def load_iterator(fetcher: Any, start: WorkerStart) -> None:
    """Loads the state of the iterator that a new fetcher of torch has."""
    iterator: Iterator[Any] = getattr(fetcher, "dataset_iter", iter(()))
    if start.iterator_state is not None and is_stateful(iterator):
        iterator.load_state_dict(start.iterator_state)
    if start.ended:
        # A generator takes note of its loaded place at its first step. Without that, the next epoch would begin there.
        with contextlib.suppress(Exception):
            next(iterator)
        fetcher.ended = True


def load_counters(seeds: Any, start: WorkerStart) -> None:
    """Continues the counters of ``Seeds``; None has none."""
    if seeds is not None:
        seeds.batches, seeds.samples = start.batches, start.samples


def earlier_tasks(count: int, worker_id: int, num_workers: int, first_ordinal: int) -> list[int]:
    """Returns the last tasks of a worker before a resumed epoch, which begins with task 0. With round robin a worker
    has every ``num_workers``-th of an epoch. None is before the epoch's first, even if a program changed the state's
    position.
    """
    last = (worker_id - first_ordinal) % num_workers - num_workers
    return [max(last - num_workers * later, -first_ordinal) for later in reversed(range(count))]


def replay(fetcher: Any, batches: Iterable[Any], kind: int, fetch: Callable[[Any], object] | None = None) -> None:
    """Fetches batches again, as in the first run, and drops them. Their errors were raised there. An iterable dataset
    that ends is not asked again.

    Args:
        fetcher: The fetcher.
        batches: Index batches, or other arguments of ``fetch``.
        kind: Kind of the dataset, a value of torch's ``_DatasetKind``.
        fetch: Fetches a batch; by default the fetcher does.
    """
    inner = fetcher
    if isinstance(fetcher, StepFetcher):
        inner = fetcher.inner
        if kind == _DatasetKind.Map:
            batches = list(batches)
            fetcher.go_back(len(batches))
    fetch = fetch or fetcher.fetch
    with _without_collating(inner, kind):
        for batch in batches:
            try:
                fetch(batch)
            except Exception as error:
                if kind == _DatasetKind.Iterable and isinstance(error, StopIteration):
                    inner.ended = True
                    return


@contextlib.contextmanager
def _without_collating(fetcher: Any, kind: int) -> Iterator[None]:
    """Takes ``collate_fn`` from a fetcher whose ``fetch`` is torch's. Others may need the result."""
    if not torchs.is_own(kind):
        yield
        return
    collate_fn = fetcher.collate_fn
    fetcher.collate_fn = _drop
    try:
        yield
    finally:
        fetcher.collate_fn = collate_fn


def _drop(samples: Any) -> None:
    return None
