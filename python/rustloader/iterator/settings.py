"""Combines a loader's own settings with the options of ``install()``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.dataloader import _DatasetKind

from rustloader import options
from rustloader.metrics.parts import SchedulingStats
from rustloader.remote.context import is_remote


@dataclass(frozen=True)
class EngineSettings:
    """What an engine needs of a loader. An iterator keeps it, because torch's iterators keep no loader."""

    num_workers: int
    prefetch_factor: int
    in_order: bool
    persistent_workers: bool
    timeout: float
    dispatch: str
    reorder_window: int | str | None
    max_restarts: int
    stall_timeout: float | None
    worker_affinity: str | Sequence[int | Collection[int]] | None
    # Whether workers send snapshots of their datasets.
    snapshots: bool = False

    @classmethod
    def of(cls, loader: Any) -> EngineSettings:
        """The settings of a loader as ``applied`` returns it."""
        # Workers elsewhere have other cores.
        has_cores = not is_remote(loader.multiprocessing_context)
        return cls(
            num_workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor,
            in_order=loader.in_order,
            persistent_workers=loader.persistent_workers,
            timeout=loader.timeout,
            dispatch=options.in_force(loader, "dispatch"),
            reorder_window=options.in_force(loader, "reorder_window"),
            max_restarts=options.in_force(loader, "max_restarts"),
            stall_timeout=options.in_force(loader, "stall_timeout"),
            worker_affinity=options.in_force(loader, "worker_affinity") if has_cores else None,
        )


def scheduling(loader: Any, iterator: Any, auto_workers: int | None = None) -> SchedulingStats:
    """The settings that statistics show, of a loader as ``applied`` returns it, and of its iterator. What torch's
    constructor has read of the loader may be a property of the program, and comes from the iterator."""
    map_style = loader._dataset_kind == _DatasetKind.Map
    sampler = iterator._index_sampler
    batch_size = sampler.batch_size if type(sampler) is BatchSampler else None
    return SchedulingStats(
        prefetch_factor=int(loader.prefetch_factor),
        in_order=bool(loader.in_order),
        # An iterable dataset keeps round robin, and one thread.
        dispatch=options.in_force(loader, "dispatch") if map_style else "round_robin",
        reorder_window=options.in_force(loader, "reorder_window"),
        worker_threads=options.in_force(loader, "worker_threads") if map_style else 1,
        map_style=map_style,
        batch_size=batch_size if isinstance(batch_size, int) else None,
        # Of the class: an attribute of the dataset itself may be code of the program.
        per_sample=map_style and bool(iterator._auto_collation) and not hasattr(type(loader.dataset), "__getitems__"),
        auto_workers=auto_workers,
        remote=is_remote(loader.multiprocessing_context),
    )


class _Loader:
    """A view of a loader with some settings replaced. The loader itself does not change."""

    def __init__(self, loader: Any, settings: dict[str, Any]) -> None:
        self.__dict__.update(settings)
        self._rustloader_loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rustloader_loader, name)


def applied(loader: Any, num_workers: int | None = None) -> Any:
    """The loader with the options in force, where its own settings are torch's defaults, and another number of workers
    if one is given."""
    changed: dict[str, Any] = {}
    if num_workers is not None and num_workers != loader.num_workers:
        changed["num_workers"] = num_workers
    for name, value in options.current().items():
        option = options.option_of(name)
        if not option.unset:  # no option of loaders
            continue
        own = options.of_loader(loader, name) if option.keyword else getattr(loader, name)
        if own in option.unset:
            changed[name] = option.effective(value)
    if "persistent_workers" in changed and not isinstance(loader, DataLoader):
        del changed["persistent_workers"]  # loaders of other classes make a new iterator each time
    given = tuple(name for name in options.keywords() if name in changed or options.of_loader(loader, name) is not None)
    return _Loader(loader, changed | {options.GIVEN: given}) if changed else loader


def with_values(loader: Any, **values: Any) -> Any:
    """A view of a loader with some attributes replaced."""
    return _Loader(loader, values)


def original(loader: Any) -> Any:
    """The loader itself, of a loader as ``applied`` returns it."""
    return loader._rustloader_loader if isinstance(loader, _Loader) else loader


def keep(loader: Any, seen: Any, iterator: Any) -> None:
    """Makes a loader keep its iterator if only an option makes its workers persistent. torch's ``__iter__`` reads both
    attributes."""
    if seen is not loader and seen.persistent_workers and not loader.persistent_workers:
        object.__setattr__(loader, "persistent_workers", True)  # torch's class refuses to set it
        loader._iterator = iterator
