"""``rustloader.DataLoader``: torch's class with the engine's iterator."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch.utils import data as torch_data
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from rustloader.auto import arguments
from rustloader.settings import loader_state, names, options, representation
from rustloader.system.similar import suggest

if sys.platform.startswith("linux"):
    from rustloader.iterator import fallback, single
    from rustloader.iterator.core import _MultiProcessingDataLoaderIter
    from rustloader.metrics import ledger
    from rustloader.system.torch_side import TorchIter, in_torch, is_defined_in
else:
    from rustloader.iterator import unsupported

__all__ = ["DataLoader"]

if TYPE_CHECKING:
    from torch.utils.data import Dataset, Sampler

    from rustloader.settings.options import Dispatch, OnError, SeedBy

    _T_co = TypeVar("_T_co", covariant=True)
else:
    # torch's own type variable, so that both classes have the same parameters.
    (_T_co,) = torch_data.DataLoader.__parameters__


def __getattr__(name: str) -> Any:
    """Returns an attribute that only torch's module has, such as ``rustloader.dataloader.default_collate``."""
    if name.startswith("__") or not hasattr(torch_dataloader, name):
        raise AttributeError(f"module 'rustloader.dataloader' has no attribute {name!r}")
    return getattr(torch_dataloader, name)


class DataLoader(torch_data.DataLoader[_T_co]):
    """A replacement for ``torch.utils.data.DataLoader`` whose worker processes are run by a Rust engine.

    Arguments, attributes, batches and their order, seeds, warnings and errors are those of the installed version of
    torch, whose documentation applies. With ``num_workers=0``, and on systems other than Linux, torch's own loop runs.
    With workers, these rules hold:

    * Batches arrive in a shared-memory arena, whose memory is reused. A batch stays valid while the program keeps any
      part of it (a tensor, a view, a ``.numpy()`` array), even after the loader and its workers have ended. A tensor of
      16 KiB or more keeps only its own memory alive.
    * ``/dev/shm`` is not used, and no file descriptor is sent with a batch. ``tensor.is_shared()`` returns False.
    * If a batch cannot be sent, an error is raised in its place. If a worker dies, an error is raised at once.
    * ``rustloader.stats(loader)`` returns statistics.

    If the engine cannot serve a loader, for example because its dataset is a DataPipe, torch's own loop runs, and the
    logger ``rustloader`` warns once per loader.

    Args:
        dataset: Map-style or iterable dataset, as in torch.
        batch_size: Number of samples per batch; None turns batching off (default: 1).
        shuffle: True draws a new random order for each epoch (default: None, which means False).
        sampler: Yields the indices of samples (default: None).
        batch_sampler: Yields index batches (default: None).
        num_workers: Number of worker processes (default: 0, torch's own loop in this process). "auto" starts with this
            rank's share of the cores, or fewer (at most 16), and adapts the number to the measurements of each epoch.
        collate_fn: Makes a batch from a list of samples (default: None, torch's ``default_collate``, which in workers
            writes plain tensors and numbers directly into the arena).
        pin_memory: True delivers batches in pinned memory (default: False). A thread of the engine copies plain batches
            to pinned memory.
        drop_last: True omits the last batch if it is incomplete (default: False).
        timeout: Seconds to wait for a batch; 0 for no limit (default: 0).
        worker_init_fn: Called in each worker with the worker's ID, after seeding (default: None).
        multiprocessing_context: Start method or context of the workers (default: None, Python's default).
        generator: Source of the seeds and of the random order (default: None, torch's global generator).
        prefetch_factor: Number of batches that each worker prepares ahead (default: None, which means 2 with workers).
        persistent_workers: True keeps the workers from epoch to epoch (default: False).
        pin_memory_device: Device for which memory is pinned (default: "", the current accelerator). torch has
            deprecated this argument.
        in_order: False delivers batches in the order in which they become ready (default: True).

    Raises:
        ValueError: In the same cases as in torch's class, with the same message. Also if one of rustloader's own
            options has an invalid value, or needs workers that the loader does not have.
        TypeError: In the same cases as in torch's class. Also if one of rustloader's own options has the wrong type.
        AssertionError: In the same cases as in torch's class.

    Examples:
        >>> loader = rustloader.DataLoader(range(8), batch_size=4, num_workers=2)
        >>> for batch in loader:
        ...     print(batch)
        tensor([0, 1, 2, 3])
        tensor([4, 5, 6, 7])
    """

    # Copied, because classes do not inherit annotations.
    __annotations__ = dict(torch_data.DataLoader.__annotations__)

    if TYPE_CHECKING:

        def __init__(
            self,
            dataset: Dataset[_T_co],
            batch_size: int | None = 1,
            shuffle: bool | None = None,
            sampler: Sampler[Any] | Iterable[Any] | None = None,
            batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
            num_workers: int | Literal["auto"] = 0,
            collate_fn: Callable[[list[Any]], Any] | None = None,
            pin_memory: bool = False,
            drop_last: bool = False,
            timeout: float = 0,
            worker_init_fn: Callable[[int], None] | None = None,
            multiprocessing_context: Any = None,
            generator: Any = None,
            *,
            prefetch_factor: int | None = None,
            persistent_workers: bool = False,
            pin_memory_device: str = "",
            in_order: bool = True,
            dispatch: Dispatch | None = None,
            reorder_window: int | str | None = None,
            seed_by: SeedBy | None = None,
            worker_threads: int | None = None,
            max_restarts: int | None = None,
            stall_timeout: float | None = None,
            on_error: OnError | Callable[[Any, Exception], Any] | None = None,
            max_errors: int | float | None = None,
            worker_affinity: Literal["spread"] | Sequence[int | Collection[int]] | None = None,
            name: str | None = None,
            overlap_epochs: bool | None = None,
        ) -> None:
            self.dispatch = dispatch
            self.reorder_window = reorder_window
            self.seed_by = seed_by
            self.worker_threads = worker_threads
            self.max_restarts = max_restarts
            self.stall_timeout = stall_timeout
            self.on_error = on_error
            self.max_errors = max_errors
            self.worker_affinity = worker_affinity
            self.name = name
            self.overlap_epochs = overlap_epochs

    else:

        def __init__(self, *args, **kwargs):
            args, kwargs, auto = arguments.resolved(args, kwargs)
            own = {name: kwargs.pop(name) for name in options.keywords() if name in kwargs}
            given = {name: value for name, value in own.items() if value is not None}
            options.Options(**given)  # raises if a value is invalid
            try:
                super().__init__(*args, **kwargs)
            except TypeError as error:
                suggest(error, kwargs, inspect.signature(DataLoader).parameters)
                raise
            options.check_workers(given, self.num_workers, self.persistent_workers)
            for sampler in (self.sampler, self.batch_sampler):
                if hasattr(type(sampler), "_rustloader_check"):
                    sampler._rustloader_check(self)
            loader_state.give(self, given)
            names.note_origin(self, sys._getframe(1))
            if auto is not None:
                loader_state.set_auto(self, auto)
            if self.num_workers > 0 and sys.platform.startswith("linux"):
                loader_state.of(self).pages.announce(self.num_workers)

    def __repr__(self) -> str:
        try:
            return representation.of(self, _place(self, super()._get_iterator))
        except Exception:  # an attribute is missing or invalid
            return object.__repr__(self)

    def __iter__(self) -> _BaseDataLoaderIter:
        arguments.refuse_string(self)
        return super().__iter__()

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if self.num_workers == 0:
            iterator = super()._get_iterator()
            if sys.platform.startswith("linux"):
                single.prepare(iterator, self)
            return iterator
        if not sys.platform.startswith("linux"):
            unsupported.warn()
            return super()._get_iterator()
        reason = _why_not_engine(super()._get_iterator)
        if reason is not None:
            fallback.fall_back(self, reason)
            return super()._get_iterator()
        if not loader_state.has_auto(self):  # "auto" may deliberately choose more workers than there are cores
            in_torch(self.check_worker_number_rationality)
        return _MultiProcessingDataLoaderIter(self)


def _add_keywords(cls: Any) -> None:
    """Adds the options that torch does not have to a loader class's attributes, signature and docstring."""
    torch_signature = inspect.signature(torch_data.DataLoader.__init__)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=options.type_of(name))
        for name in options.keywords()
    ]
    cls.__init__.__signature__ = torch_signature.replace(parameters=[*torch_signature.parameters.values(), *added])
    cls.__init__.__annotations__ = torch_data.DataLoader.__init__.__annotations__ | {
        parameter.name: parameter.annotation for parameter in added
    }
    for name in options.keywords():
        setattr(cls, name, None)
    cls.__doc__ = options.with_fields(cls.__doc__, "Keyword Args:", options.keywords())


_add_keywords(DataLoader)

# String annotations copied from torch are resolved in this module, so the names in them must exist here.
for _name in re.findall(r"\w+", " ".join(map(str, DataLoader.__annotations__.values()))):
    if hasattr(torch_dataloader, _name):
        globals().setdefault(_name, getattr(torch_dataloader, _name))


def _why_not_engine(get_iterator: Callable[..., Any]) -> str | None:
    """Returns the reason why the engine's iterator cannot replace the one that torch's loader would make; None if it
    can."""
    if not is_defined_in(get_iterator, torch_dataloader):
        return "torch's DataLoader._get_iterator was replaced"
    iterator = torch_dataloader._MultiProcessingDataLoaderIter
    if iterator is not TorchIter and _MultiProcessingDataLoaderIter not in iterator.__mro__:
        return "torch.utils.data.dataloader._MultiProcessingDataLoaderIter was replaced"
    return None


def _place(loader: DataLoader[Any], get_iterator: Callable[..., Any]) -> str:
    """Returns a phrase that says where a loader runs."""
    if loader.num_workers == 0:
        return "in this process"
    if not sys.platform.startswith("linux"):
        return "on torch's iterator: the engine needs Linux"
    reason = _why_not_engine(get_iterator)
    reason = reason or fallback.why_not(_MultiProcessingDataLoaderIter, _MultiProcessingDataLoaderIter, loader)
    if reason is None and (counters := ledger.find(loader)) is not None and not counters.iterators:
        reason = next(iter(counters.fallbacks), None)
    return "on the engine" if reason is None else f"on torch's iterator: {reason}"
