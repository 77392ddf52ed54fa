"""The attributes of loaders and iterators, both torch's and this package's, that this package relies on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from rustloader._core import Engine


class HasState(Protocol):
    """A dataset, or an iterator over a dataset, whose state can be saved and loaded."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> None: ...


class LoaderLike(Protocol):
    """A ``torch.utils.data.DataLoader``, another library's loader with the same attributes, or a view of a loader."""

    @property
    def dataset(self) -> Any: ...
    @property
    def generator(self) -> torch.Generator | None: ...
    @property
    def multiprocessing_context(self) -> Any: ...
    @property
    def worker_init_fn(self) -> Any: ...
    @property
    def prefetch_factor(self) -> Any: ...
    @property
    def persistent_workers(self) -> bool: ...
    @property
    def in_order(self) -> bool: ...
    @property
    def _dataset_kind(self) -> int: ...
    @property
    def _auto_collation(self) -> bool: ...
    @property
    def _index_sampler(self) -> Any: ...
    @property
    def _IterableDataset_len_called(self) -> Any: ...

    @property
    def _iterator(self) -> Iterator[Any] | None: ...

    num_workers: int


class StatefulLoaderLike(LoaderLike, Protocol):
    """A ``StatefulDataLoader``."""

    snapshot_every_n_steps: int | None
    _epochs: int

    def _keeps_workers(self) -> bool: ...


class Rewindable(Protocol):
    """A loader whose states can go back: a ``StatefulDataLoader``, or a wrapper with its attributes. These states are
    for a prefetcher, which has seen the end of an epoch, or an error, before the program."""

    def _state_before_end(self) -> dict[str, Any]: ...
    def _state_before_error(self) -> dict[str, Any]: ...


class IteratorLike(Protocol):
    """torch's iterator over a loader, with or without workers."""

    @property
    def _dataset(self) -> Any: ...
    @property
    def _dataset_kind(self) -> int: ...
    @property
    def _auto_collation(self) -> bool: ...
    @property
    def _collate_fn(self) -> Any: ...
    @property
    def _drop_last(self) -> bool: ...
    @property
    def _index_sampler(self) -> Any: ...
    @property
    def _pin_memory(self) -> bool: ...
    @property
    def _pin_memory_device(self) -> Any: ...
    @property
    def _timeout(self) -> float: ...
    @property
    def _persistent_workers(self) -> bool: ...
    @property
    def _profile_name(self) -> str: ...
    @property
    def _shared_seed(self) -> Any: ...
    @property
    def _IterableDataset_len_called(self) -> Any: ...

    _num_workers: int
    _base_seed: Any
    _sampler_iter: Any
    _num_yielded: int


class SingleIterator(IteratorLike, Protocol):
    """An iterator without workers."""

    _dataset_fetcher: Any


class WorkersIterator(IteratorLike, Protocol):
    """This package's iterator with workers."""

    _workers: list[Any]
    _workers_status: Any
    _worker_init_fn: Any
    _shutdown: bool
    _in_order: bool
    _pin_memory_thread: Any
    _pin_memory_thread_done_event: Any

    @property
    def _core(self) -> Engine | None: ...

    def _reset(self, loader: LoaderLike, first_iter: bool = False) -> None: ...
    def _reset_base(self, loader: LoaderLike, first_iter: bool) -> None: ...
    def _next_index(self) -> Any: ...
    def _next_data(self) -> Any: ...
    def _shutdown_workers(self) -> None: ...
    def _note_exit(self) -> None: ...
    def _engine(self) -> Engine: ...
    def _mark_worker_as_unavailable(self, worker_id: int, shutdown: bool = False) -> None: ...
