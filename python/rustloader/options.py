"""Options that ``rustloader.install()`` gives to loaders whose own are torch's defaults: frameworks that build a loader
anew drop some of them."""

from __future__ import annotations

from multiprocessing.context import BaseContext
from typing import Any

import torch.multiprocessing
from torch.utils.data import DataLoader

__all__ = ["add", "applied", "current", "keep", "replace"]

# What a loader with workers has when nobody said otherwise.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "in_order": (True,),
    "prefetch_factor": (None, 2),
    "persistent_workers": (False,),
    "multiprocessing_context": (None,),
}

_current: dict[str, Any] = {}


def current() -> dict[str, Any]:
    """The options in force, by name."""
    return dict(_current)


def replace(options: dict[str, Any]) -> None:
    """Puts options in force in the place of all others."""
    global _current
    _current = dict(options)


def add(options: dict[str, Any]) -> None:
    """Puts options in force beside the others; None stands for one that was not given.

    Raises:
        TypeError, ValueError: an option cannot have that value.
    """
    replace(_current | {name: _checked(name, value) for name, value in options.items() if value is not None})


def _checked(name: str, value: Any) -> Any:
    if name == "prefetch_factor":
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"prefetch_factor must be a positive integer, got {value!r}")
        if value <= 0:
            raise ValueError(f"prefetch_factor must be a positive integer, got {value}")
    elif name == "multiprocessing_context":
        if isinstance(value, str):
            methods = torch.multiprocessing.get_all_start_methods()
            if value not in methods:
                raise ValueError(
                    f"multiprocessing_context must be a start method of this system ({', '.join(methods)}), "
                    f"got {value!r}"
                )
            return torch.multiprocessing.get_context(value)
        if not isinstance(value, BaseContext):
            raise TypeError(f"multiprocessing_context must be a context or the name of a start method, got {value!r}")
    elif not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


class _Loader:
    """A loader as its iterator is to see it; the user's own object stays as it is."""

    def __init__(self, loader: Any, options: dict[str, Any]) -> None:
        self.__dict__.update(options)
        self._rustloader_loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rustloader_loader, name)


def applied(loader: Any) -> Any:
    """The loader with the options in force, as far as its own are torch's defaults."""
    if not _current:
        return loader
    changed = {name: value for name, value in _current.items() if getattr(loader, name) in _DEFAULTS[name]}
    if "persistent_workers" in changed and not isinstance(loader, DataLoader):
        del changed["persistent_workers"]  # whoever made this object asks for a new iterator each time
    return _Loader(loader, changed) if changed else loader


def keep(loader: Any, seen: Any, iterator: Any) -> None:
    """Makes a loader keep its iterator that has persistent workers which the loader did not ask for. torch's
    ``__iter__`` goes by these two attributes."""
    if seen is not loader and seen.persistent_workers and not loader.persistent_workers:
        object.__setattr__(loader, "persistent_workers", True)  # which torch's class does not let be set
        loader._iterator = iterator
