"""Finds loaders inside the objects that libraries wrap around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

# Attributes that a loader reads from. A loader in one of them is not the wrapped one.
_FED_FROM = {"dataset", "sampler", "batch_sampler"}


def loader_in(source: Any, has_figures: Callable[[Any], bool]) -> Any:
    """Returns the loader that ``source`` wraps, or ``source`` itself.

    A wrapper is an iterable with just one loader among its attributes, and without figures of its own: accelerate's
    loaders have ``base_dataloader``, Fabric's ``_dataloader``, timm's prefetcher ``loader``.
    """
    seen = {id(source)}
    while not has_figures(source) and _is_iterable(source):
        inner = {
            id(it): it for name, it in vars(source).items() if name not in _FED_FROM and _is_loader(it, has_figures)
        }
        if len(inner) != 1 or seen & inner.keys():
            break
        seen |= inner.keys()
        (source,) = inner.values()
    return source


def _is_iterable(thing: Any) -> bool:
    has_attributes = hasattr(type(thing), "__iter__") and hasattr(thing, "__dict__")
    return has_attributes and not isinstance(thing, (type, _BaseDataLoaderIter))


def _is_loader(thing: Any, has_figures: Callable[[Any], bool]) -> bool:
    # fastai's loaders are no torch.utils.data.DataLoader, but have figures.
    return isinstance(thing, DataLoader) or (has_figures(thing) and not isinstance(thing, _BaseDataLoaderIter))
