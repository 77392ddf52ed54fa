"""Finds loaders inside the wrappers of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

# Attributes from which a wrapper takes its input. A loader in one of them is an input, not the wrapped loader.
_INPUT_ATTRIBUTES = {"dataset", "sampler", "batch_sampler"}


def loader_in(source: Any, has_stats: Callable[[Any], bool]) -> Any:
    """Returns the loader that ``source`` wraps, or ``source`` itself.

    A wrapper is an iterable that has exactly one loader among its attributes, and no statistics of its own. Wrappers
    may be nested. Examples are accelerate's loaders (``base_dataloader``), Fabric's (``_dataloader``) and timm's
    prefetcher (``loader``).
    """
    seen = {id(source)}
    while not has_stats(source) and _is_iterable(source):
        inner = {
            id(it): it
            for name, it in vars(source).items()
            if name not in _INPUT_ATTRIBUTES and _is_loader(it, has_stats)
        }
        if len(inner) != 1 or seen & inner.keys():
            break
        seen |= inner.keys()
        (source,) = inner.values()
    return source


def _is_iterable(value: Any) -> bool:
    has_attributes = hasattr(type(value), "__iter__") and hasattr(value, "__dict__")
    return has_attributes and not isinstance(value, (type, _BaseDataLoaderIter))


def _is_loader(value: Any, has_stats: Callable[[Any], bool]) -> bool:
    # fastai's loaders are not subclasses of torch.utils.data.DataLoader, but they have statistics.
    return isinstance(value, DataLoader) or (has_stats(value) and not isinstance(value, _BaseDataLoaderIter))
