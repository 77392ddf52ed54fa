"""What ``rustloader.DataLoader`` changes in torch's iterator without workers. Its class stays torch's."""

from __future__ import annotations

from typing import Any

from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from rustloader.iterator import indices


def prepare(iterator: Any, loader: Any) -> None:
    """Prepares a new iterator of a loader; leaves iterators of other classes than torch's alone."""
    if type(iterator) is _SingleProcessDataLoaderIter:
        iterator._sampler_iter = indices.stream(iterator._index_sampler, iterator._sampler_iter)
