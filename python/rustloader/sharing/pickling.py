"""Pickles shared objects and their items.

A shared object is pickled as a descriptor for another process on this machine (ForkingPickler), and as its content for
any other purpose (``pickle``, ``torch.save``).
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
from collections.abc import Callable
from multiprocessing import context, popen_forkserver, reduction
from typing import Any

import numpy as np
import torch

from rustloader._core import ShareBuilder, SharedData, SharedStore

_PROTOCOL = 5
# Maximum number of descriptors in the arguments of a process under forkserver. Python's limit is 252, and a loader
# needs some, too.
_MAX_DESCRIPTORS = 240


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """Reduces a tensor. A view of a larger storage is reduced to the elements of the view, because torch would pickle
    the entire storage with each item."""
    if tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized:
        if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
            copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            vars(copy).update(vars(tensor))
            return copy.__reduce_ex__(_PROTOCOL)
    return tensor.__reduce_ex__(_PROTOCOL)


def _reduce_item_array(array: np.ndarray) -> Any:
    """Reduces an array. NumPy's own reduction of a read-only array keeps the flag only if the array is contiguous."""
    return array.__reduce_ex__(_PROTOCOL) if array.flags.writeable else (_read_only, (array.copy("K"),))


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


_ITEM_REDUCERS: dict[type, Callable[[Any], Any]] = {
    torch.Tensor: _reduce_tensor,
    np.ndarray: _reduce_item_array,
    np.memmap: _reduce_item_array,
}


def dumps(item: Any) -> bytes:
    """Pickles an item that is not a plain tree."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=_PROTOCOL)
    pickler.dispatch_table = {**_ITEM_REDUCERS, **copyreg.dispatch_table}
    pickler.dump(item)
    return out.getvalue()


# Shared lists, tuples and dicts


def reduce_by_value(shared: Any, protocol: int) -> tuple[Any, ...]:
    """Reduces a shared object to the bytes of its image, from which unpickling makes a new shared object."""
    image = memoryview(shared.store)
    return from_image, (type(shared), pickle.PickleBuffer(image) if protocol >= 5 else bytes(image))


def from_image(kind: type, image: Any) -> Any:
    """Returns a new shared object over a copy of an image.

    Raises:
        ValueError: The image is damaged, or is of another version.
    """
    return kind(_store_with(memoryview(image).cast("B")))


def _store_with(image: memoryview) -> SharedStore:
    ShareBuilder().expect(len(image))
    fd = os.memfd_create("rustloader-shared", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        offset = 0
        while offset < len(image):
            offset += os.pwrite(fd, image[offset : offset + (1 << 24)], offset)
        return SharedStore.sealed(fd)
    except BaseException:
        os.close(fd)
        raise


def reduce_to_store(shared: Any) -> tuple[Any, ...]:
    """Reduces a shared object to its store, for another process on this machine."""
    return type(shared), (shared.store,)


def is_spawning() -> bool:
    """Returns True if the arguments of a new process are being pickled."""
    return context.get_spawning_popen() is not None


def register(kind: type, reducer: Callable[[Any], Any]) -> None:
    """Registers a reducer for a class with ForkingPickler."""
    reduction.register(kind, reducer)


# Stores, which are sent as descriptors. Several objects and views over one store share a descriptor, because a process
# cannot receive the same descriptor twice.


def descriptor_of(store: Any, kind: Callable[[int], Any]) -> tuple[Any, ...]:
    """Reduces an object to its descriptor, for another process on this machine. There, ``kind`` makes an object from
    the descriptor."""
    popen = context.get_spawning_popen()
    count = len(popen._fds) if isinstance(popen, popen_forkserver.Popen) else 0  # type: ignore[attr-defined]
    if count >= _MAX_DESCRIPTORS:
        raise ValueError(
            "forkserver passes at most about 250 descriptors to a process, and each shared object of a dataset needs "
            "one: share one list of many objects instead of many objects, or use the start method 'fork' or 'spawn'"
        )
    return _from_descriptor, (reduction.DupFd(store.fileno()), kind)


def _from_descriptor(duplicate: Any, kind: Callable[[int], Any]) -> Any:
    """Returns the object for a descriptor that another process sent."""
    fd = duplicate.detach()
    os.set_inheritable(fd, False)
    return kind(fd)


def _reduce_store(store: SharedStore) -> tuple[Any, ...]:
    return descriptor_of(store, SharedStore)


def _reduce_data(data: SharedData) -> tuple[Any, ...]:
    return _data_of_store, (data.store,)


def _data_of_store(store: SharedStore) -> SharedData:
    return store.data()


register(SharedStore, _reduce_store)
register(SharedData, _reduce_data)


# Arrays


def data_of(array: Any) -> SharedData | None:
    """Returns the shared data under an array, which may be a view; None for an array that is not shared."""
    base = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, SharedData) else None


def reduce_array(array: np.ndarray) -> Any:
    """Reduces a shared array: to a descriptor in the arguments of a new process, otherwise to its elements."""
    data = data_of(array)
    if data is None or not is_spawning():
        # ForkingPickler prefers this reducer to one that the program has added to copyreg's table, so that reducer is
        # called here.
        if (reduce := copyreg.dispatch_table.get(np.ndarray)) is not None:
            return reduce(array)
        # Protocol 5, Python's default from 3.14 on, would keep a shared array read-only.
        return array.__reduce_ex__(pickle.DEFAULT_PROTOCOL if data is None else 4)
    view = array.__array_interface__["data"][0] - data.address, array.shape, array.strides
    return _view, (data, array.dtype, *view)


def _view(data: SharedData, dtype: np.dtype, offset: int, shape: Any, strides: Any) -> np.ndarray:
    return np.ndarray(shape, dtype, data, offset, strides)  # type: ignore[arg-type]
