"""Combines a loader's own settings with the options of ``install()``."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from rustloader import options


class _Loader:
    """A view of a loader with some settings replaced. The loader itself does not change."""

    def __init__(self, loader: Any, settings: dict[str, Any]) -> None:
        self.__dict__.update(settings)
        self._rustloader_loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rustloader_loader, name)


def applied(loader: Any) -> Any:
    """The loader with the options in force, where its own settings are torch's defaults."""
    changed = {}
    for name, value in options.current().items():
        option = options.option_of(name)
        if getattr(loader, name) in option.unset:
            changed[name] = option.effective(value)
    if "persistent_workers" in changed and not isinstance(loader, DataLoader):
        del changed["persistent_workers"]  # loaders of other classes make a new iterator each time
    return _Loader(loader, changed) if changed else loader


def keep(loader: Any, seen: Any, iterator: Any) -> None:
    """Makes a loader keep its iterator if only an option makes its workers persistent. torch's ``__iter__`` reads both
    attributes."""
    if seen is not loader and seen.persistent_workers and not loader.persistent_workers:
        object.__setattr__(loader, "persistent_workers", True)  # torch's class refuses to set it
        loader._iterator = iterator
