"""Makes batches of a TensorDataset, or of cached samples, with a gather, instead of making samples and stacking
them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, WrapperDescriptorType
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset, _utils, dataset
from torch.utils.data._utils import collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from rustloader.caching.dataset import CachedDataset
from rustloader.sharing.arrays import SharedTensor
from rustloader.sharing.sequences import SharedList, SharedTuple
from rustloader.system.torch_side import known_code

# Gathers rows of tensors or of a cache's table. Returns the batch, or None if torch has to make it.
_Gather = Callable[[Any, list[Any]], Any]

_default_collate: Any = collate.default_collate
_collate: Any = collate.collate
_stack: Any = torch.stack
_row: Any = torch.Tensor.__getitem__
_fetch: Any = _MapDatasetFetcher.fetch
_getitem: Any = TensorDataset.__getitem__
_getitems: Any = Subset.__getitems__
# True if torch's functions have exactly the code that a gather replaces.
_torch_is_known = all(
    (
        # A program may have replaced these before this import.
        type(_stack) is BuiltinFunctionType,
        type(_row) is WrapperDescriptorType,
        known_code(_default_collate, collate, "collate default_collate_fn_map"),
        known_code(_fetch, _utils.fetch, "auto_collation hasattr dataset __getitems__ collate_fn"),
        known_code(_getitem, dataset, "tuple tensors"),
        known_code(_getitems, dataset, "callable getattr dataset __getitems__ indices"),
    )
)

# Functions in default_collate's map of types that make the same batches of tensors and numbers as torch's own.
standard_functions: list[Any] = [collate.collate_tensor_fn, collate.collate_float_fn, collate.collate_int_fn]


def use(
    fetcher: Any,
    collate_fn: Any,
    gather: _Gather,
    gather_cached: _Gather | None = None,
    iterate: Callable[[list[Any]], Iterable[Any]] = iter,
) -> None:
    """Makes a fetcher gather its batches, if possible and if ``collate_fn`` is torch's default_collate. From a cached
    dataset, the fetcher requests all samples of a batch together.

    Args:
        fetcher: torch's fetcher.
        collate_fn: The program's function, which the fetcher calls, possibly through a wrapper.
        gather: Gathers the rows of a table.
        gather_cached: Gathers cached samples; None leaves them to torch.
        iterate: See ``CachedDataset.batch``.
    """
    kind: Any = type(fetcher)
    if kind is not _MapDatasetFetcher or not _torch_is_known or not fetcher.auto_collation:
        return
    table = fetcher.dataset
    while type(table) is Subset:
        table = table.dataset
    is_default = collate_fn is _default_collate
    # The fetcher remains the same object: without workers, programs can access its attributes.
    if type(table) is TensorDataset and is_default:
        fetcher.__class__ = TableFetcher
        fetcher._begin(gather)
    elif isinstance(table, CachedDataset) and not hasattr(table, "__getitems__"):
        fetcher.__class__ = CachedFetcher
        fetcher._begin(gather_cached if is_default and table.then is None else None)
        fetcher._iterate = iterate


# Types of index sequences. Reading their items runs no code of the program.
_INDEX_TYPES = (list, tuple, range, SharedList, SharedTuple)


class TableFetcher(_MapDatasetFetcher):
    """torch's fetcher for a table. torch's own method makes any batch for which a gather could give a different
    result."""

    # The types that the gather collates, and examples of the samples. A program may have registered other collate
    # functions for the types of either.
    _collated_types: tuple[type, ...] = (torch.Tensor,)
    _sample_examples: tuple[Any, ...] = ((),)

    def _begin(self, gather: _Gather | None) -> None:
        self._gather: Any = gather
        self._collate_fn = self.collate_fn
        functions = collate.default_collate_fn_map
        self._registered_types = set(functions)
        self._functions = [functions.get(kind) for kind in self._collated_types]
        self._is_standard = all(function in standard_functions for function in self._functions) and not any(
            isinstance(sample, kind) for sample in self._sample_examples for kind in functions
        )

    def fetch(self, possibly_batched_index: Any) -> Any:
        batch = self._rows(possibly_batched_index) if self._is_untouched() else None
        return _MapDatasetFetcher.fetch(self, possibly_batched_index) if batch is None else batch

    def _is_untouched(self) -> bool:
        """Returns True if torch would still make a batch with the functions that a gather replaces."""
        functions = collate.default_collate_fn_map
        return (
            self._is_standard
            and self.collate_fn is self._collate_fn
            and [functions.get(kind) for kind in self._collated_types] == self._functions
            and functions.keys() == self._registered_types
            and collate.collate is _collate
            and _default_collate.__globals__["collate"] is _collate
            and torch.stack is _stack
            and torch.Tensor.__getitem__ is _row
            and TensorDataset.__getitem__ is _getitem
            and Subset.__getitems__ is _getitems
            and _MapDatasetFetcher.fetch is _fetch
        )

    def _table(self, index: Any) -> tuple[Any, list[Any] | None]:
        """Returns the dataset below torch's Subsets, and the list of the indices in it. The list is None if it cannot
        be computed without running code of the program, or if an index is not an int in range."""
        table = self.dataset
        if type(index) is not list or not self.auto_collation:
            return table, None
        while type(table) is Subset:
            # Other sequences may run code of the program, which torch's own method would run again.
            if type(table.indices) not in _INDEX_TYPES or "__getitems__" in vars(table):
                return table, None
            index = _items_at(table.indices, index)
            table = table.dataset
        return table, index

    def _rows(self, index: Any) -> Any:
        table, index = self._table(index)
        if type(table) is not TensorDataset or index is None or hasattr(table, "__getitems__"):
            return None
        tensors = table.tensors
        if type(tensors) is tuple and any(type(tensor) is SharedTensor for tensor in tensors):
            tensors = tuple(tensor.plain() if type(tensor) is SharedTensor else tensor for tensor in tensors)
        return self._gather(tensors, index)


class CachedFetcher(TableFetcher):
    """torch's fetcher for cached samples. torch's own method requests the samples that ``CachedDataset.batch`` does not
    return."""

    _collated_types: tuple[type, ...] = (torch.Tensor, float, int)
    _sample_examples: tuple[Any, ...] = ((), [], {})
    _iterate: Callable[[list[Any]], Iterable[Any]]

    def fetch(self, possibly_batched_index: Any) -> Any:
        cached, index = self._table(possibly_batched_index)
        samples = None
        if isinstance(cached, CachedDataset) and index is not None:
            if self._gather is not None and cached.then is None and self._is_untouched():
                batch = self._gather(cached.table, index)
                if batch is not None:
                    return batch
            if _MapDatasetFetcher.fetch is _fetch and Subset.__getitems__ is _getitems:
                samples = cached.batch(index, self._iterate)
        if samples is None:
            return _MapDatasetFetcher.fetch(self, possibly_batched_index)
        return self.collate_fn(samples)


def _items_at(indices: Any, index: list[Any] | None) -> list[Any] | None:
    """Returns the items of a sequence at some indices, or None if an index is not an int in range."""
    try:
        return None if index is None else [indices[place] for place in index]
    except (IndexError, TypeError):
        return None
