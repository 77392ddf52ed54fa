"""Makes the batches of a process: torch's fetcher, with the seeds, guards, threads and gathers that options ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import _DatasetKind

from rustloader.fetch import torchs
from rustloader.fetch.guard import Guard
from rustloader.fetch.seeds import Apart, Seeds
from rustloader.fetch.threads import Pool, ThreadedDataset


class Step:
    """One step of a loader: from an index batch to a batch. Workers take it, and iterators without workers.

    Args:
        dataset: The dataset.
        kind: Its kind, a value of torch's ``_DatasetKind``.
        auto_collation: Whether the fetcher makes samples and collates them.
        seeds: Seeds batches or samples; None leaves that to torch.
        guard: Decides about samples that fail; None lets them raise.
        make_pool: Makes the threads for the samples of a batch; None: one is made after the other.
        marked: Wraps an index batch, to act before each of its samples; None leaves it as it is.

    Attributes:
        fetcher: torch's fetcher, from `use` on.
    """

    def __init__(
        self,
        dataset: Any,
        kind: int,
        auto_collation: bool,
        seeds: Seeds | None = None,
        guard: Guard | None = None,
        make_pool: Callable[[], Pool] | None = None,
        marked: Callable[[Any], Any] | None = None,
    ) -> None:
        self.kind, self.seeds, self.guard = kind, seeds, guard
        self._dataset, self._auto_collation = dataset, auto_collation
        self._make_pool, self._marked = make_pool, marked
        self._pool: Pool | None = None
        self.fetcher: Any = None
        # The source of the fetcher's samples: the dataset, or a stand-in.
        self._source: Any = dataset
        # The fetcher's `fetch`, if it is torch's own.
        self._torchs_fetch: Any = None

    def collating(self, collate_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the ``collate_fn`` for the fetcher: it draws from the stream of its batch."""
        return collate_fn if self.seeds is None else self.seeds.for_collating(collate_fn)

    def use(self, fetcher: Any, gathers: Callable[[], Any] | None = None) -> None:
        """Takes a new fetcher of torch.

        Args:
            fetcher: The fetcher.
            gathers: Lets the fetcher gather the rows of a table, where it makes nothing but torch's own batches.
        """
        is_own = torchs.is_own(self.kind)
        self.fetcher, self._source = fetcher, self._dataset
        self._torchs_fetch = type(fetcher).fetch if is_own else None
        has_threads = False
        if self.seeds is None and self._make_pool is None:
            if gathers is not None:
                gathers()
        elif is_own and self.kind == _DatasetKind.Map:
            fetcher.dataset = self._source = torchs.by_sample(self._dataset)
            has_threads = self._make_pool is not None and not getattr(self._source, "__getitems__", None)
        if self.guard is not None:
            self._source = self.guard.attach(fetcher, self.kind, self._threaded if has_threads else None)
        elif has_threads:
            fetcher.dataset = self._threaded(self._source)

    def _threaded(self, source: Any) -> ThreadedDataset:
        """Returns a dataset whose samples threads make, by way of ``__getitems__``, which torch's fetcher prefers."""
        if self._pool is None:
            assert self._make_pool is not None
            self._pool = self._make_pool()
        before = None if self.seeds is None else self.seeds.mark_sample
        return ThreadedDataset(source, self._pool, before)

    def fetch(self, number: int, index: Any) -> Any:
        """Makes the batch of an index batch.

        Args:
            number: Number of the batch among those of the epoch that this run makes.
            index: The index batch.
        """
        return self.fetcher.fetch(self._prepared(number, index))

    def _prepared(self, number: int, index: Any) -> Any:
        """Returns an index batch as the fetcher gets it. Where torch's fetcher only iterates over it, each sample can
        have its own seed and mark.
        """
        apart = Apart.ONE
        if self.guard is not None:
            self.guard.begin(number)
        if type(self.fetcher).fetch is not self._torchs_fetch:
            apart = Apart.NO
        elif self._auto_collation:
            if self.kind == _DatasetKind.Map and getattr(self._source, "__getitems__", None):
                apart = Apart.NO
            else:
                apart = Apart.EACH if self._pool is None else Apart.ONE
                if self._marked is not None:
                    index = self._marked(index)
        return index if self.seeds is None else self.seeds.begin_batch(number, index, apart)
