"""Resumes a worker: loads the saved states of the dataset and its iterator, then replays the batches that were made
after the states were saved. To replay a batch is to fetch it again and drop it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import _DatasetKind

from rustloader.fetch import torch_fetcher
from rustloader.fetch.inline import StepFetcher
from rustloader.system.generators import GeneratorStates
from rustloader.workers.snapshots import WorkerStart, is_stateful, state_of


class Loading:
    """Loads the states of a start: that of the dataset, and, after ``iter(dataset)``, that of the iterator.

    Attributes:
        before: Pickled state of the dataset before ``iter(dataset)``, for ``Snapshots.first``; None if it has no
            state, or if no state is loaded.
    """

    def __init__(self, dataset: Any, start: WorkerStart) -> None:
        self._dataset, self._start = dataset, start
        self._load_dataset()
        self.before = state_of(dataset) if start.has_state else None
        self._generators = GeneratorStates() if start.ended else None

    def _load_dataset(self) -> None:
        state = self._start.dataset_state
        if state is not None and is_stateful(self._dataset):
            self._dataset.load_state_dict(state)

    def load_iterator(self, fetcher: Any) -> None:
        """Loads the state of the dataset's iterator, which a new torch fetcher has just made."""
        iterator: Iterator[Any] = getattr(fetcher, "dataset_iter", iter(()))
        self._load_iterator(iterator)
        if self._generators is not None:
            # A generator applies its loaded position only when it takes its first step. Without that step, the next
            # epoch would begin at the loaded position.
            with contextlib.suppress(Exception):
                next(iterator)
                # The dataset returns to its first sample at its end, so the next epoch begins at the loaded position.
                self._load_dataset()
                self._load_iterator(iterator)
            self._generators.restore()
            fetcher.ended = True

    def _load_iterator(self, iterator: Any) -> None:
        state = self._start.iterator_state
        if state is not None and is_stateful(iterator):
            iterator.load_state_dict(state)
            # The state may include those of generators.
            self._generators = self._generators and GeneratorStates()


def load_counters(seeds: Any, start: WorkerStart) -> None:
    """Sets the counters of ``Seeds`` to those in ``start``. Does nothing if ``seeds`` is None."""
    if seeds is not None:
        seeds.batches, seeds.samples = start.batches, start.samples


def earlier_tasks(count: int, worker_id: int, num_workers: int, first_ordinal: int) -> list[int]:
    """Returns the numbers of a worker's last ``count`` tasks before the position of a resumed epoch. Since the epoch
    continues with task 0, earlier tasks have negative numbers. With round robin a worker gets every
    ``num_workers``-th task of an epoch. No number is below that of the epoch's first task, even if a program has
    changed the position in the state.
    """
    last = (worker_id - first_ordinal) % num_workers - num_workers
    return [max(last - num_workers * turns_back, -first_ordinal) for turns_back in reversed(range(count))]


def replay(fetcher: Any, batches: Iterable[Any], kind: int, fetch: Callable[[Any], object] | None = None) -> None:
    """Fetches batches again, as in the first run, and drops them. Drops errors too, because the first run has already
    raised them. After an iterable dataset has ended, nothing more is fetched from it.

    Args:
        fetcher: The fetcher.
        batches: Index batches, or other arguments of ``fetch``.
        kind: Kind of the dataset, a value of torch's ``_DatasetKind``.
        fetch: Function that fetches a batch; by default, the fetcher's own method.
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
    """Disables the ``collate_fn`` of a fetcher whose ``fetch`` is torch's. Other fetchers may need its result."""
    if not torch_fetcher.is_original(kind):
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
