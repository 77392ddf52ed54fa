"""The usage of a dataset's cache, or the estimated size of a cache for a dataset without one."""

from __future__ import annotations

from typing import Any

from torch.utils.data import ConcatDataset, IterableDataset, Subset

from rustloader._core import memory_limits
from rustloader.caching.dataset import CachedDataset
from rustloader.caching.usage import CacheUsage
from rustloader.metrics.fields import CacheEstimate, StatsFields
from rustloader.system.protocols import IteratorLike, LoaderLike

# Maximum nesting depth at which a cached dataset is found.
_MAX_DEPTH = 8


def usage(dataset: Any) -> CacheUsage | None:
    """Returns the usage of a dataset's cache; None without a cache."""
    cached = find(dataset)
    return None if cached is None else cached.usage()


def find(dataset: Any) -> CachedDataset[object] | None:
    """Returns the cached dataset: the dataset itself, or one inside torch's Subset and ConcatDataset.

    Searches only the first dataset of a ConcatDataset. Returns None if there is no cached dataset.
    """
    for _ in range(_MAX_DEPTH):
        if isinstance(dataset, CachedDataset):
            return dataset
        if type(dataset) is Subset:
            dataset = dataset.dataset
        elif type(dataset) is ConcatDataset:
            dataset = dataset.datasets[0]
        else:
            break
    return None


def fields_of(source: LoaderLike | IteratorLike, dataset: Any, stats: StatsFields) -> dict[str, Any]:
    """Returns the field of ``Stats`` for the cache: ``cache``, or ``cache_estimate`` if there is no cache."""
    current = usage(dataset)
    if current is not None:
        return {"cache": current}
    return {"cache_estimate": _estimate(source, dataset, stats)}


def _estimate(source: LoaderLike | IteratorLike, dataset: Any, stats: StatsFields) -> CacheEstimate | None:
    size = getattr(source, "batch_size", None)
    if type(size) is not int or not stats.bytes or isinstance(dataset, IterableDataset):
        return None
    try:
        length = len(dataset)
    except Exception:
        return None
    free = min((left for _, _, left in memory_limits()), default=None)
    return None if free is None else CacheEstimate(stats.bytes * length // (stats.batches * size), free, length)
