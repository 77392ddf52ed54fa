"""The settings of one iterator: torch's arguments, rustloader's options, and the options of ``install()``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch.utils.data import DataLoader

from rustloader.settings import loader_state, names, option_values, options
from rustloader.settings.options import Option
from rustloader.system.protocols import IteratorLike, LoaderLike

# Arguments of torch's class that configure an iterator. `resolve` does not check them, because torch does.
_TORCH_ARGUMENTS = ("num_workers", "prefetch_factor", "in_order", "persistent_workers", "timeout")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """The resolved settings of an iterator. An option that is not set has its default here, not None.

    The iterator keeps these settings, because it keeps no reference to its loader. Workers receive them in their job,
    and the engine reads the fields by name.
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
    # Whether workers send snapshots of their datasets' states.
    snapshots: bool = False

    @property
    def window(self) -> tuple[int | None, int | None]:
        """The reorder window, as a number of batches and a number of bytes. At least one of them is None."""
        return option_values.window(self.reorder_window)

    @property
    def raises(self) -> bool:
        """True if an exception in a sample is raised in the main process, as in torch."""
        # The type is checked first, because the comparison with a callable object may run any code.
        return isinstance(self.on_error, str) and self.on_error == "raise"

    def changed(self, **values: Any) -> LoaderConfig:
        """Returns a copy of these settings in which some are replaced."""
        return dataclasses.replace(self, **values)


def resolve(loader: LoaderLike) -> LoaderConfig:
    """Returns the settings of a loader of any class. Where the loader has torch's default, an option of ``install()``
    applies.

    Raises:
        TypeError, ValueError: The program has set an attribute of the loader to a value that is invalid for the option.
    """
    installed = _installed(loader)
    values = {name: installed[name] if name in installed else getattr(loader, name) for name in _TORCH_ARGUMENTS}
    for name in options.keywords():
        values[name] = installed[name] if name in installed else options.in_force(loader, name)
    values["name"] = values["name"] or names.default(loader)
    return LoaderConfig(**values)


def _installed(loader: LoaderLike) -> dict[str, Any]:
    """Returns the options of ``install()`` that apply to a loader, by name."""
    values: dict[str, Any] = {}
    for name, value in options.current().items():
        option: Option = options.option_of(name)
        if not option.unset:  # the option replaces no attribute
            continue
        own = loader_state.given(loader, name) if option.keyword else getattr(loader, name)
        if own in option.unset:
            values[name] = option.effective(value)
    if not isinstance(loader, DataLoader):
        values.pop("persistent_workers", None)  # loaders of other classes create a new iterator for each epoch
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
    """Returns the view of a loader for torch's code, with the options of ``install()`` and the number of workers in
    ``config``. Returns the loader itself if nothing is replaced."""
    installed = _installed(loader)
    values = {name: installed[name] for name in installed if not options.option_of(name).keyword}
    if config.num_workers != loader.num_workers:
        values["num_workers"] = config.num_workers
    return _View(loader, values) if values else loader


def original(loader: LoaderLike) -> Any:
    """Returns the loader behind a view, or the loader itself if it is not a view."""
    return loader._rustloader_loader if isinstance(loader, _View) else loader


def keep_iterator(loader: LoaderLike, config: LoaderConfig, iterator: IteratorLike) -> None:
    """Makes a loader keep its iterator if its workers are persistent only because of an option of ``install()``. Sets
    the two attributes that torch's ``__iter__`` reads for this purpose."""
    if config.persistent_workers and not loader.persistent_workers:
        object.__setattr__(loader, "persistent_workers", True)  # torch's class rejects an assignment
        setattr(loader, "_iterator", iterator)  # noqa: B010, the protocol declares it as read-only
