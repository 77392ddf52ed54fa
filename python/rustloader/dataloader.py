"""``rustloader.DataLoader``: torch's class with our iterator."""

from __future__ import annotations

from typing import TypeVar

from torch.utils import data as torch_data
from torch.utils.data.dataloader import _BaseDataLoaderIter

from rustloader._iter import _in_torch, _MultiProcessingDataLoaderIter, _other_iterator, _tell_handover

__all__ = ["DataLoader"]

_T_co = TypeVar("_T_co", covariant=True)


class DataLoader(torch_data.DataLoader[_T_co]):
    """Takes the place of :class:`torch.utils.data.DataLoader`.

    Arguments, attributes, batches, their order, seeds, warnings and errors are those of the torch that is installed;
    its documentation applies. With ``num_workers=0`` the iterator is torch's own. With workers, batches
    come through a shared-memory arena that is reused from batch to batch:

    * A batch stays untouched for as long as anything of it is kept (a tensor, a view, a ``.numpy()`` array), also after
      the loader and its workers have ended; each tensor of 16 KiB or more holds its own memory alone.
    * Nothing is put into ``/dev/shm`` and no descriptor travels with a batch.
    * A batch that cannot be sent is an error in its place, and a worker's death is an error at once.

    Raises:
        ValueError, TypeError, AssertionError: as torch's class does, for the same arguments, with the same texts.
    """

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if self.num_workers == 0:
            return super()._get_iterator()
        other = _other_iterator(super()._get_iterator)
        if other is not None:
            _tell_handover(other)
            return super()._get_iterator()
        _in_torch(self.check_worker_number_rationality)
        return _MultiProcessingDataLoaderIter(self)
