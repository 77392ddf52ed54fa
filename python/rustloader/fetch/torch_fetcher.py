"""Properties of torch's fetcher that are known before it runs."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Subset, _DatasetKind, _utils
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data import dataset as torch_dataset

from rustloader.system.torch_side import is_defined_in


def is_original(dataset_kind: int) -> bool:
    """Returns True if the fetcher's class and its ``fetch`` will be torch's own. Some libraries replace them."""
    fetch = _utils.fetch
    kind = fetch._MapDatasetFetcher if dataset_kind == _DatasetKind.Map else fetch._IterableDatasetFetcher
    return (
        is_defined_in(_DatasetKind.create_fetcher, torch_dataloader)
        and kind.__module__ == fetch.__name__
        and is_defined_in(kind.fetch, fetch)
    )


class WithoutGetitems:
    """A wrapper that hides a dataset's ``__getitems__``, so that torch's fetcher requests one sample at a time."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]


def by_sample(dataset: Any) -> Any:
    """Returns the dataset, or a `WithoutGetitems` if its only ``__getitems__`` is that of torch's ``Subset``, which
    requests one sample at a time anyway.
    """
    inner = dataset
    while (
        type(inner) is Subset
        and "__getitems__" not in vars(inner)
        and is_defined_in(Subset.__getitems__, torch_dataset)
    ):
        inner = inner.dataset
    return dataset if inner is dataset or getattr(inner, "__getitems__", None) else WithoutGetitems(dataset)


def takes_batches(dataset_kind: int, dataset: Any, auto_collation: bool) -> bool:
    """Returns True if the dataset makes all samples of a batch itself, in one call of ``__getitems__``."""
    is_map = dataset_kind == _DatasetKind.Map
    return auto_collation and is_map and bool(getattr(by_sample(dataset), "__getitems__", None))
