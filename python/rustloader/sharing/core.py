"""``rustloader.share``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from rustloader._core import ShareBuilder, SharedStore
from rustloader.sharing.arrays import SharedTensor, array_of, share_array, share_tensor, tensor_of
from rustloader.sharing.datasets import Sharing, is_dataset
from rustloader.sharing.pickling import data_of, dumps
from rustloader.sharing.sequences import ARRAY, DICT, LIST, TENSOR, TUPLE, SharedDict, SharedList, SharedTuple

_OPENERS = {LIST: SharedList, TUPLE: SharedTuple, DICT: SharedDict, ARRAY: array_of, TENSOR: tensor_of}


def share(x: Any, *, threshold: int = 1 << 20) -> Any:
    """Copies an object into shared memory, which the workers of all loaders read without a copy of their own.

    Workers that read a plain list or dict copy it bit by bit: Python writes a reference count into each object that
    it looks at, and a forked process copies each page that is written to. A shared object has no such counts. Its
    memory is one sealed file without a name, which nothing can change. It counts once for all processes, and goes with
    the last of them.

    Items are made anew at each access: they have the type and value that the original had, but changes to them are
    lost, and ``is`` does not hold between two accesses.

    A list, or any other iterable of items, becomes a read-only sequence like a list; it is read once, and never held in
    memory as a whole. ``to_list()`` makes a list of it. A tuple becomes a read-only sequence like a tuple, a dict or
    another mapping a read-only mapping in the same order (``to_dict()``), a NumPy array without Python objects a
    read-only array. A dense CPU tensor becomes a tensor: torch knows no read-only tensors, and what a process writes to
    it, this process alone sees.

    A dataset becomes a shallow copy, in which the large lists, tuples, dicts, arrays and tensors among its attributes
    are shared ones, and so are those of datasets in it (``Subset``, ``ConcatDataset``, wrappers). The dataset itself
    stays as it is. The log says at INFO what was shared, and as a warning what could not be, or that nothing was large.

    Items and values may be anything that can be pickled. Plain ones (str, bytes, numbers, None, arrays, tensors, and
    lists, tuples and dicts of these) are not pickled, and are faster.

    Args:
        x: A list or another iterable, a tuple, a dict, an array, a tensor, or a dataset.
        threshold: Bytes from which an attribute of a dataset is shared, about, as Python objects. Default: 1 MiB.

    Returns:
        The shared object; ``x`` itself if it is shared already, or a dataset with nothing to share. It compares equal
        to the original. Workers get it as a descriptor under every start method, with torch's loader too. ``pickle``
        and ``torch.save`` save its content, and loading makes a new shared object; arrays and tensors are saved as
        plain ones.

    Raises:
        MemoryError: A memory cgroup, the machine or a limit has too little memory. The text has the sizes.
        TypeError: The object cannot be shared. The text names the remedy.

    Examples:
        >>> paths = rustloader.share([f"images/{n}.jpg" for n in range(1000)])
        >>> paths[3], len(paths), paths == [f"images/{n}.jpg" for n in range(1000)]
        ('images/3.jpg', 1000, True)
        >>> labels = rustloader.share({"images/0.jpg": 7})
        >>> labels["images/0.jpg"]
        7
        >>> dataset = torch.utils.data.TensorDataset(torch.zeros(1000, 1000))
        >>> dataset = rustloader.share(dataset)
        >>> len(dataset)
        1000
    """
    if is_dataset(x):
        return Sharing(threshold, lambda value, name: share(value)).run(x)
    if isinstance(x, (SharedList, SharedTuple, SharedDict, SharedTensor)):
        return x
    if isinstance(x, np.ndarray):
        if type(x) is not np.ndarray:
            raise TypeError(f"a {type(x).__name__} would become a plain array: share(np.asarray(x)) if that is meant")
        return x if data_of(x) is not None else share_array(x)
    if isinstance(x, torch.Tensor):
        if type(x) is not torch.Tensor:
            raise TypeError(f"a {type(x).__name__} would become a plain tensor: share(x.detach()) if that is meant")
        return share_tensor(x)
    return opened(build(x))


def opened(store: SharedStore) -> Any:
    """The object of an image. Raises ValueError for an unknown kind."""
    opener = _OPENERS.get(store.kind)
    if opener is None:
        raise ValueError(f"a shared object of kind {store.kind} is unknown here: use the rustloader that has made it")
    return opener(store)


def build(x: Any) -> SharedStore:
    """The image of a list, a tuple, a dict or another iterable."""
    builder = ShareBuilder()
    if isinstance(x, Mapping):
        builder.update(x.items(), dumps)
        return builder.finish(DICT, b"")
    if isinstance(x, tuple) and type(x) is not tuple:
        raise TypeError(f"a {type(x).__name__} would lose its class: share(tuple(x)) or share(list(x))")
    if hasattr(type(x), "__dataframe__") or hasattr(type(x), "__arrow_c_stream__"):
        raise TypeError(f"a {type(x).__name__} is not shared as a whole: share(x[column].to_numpy()) for each column")
    if isinstance(x, (str, bytes, bytearray)) or not isinstance(x, Iterable):
        raise TypeError(
            f"share() takes a list, a tuple, a dict, an array, a tensor, an iterable of items or a dataset, not a "
            f"{type(x).__name__}: share the containers that hold the data"
        )
    builder.extend(x, dumps)
    return builder.finish(TUPLE if isinstance(x, tuple) else LIST, b"")
