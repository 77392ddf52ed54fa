"""``rustloader.DataLoader``: torch's class with our iterator."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils import data as torch_data
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data.dataloader import _BaseDataLoaderIter

if sys.platform.startswith("linux"):
    from rustloader import _handover, _internals, _ledger
    from rustloader._iter import _MultiProcessingDataLoaderIter
    from rustloader._torchs import TorchIter, in_torch
else:
    from rustloader import _elsewhere

__all__ = ["DataLoader"]

if TYPE_CHECKING:
    _T_co = TypeVar("_T_co", covariant=True)
else:
    # torch's own, so that both classes say the same of themselves.
    (_T_co,) = torch_data.DataLoader.__parameters__


def __getattr__(name: str) -> Any:
    """What else torch's module of this name holds: ``rustloader.dataloader.default_collate``."""
    if name.startswith("__") or not hasattr(torch_dataloader, name):
        raise AttributeError(f"module 'rustloader.dataloader' has no attribute {name!r}")
    return getattr(torch_dataloader, name)


class DataLoader(torch_data.DataLoader[_T_co]):
    """Takes the place of ``torch.utils.data.DataLoader``.

    Arguments, attributes, batches, their order, seeds, warnings and errors are those of the torch that is installed;
    its documentation applies. With ``num_workers=0``, and on systems other than Linux, the iterator is torch's own.
    With workers, batches come through a shared-memory arena that is reused from batch to batch:

    * A batch stays untouched for as long as anything of it is kept (a tensor, a view, a ``.numpy()`` array), also after
      the loader and its workers have ended; each tensor of 16 KiB or more holds its own memory alone.
    * Nothing is put into ``/dev/shm`` and no descriptor travels with a batch.
    * A batch that cannot be sent is an error in its place, and a worker's death is an error at once.

    Raises:
        ValueError, TypeError, AssertionError: as torch's class does, for the same arguments, with the same texts.
    """

    # A class does not inherit them.
    __annotations__ = dict(torch_data.DataLoader.__annotations__)

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if self.num_workers == 0:
            return super()._get_iterator()
        if not sys.platform.startswith("linux"):
            _elsewhere.tell()
            return super()._get_iterator()
        other = _other_iterator(super()._get_iterator)
        if other is not None:
            _handover.tell(other)
            _ledger.of(self).hand_over(other)
            return super()._get_iterator()
        in_torch(self.check_worker_number_rationality)
        return _MultiProcessingDataLoaderIter(self)


# What torch writes as texts in its annotations is looked up in the module of the class that has them.
for _name in re.findall(r"\w+", " ".join(map(str, DataLoader.__annotations__.values()))):
    if hasattr(torch_dataloader, _name):
        globals().setdefault(_name, getattr(torch_dataloader, _name))


def _other_iterator(get_iterator: Callable[..., Any]) -> str | None:
    """Why torch's loader would not make torch's iterator, and so ours not the one in its place; None when it would."""
    if not _internals.is_torchs(get_iterator, torch_dataloader):
        return "DataLoader._get_iterator of torch was replaced"
    iterator = torch_dataloader._MultiProcessingDataLoaderIter
    if iterator is not TorchIter and _MultiProcessingDataLoaderIter not in iterator.__mro__:
        return "torch.utils.data.dataloader._MultiProcessingDataLoaderIter was replaced"
    return None
