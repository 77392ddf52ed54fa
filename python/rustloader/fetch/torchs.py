"""What is known of torch's fetcher before it runs."""

from __future__ import annotations

from typing import Any

from torch.utils.data import _DatasetKind, _utils
from torch.utils.data import dataloader as torch_dataloader

from rustloader.torch_side import is_torchs


def is_own(dataset_kind: int) -> bool:
    """Whether the fetcher's class and its ``fetch`` will be torch's. Libraries replace them."""
    fetch = _utils.fetch
    kind = fetch._MapDatasetFetcher if dataset_kind == _DatasetKind.Map else fetch._IterableDatasetFetcher
    return (
        is_torchs(_DatasetKind.create_fetcher, torch_dataloader)
        and kind.__module__ == fetch.__name__
        and is_torchs(kind.fetch, fetch)
    )


def takes_batches(dataset_kind: int, dataset: Any, auto_collation: bool) -> bool:
    """Whether torch's fetcher asks a dataset for all samples of a batch in one call."""
    return auto_collation and dataset_kind == _DatasetKind.Map and bool(getattr(dataset, "__getitems__", None))
