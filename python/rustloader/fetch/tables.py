"""Tables: a batch of a TensorDataset is a gather of rows, instead of a sample at a time and a stack of them."""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType, WrapperDescriptorType
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset, _utils, dataset
from torch.utils.data._utils import collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from rustloader.sharing.arrays import SharedTensor
from rustloader.sharing.sequences import SharedList, SharedTuple
from rustloader.system.torch_side import known_code

# Gathers the rows of tensors: a list of tensors, or None if torch has to make the batch.
_Gather = Callable[[Any, list[Any]], "list[torch.Tensor] | None"]

_default_collate: Any = collate.default_collate
_collate: Any = collate.collate
_stack: Any = torch.stack
_row: Any = torch.Tensor.__getitem__
_fetch: Any = _MapDatasetFetcher.fetch
_getitem: Any = TensorDataset.__getitem__
_getitems: Any = Subset.__getitems__
# Whether torch's code is what a gather stands for.
_is_known = all(
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

# Functions of default_collate's table that make torch's batch of tensors.
standard_functions: list[Any] = [collate.collate_tensor_fn]


def use(fetcher: Any, collate_fn: Any, gather: _Gather) -> None:
    """Makes a fetcher gather the batches of a table, if ``collate_fn``, which it calls, is torch's default_collate."""
    kind: Any = type(fetcher)
    if kind is _MapDatasetFetcher and _is_known and fetcher.auto_collation and collate_fn is _default_collate:
        table = fetcher.dataset
        while type(table) is Subset:
            table = table.dataset
        if type(table) is TensorDataset:
            # Keeps its attributes, which programs can reach without workers.
            fetcher.__class__ = TableFetcher
            fetcher._begin(gather)


# Sequences of indices whose access runs no code of the program.
_INDICES = (list, tuple, range, SharedList, SharedTuple)


class TableFetcher(_MapDatasetFetcher):
    """torch's fetcher of a table. A batch that a gather would not make as torch does takes torch's way."""

    def _begin(self, gather: _Gather) -> None:
        self._gather = gather
        self._collate_fn = self.collate_fn
        functions = collate.default_collate_fn_map
        self._kinds = set(functions)
        self._function = functions.get(torch.Tensor)
        # A sample is a tuple, for which a program may have a function of its own.
        self._is_standard = self._function in standard_functions and not any(isinstance((), kind) for kind in functions)

    def fetch(self, possibly_batched_index: Any) -> Any:
        batch = self._rows(possibly_batched_index) if self._is_untouched() else None
        return _MapDatasetFetcher.fetch(self, possibly_batched_index) if batch is None else batch

    def _is_untouched(self) -> bool:
        """Whether torch would still make a batch with the functions that a gather stands for."""
        functions = collate.default_collate_fn_map
        return (
            self._is_standard
            and self.collate_fn is self._collate_fn
            and functions.get(torch.Tensor) is self._function
            and functions.keys() == self._kinds
            and collate.collate is _collate
            and _default_collate.__globals__["collate"] is _collate
            and torch.stack is _stack
            and torch.Tensor.__getitem__ is _row
            and TensorDataset.__getitem__ is _getitem
            and Subset.__getitems__ is _getitems
            and _MapDatasetFetcher.fetch is _fetch
        )

    def _rows(self, index: Any) -> list[torch.Tensor] | None:
        table = self.dataset
        if type(index) is not list or not self.auto_collation:
            return None
        while type(table) is Subset:
            # Other sequences may run code, which torch's way would run again.
            if type(table.indices) not in _INDICES or "__getitems__" in vars(table):
                return None
            index = _at(table.indices, index)
            table = table.dataset
        if type(table) is not TensorDataset or index is None or hasattr(table, "__getitems__"):
            return None
        tensors = table.tensors
        if type(tensors) is tuple and any(type(tensor) is SharedTensor for tensor in tensors):
            tensors = tuple(tensor.plain() if type(tensor) is SharedTensor else tensor for tensor in tensors)
        return self._gather(tensors, index)


def _at(indices: Any, index: list[Any] | None) -> list[Any] | None:
    """The items of a sequence; None if an index is not an int in range."""
    try:
        return None if index is None else [indices[place] for place in index]
    except (IndexError, TypeError):
        return None
