"""What ``rustloader.DataLoader`` changes in torch's iterator without workers. Its class stays torch's."""

from __future__ import annotations

from typing import Any

from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from rustloader.fetch.inline import SeededFetcher
from rustloader.iterator import fetching, indices, settings


def prepare(iterator: Any, loader: Any) -> None:
    """Prepares a new iterator of a loader; leaves iterators of other classes than torch's alone."""
    if type(iterator) is not _SingleProcessDataLoaderIter:
        return
    iterator._sampler_iter = indices.stream(iterator._index_sampler, iterator._sampler_iter)
    seeding = fetching.seeding(settings.applied(loader), int(iterator._base_seed))
    if seeding is not None:
        iterator._dataset_fetcher = SeededFetcher(iterator._dataset_fetcher, iterator._dataset_kind, seeding)
        fetching.note_begun(loader, seeding)
