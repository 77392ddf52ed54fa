"""An iterator's warnings and errors, with torch's wording."""

from __future__ import annotations

import warnings

from torch.utils.data.dataloader import _BaseDataLoaderIter

from rustloader.errors import LoaderTimeoutError
from rustloader.system.protocols import IteratorLike
from rustloader.system.torch_side import frames_to_program, in_torch

TOO_LONG = (
    "Length of IterableDataset {} was reported to be {}(when accessing len(dataloader)), but {} samples have been "
    "fetched. "
)
TOO_LONG_WITH_WORKERS = (
    f"{TOO_LONG}For multiprocessing data-loading, this could be caused by not properly configuring the "
    "IterableDataset replica at each worker. Please see "
    "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
)
# Older versions of torch attribute this warning to a line in torch's own file, not to the caller.
_POINTS_TO_THE_CALLER = ("stacklevel",) in _BaseDataLoaderIter.__next__.__code__.co_consts


def warn_of_length(it: IteratorLike, text: str = TOO_LONG) -> None:
    """Warns that an iterable dataset has yielded more samples than its length. ``text`` is the message's template."""
    text = text.format(it._dataset, it._IterableDataset_len_called, it._num_yielded)
    if _POINTS_TO_THE_CALLER:
        warnings.warn(text, stacklevel=frames_to_program())
    else:
        in_torch(warnings.warn, text, None, 1)


def timed_out(it: IteratorLike) -> LoaderTimeoutError:
    """Returns the error for a wait that exceeded the loader's ``timeout``."""
    return LoaderTimeoutError(f"DataLoader timed out after {it._timeout} seconds")
