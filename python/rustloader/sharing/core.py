"""The function ``rustloader.share``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, overload

import numpy as np
import torch
from torch.utils.data import Dataset

from rustloader._core import ShareBuilder, SharedData, SharedStore
from rustloader.sharing.agreement import check
from rustloader.sharing.arrays import SharedTensor, array_of, share_array, share_tensor, tensor_of
from rustloader.sharing.datasets import Sharing, is_dataset
from rustloader.sharing.pickling import data_of, dumps
from rustloader.sharing.ranks import meet
from rustloader.sharing.sequences import ARRAY, DICT, LIST, TENSOR, TUPLE, SharedDict, SharedList, SharedTuple

_OPENERS = {LIST: SharedList, TUPLE: SharedTuple, DICT: SharedDict, ARRAY: array_of, TENSOR: tensor_of}

# Objects that are shared as objects of the same type.
_Same = TypeVar("_Same", bound="Dataset[Any] | torch.Tensor | np.ndarray[Any, Any]")


@overload
def share(x: _Same, *, threshold: int = 1 << 20, key: str | None = None, timeout: float = 1800.0) -> _Same: ...
@overload
def share(x: Any, *, threshold: int = 1 << 20, key: str | None = None, timeout: float = 1800.0) -> Any: ...
def share(x: Any, *, threshold: int = 1 << 20, key: str | None = None, timeout: float = 1800.0) -> Any:
    """Copies an object into shared memory, which the workers of all loaders read without copying it.

    Workers that read a plain list or dict gradually copy it: Python writes a reference count into each object that it
    accesses, and a forked process copies each page that is written to. A shared object has no such counts. Its memory
    is one sealed file without a name, which no process can change. The memory is counted once for all processes, and
    freed when the last process that uses it ends.

    Each access makes a new item with the type and value of the original. Changes to items are lost, and two accesses
    return different objects.

    A list, or any other iterable of items, becomes a read-only sequence like a list; the iterable is read once, and
    never held in memory in its entirety. ``to_list()`` converts the sequence to a list. A tuple becomes a read-only
    sequence like a tuple. A dict or another mapping becomes a read-only mapping in the same order (``to_dict()``). A
    NumPy array without Python objects becomes a read-only array. A dense CPU tensor becomes a tensor that can be
    written to, because torch has no read-only tensors; only the process that writes to it sees the changes.

    A dataset becomes a shallow copy in which the large lists, tuples, dicts, arrays and tensors among its attributes
    are shared. The same applies to the datasets in it (``Subset``, ``ConcatDataset``, wrappers). The original does not
    change. At level INFO the log lists what was shared, and what was not because its class would be lost. A warning
    reports any other failure, or that nothing was large enough.

    Items and values may be any objects that can be pickled. Plain ones (str, bytes, numbers, None, arrays, tensors, and
    lists, tuples and dicts of these) are not pickled, and are faster.

    With a ``key``, the ranks of a run on this machine use one copy: the first rank that makes the call shares ``x``,
    and the others receive the same memory. All ranks must pass the same object, and make their calls with a key in the
    same order. If the rank that builds the copy dies, another one builds it. The ranks are those that ``torchrun``,
    Slurm or MPI defines; without one of these, the key has no effect.

    Args:
        x: A list or another iterable, a tuple, a dict, an array, a tensor, a dataset, or a function without arguments
            that returns any of these except a dataset. With a key, only the first rank calls the function.
        threshold: Minimum size in bytes of the attributes of a dataset that are shared. Sizes of Python objects are
            estimates. Default: 1 MiB.
        key: A name under which the ranks of this machine share this object, such as "train-index".
        timeout: Seconds that a rank waits for the rank that builds the object, and for which the building rank keeps
            the object available to ranks that make the call later. Default: half an hour. ``math.inf``: no limit.

    Returns:
        The shared object, or ``x`` itself if it is already shared or is a dataset with nothing to share. It compares
        equal to the original. Workers receive it as a descriptor under every start method, even with torch's loader.
        ``pickle`` and ``torch.save`` save its content, and loading makes a new shared object; arrays and tensors are
        saved as plain ones.

    Raises:
        MemoryError: A memory cgroup, the machine or a limit leaves too little memory. The message gives the sizes.
        PermissionError: A process of another user holds the key.
        TimeoutError: The rank that builds the object for this key did not finish within ``timeout``.
        TypeError: The object cannot be shared, and the message names the remedy; or ``key`` is not a str.
        ValueError: Ranks pass different objects for the same key, or ``threshold`` or ``timeout`` is not a number of
            at least 0.

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
        >>> index = rustloader.share(lambda: range(1000), key="train-index")  # one copy for all ranks of this machine
        >>> index[5]
        5
    """
    if not isinstance(threshold, int | float) or not threshold >= 0:
        raise ValueError(f"threshold must be a number of bytes, 0 or more, got {threshold!r}")
    if not timeout >= 0:
        raise ValueError(f"timeout must be a number of seconds, 0 or more, got {timeout!r}")
    if key is not None and not isinstance(key, str):
        raise TypeError(f"key must be a str, got {key!r}")
    if is_dataset(x):
        return Sharing(threshold, lambda value, name: _share(value, key and f"{key}/{name}", timeout)).run(x)
    return _share(x, key, timeout)


def _share(x: Any, key: str | None, timeout: float) -> Any:
    if key is None:
        return _share_copy(x)
    shared = open_store(meet(key, lambda: store_of(_share_copy(x)), timeout, SharedStore))
    check(key, x, shared)
    return shared


def _share_copy(x: Any) -> Any:
    """Returns the shared object for any object except a dataset."""
    if isinstance(x, (SharedList, SharedTuple, SharedDict, SharedTensor)):
        return x
    if isinstance(x, np.ndarray):
        if type(x) is not np.ndarray:
            raise TypeError(f"a {type(x).__name__} would become a plain array: use share(np.asarray(x)) to accept that")
        return x if data_of(x) is not None else share_array(x)
    if isinstance(x, torch.Tensor):
        if type(x) is not torch.Tensor:
            raise TypeError(f"a {type(x).__name__} would become a plain tensor: use share(x.detach()) to accept that")
        return share_tensor(x)
    if callable(x) and not isinstance(x, Iterable):
        result = x()
        if is_dataset(result):
            raise TypeError(
                f"the function returns a dataset, a {type(result).__name__}: use share(function()) to share its large "
                "attributes"
            )
        return _share_copy(result)
    return open_store(build(x))


def store_of(shared: Any) -> SharedStore:
    """Returns the image of a shared object."""
    if isinstance(shared, np.ndarray):
        data = data_of(shared)
        # A view of a shared array refers to the image of the entire array.
        if data is None or not _is_whole(shared, data):
            data = data_of(share_array(np.array(shared)))
        assert data is not None
        return data.store
    store: SharedStore = shared.store
    return store


def _is_whole(view: np.ndarray, data: SharedData) -> bool:
    whole = array_of(data.store)
    has_same_layout = (view.dtype, view.shape, view.strides) == (whole.dtype, whole.shape, whole.strides)
    return has_same_layout and view.__array_interface__["data"][0] == data.address


def open_store(store: SharedStore) -> Any:
    """Returns the shared object in an image. Raises ValueError if the kind of the image is unknown."""
    opener = _OPENERS.get(store.kind)
    if opener is None:
        raise ValueError(
            f"shared objects of kind {store.kind} are unknown here: use the version of rustloader that made them"
        )
    return opener(store)


def build(x: Any) -> SharedStore:
    """Returns the image of a list, a tuple, a dict or another iterable."""
    builder = ShareBuilder()
    if isinstance(x, Mapping):
        builder.update(x.items(), dumps)
        return builder.finish(DICT, b"")
    if isinstance(x, tuple) and type(x) is not tuple:
        raise TypeError(f"a {type(x).__name__} would lose its class: use share(tuple(x)) or share(list(x))")
    if hasattr(type(x), "__dataframe__") or hasattr(type(x), "__arrow_c_stream__"):
        raise TypeError(
            f"a {type(x).__name__} is not shared as a whole: use share(x[column].to_numpy()) for each column"
        )
    if isinstance(x, (str, bytes, bytearray)) or not isinstance(x, Iterable):
        raise TypeError(
            f"share() takes a list, a tuple, a dict, an array, a tensor, an iterable of items or a dataset, not a "
            f"{type(x).__name__}: share the containers of the data"
        )
    builder.extend(x, dumps)
    return builder.finish(TUPLE if isinstance(x, tuple) else LIST, b"")
