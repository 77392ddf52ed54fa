"""The settings of one iterator: torch's arguments, rustloader's options, and the options of ``install()``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch.utils.data import DataLoader

from rustloader.settings import loader_state, names, option_values, options
from rustloader.settings.options import Option
from rustloader.system.protocols import IteratorLike, LoaderLike

# Arguments of torch's class that configure an iterator. ``resolve`` does not check them: torch does.
_TORCH_ARGUMENTS = ("num_workers", "prefetch_factor", "in_order", "persistent_workers", "timeout")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """The resolved settings of an iterator. Options that are not set have their defaults instead of None.

    An iterator keeps them, because it does not keep its loader. Workers get them in their job, and the engine reads
    them by name.
    """

    num_workers: int
    prefetch_factor: int
    in_order: bool
    persistent_workers: bool
    timeout: float
    dispatch: str
    reorder_window: int | str | None
    seed_by: str
    worker_threads: int
    max_restarts: int
    stall_timeout: float | None
    on_error: str | Callable[[Any, Exception], Any]
    max_errors: int | float | None
    worker_affinity: str | Sequence[int | Collection[int]] | None
    name: str
    overlap_epochs: bool
    # True if workers send snapshots of their datasets.
    snapshots: bool = False

    @property
    def window(self) -> tuple[int | None, int | None]:
        """The reorder window as a number of batches and a number of bytes, at least one of which is None."""
        return option_values.window(self.reorder_window)

    @property
    def raises(self) -> bool:
        """True if an exception in a sample is raised, as in torch."""
        # The type is checked first: a callable object may compare equal to anything.
        return isinstance(self.on_error, str) and self.on_error == "raise"

    def changed(self, **values: Any) -> LoaderConfig:
        """Returns these settings with some of them replaced."""
        return dataclasses.replace(self, **values)


def resolve(loader: LoaderLike) -> LoaderConfig:
    """Returns the settings of a loader of any class: its own, or those of ``install()`` where it has torch's defaults.

    Raises:
        TypeError, ValueError: The program has set an attribute of the loader to a value that the option cannot have.
    """
    installed = _installed(loader)
    values = {name: installed[name] if name in installed else getattr(loader, name) for name in _TORCH_ARGUMENTS}
    for name in options.keywords():
        values[name] = installed[name] if name in installed else options.in_force(loader, name)
    values["name"] = values["name"] or names.default(loader)
    return LoaderConfig(**values)


def _installed(loader: LoaderLike) -> dict[str, Any]:
    """Returns the options of ``install()`` that apply to a loader."""
    values: dict[str, Any] = {}
    for name, value in options.current().items():
        option: Option = options.option_of(name)
        if not option.unset:  # not an attribute of loaders
            continue
        own = loader_state.given(loader, name) if option.keyword else getattr(loader, name)
        if own in option.unset:
            values[name] = option.effective(value)
    if not isinstance(loader, DataLoader):
        values.pop("persistent_workers", None)  # loaders of other classes make a new iterator for each epoch
    return values


class _View:
    """A view of a loader with some attributes replaced. The loader itself does not change."""

    def __init__(self, loader: LoaderLike, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        self._rustloader_loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rustloader_loader, name)


def view(loader: LoaderLike, **values: Any) -> Any:
    """Returns a view of a loader with some attributes replaced."""
    return _View(loader, values)


def view_for_torch(loader: LoaderLike, config: LoaderConfig) -> Any:
    """Returns the view of a loader that is passed to torch's code, or the loader itself if nothing is replaced."""
    installed = _installed(loader)
    values = {name: installed[name] for name in installed if not options.option_of(name).keyword}
    if config.num_workers != loader.num_workers:
        values["num_workers"] = config.num_workers
    return _View(loader, values) if values else loader


def original(loader: LoaderLike) -> Any:
    """Returns the loader behind a view, or the loader itself if it is not a view."""
    return loader._rustloader_loader if isinstance(loader, _View) else loader


def keep_iterator(loader: LoaderLike, config: LoaderConfig, iterator: IteratorLike) -> None:
    """Makes a loader keep its iterator if its workers are persistent only by an option of ``install()``. Sets the two
    attributes that torch's ``__iter__`` reads."""
    if config.persistent_workers and not loader.persistent_workers:
        object.__setattr__(loader, "persistent_workers", True)  # torch's class refuses to set it
        setattr(loader, "_iterator", iterator)  # noqa: B010, a protocol has it for reading alone
