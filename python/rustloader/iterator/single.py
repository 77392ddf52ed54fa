"""Prepares torch's iterator without workers: index streams, seeds, tables. Its class stays torch's."""

from __future__ import annotations

from typing import Any

from torch.utils.data import _utils
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from rustloader._core import gather
from rustloader.fetch import tables
from rustloader.fetch.inline import SeededFetcher
from rustloader.fetch.seeds import Seeding
from rustloader.iterator import fetching, indices, settings


def prepare(iterator: Any, loader: Any) -> None:
    """Prepares a new iterator of a loader; leaves iterators of other classes than torch's alone."""
    if type(iterator) is not _SingleProcessDataLoaderIter:
        return
    iterator._sampler_iter = indices.stream(iterator._index_sampler, iterator._sampler_iter)
    prepare_fetcher(iterator, loader, fetching.seeding(settings.applied(loader), int(iterator._base_seed)))


def prepare_fetcher(iterator: Any, loader: Any, seeding: Seeding | None) -> None:
    """Lets the fetcher of an iterator seed, or gather the rows of a table."""
    if seeding is not None:
        iterator._dataset_fetcher = SeededFetcher(iterator._dataset_fetcher, iterator._dataset_kind, seeding)
        fetching.note_begun(loader, seeding)
    # In a worker of another loader default_collate makes shared tensors.
    elif _utils.worker.get_worker_info() is None:
        tables.use(iterator._dataset_fetcher, iterator._collate_fn, gather)
