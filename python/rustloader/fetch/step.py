"""Makes a process's batches with torch's fetcher and the seeds, guards, threads and gathers that options require."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import _DatasetKind

from rustloader.fetch import torch_fetcher
from rustloader.fetch.guard import Guard
from rustloader.fetch.seeds import SampleAccess, Seeds
from rustloader.fetch.threads import Pool, ThreadedDataset


class Step:
    """The step that makes a batch from an index batch, in workers and in iterators without workers.

    Args:
        dataset: The dataset.
        kind: Its kind, a value of torch's ``_DatasetKind``.
        auto_collation: Whether the fetcher makes a batch by collating samples.
        seeds: Seeds batches or samples; None leaves that to torch.
        guard: Decides what happens to samples that fail; None lets their errors propagate.
        make_pool: Creates the threads that make the samples of a batch; None makes one sample after another.
        wrap_indices: Wraps an index batch so that code runs before each of its samples; None leaves it unchanged.

    Attributes:
        fetcher: torch's fetcher; None before the first call of `use`.
    """

    def __init__(
        self,
        dataset: Any,
        kind: int,
        auto_collation: bool,
        seeds: Seeds | None = None,
        guard: Guard | None = None,
        make_pool: Callable[[], Pool] | None = None,
        wrap_indices: Callable[[Any], Any] | None = None,
    ) -> None:
        self.kind, self.seeds, self.guard = kind, seeds, guard
        self._dataset, self._auto_collation = dataset, auto_collation
        self._make_pool, self._wrap_indices = make_pool, wrap_indices
        self._pool: Pool | None = None
        self.fetcher: Any = None
        # The source of the fetcher's samples: the dataset, or a wrapper that hides its `__getitems__`.
        self._source: Any = dataset
        # torch's `fetch` if no library has replaced it, otherwise None.
        self._torch_fetch: Any = None

    def collating(self, collate_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the ``collate_fn`` to pass to the fetcher. With seeds, it draws its random numbers from the stream of
        the batch."""
        return collate_fn if self.seeds is None else self.seeds.for_collating(collate_fn)

    def use(self, fetcher: Any, use_gather: Callable[[], Any] | None = None) -> None:
        """Uses a new torch fetcher from now on.

        Args:
            fetcher: The fetcher.
            use_gather: Makes the fetcher gather the rows of a table; called only without seeds and threads.
        """
        is_original = torch_fetcher.is_original(self.kind)
        self.fetcher, self._source = fetcher, self._dataset
        self._torch_fetch = type(fetcher).fetch if is_original else None
        has_threads = False
        if self.seeds is None and self._make_pool is None:
            if use_gather is not None:
                use_gather()
        elif is_original and self.kind == _DatasetKind.Map:
            fetcher.dataset = self._source = torch_fetcher.by_sample(self._dataset)
            has_threads = self._make_pool is not None and not getattr(self._source, "__getitems__", None)
        if self.guard is not None:
            self._source = self.guard.attach(fetcher, self.kind, self._threaded if has_threads else None)
        elif has_threads:
            fetcher.dataset = self._threaded(self._source)

    def _threaded(self, source: Any) -> ThreadedDataset:
        """Returns a dataset whose ``__getitems__`` makes the samples in threads. torch's fetcher prefers it to
        ``__getitem__``."""
        if self._pool is None:
            assert self._make_pool is not None
            self._pool = self._make_pool()
        before_sample = None if self.seeds is None else self.seeds.mark_sample
        return ThreadedDataset(source, self._pool, before_sample)

    def fetch(self, number: int, index: Any) -> Any:
        """Makes a batch from an index batch.

        Args:
            number: Number of the task in a worker; without workers, the batch's number among those that this process
                makes in the epoch.
            index: The index batch.

        Raises:
            EmptyBatchError: All samples of the batch have failed, and the guard has left them out, or an iterable
                dataset has ended after failures, so that the next call raises StopIteration.
        """
        index = self._prepare(number, index)
        try:
            return self.fetcher.fetch(index)
        except StopIteration:
            if self.kind == _DatasetKind.Iterable and self.guard is not None and self.guard.has_failures():
                raise self.guard.empty_batch_error() from None
            raise

    def _prepare(self, number: int, index: Any) -> Any:
        """Returns the index batch to pass to the fetcher. If torch's fetcher only iterates over it, each sample can
        have its own seed and ``wrap_indices`` applies.
        """
        access = SampleAccess.ONE
        if self.guard is not None:
            self.guard.begin(number)
        if type(self.fetcher).fetch is not self._torch_fetch:
            access = SampleAccess.TOGETHER
        elif self._auto_collation:
            if self.kind == _DatasetKind.Map and getattr(self._source, "__getitems__", None):
                access = SampleAccess.TOGETHER
            else:
                access = SampleAccess.EACH if self._pool is None else SampleAccess.ONE
                if self._wrap_indices is not None:
                    index = self._wrap_indices(index)
        return index if self.seeds is None else self.seeds.begin_batch(number, index, access)
