"""Shared arrays and tensors."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from rustloader._core import ShareBuilder, SharedStore
from rustloader.sharing import pickling
from rustloader.sharing.sequences import ARRAY, TENSOR

# Maximum number of bytes of a non-contiguous array that are copied at a time.
_PIECE = 16 << 20


def _pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the elements of an array in C order, as contiguous pieces."""
    if array.flags.c_contiguous or array.ndim == 0 or array.nbytes <= _PIECE:
        yield np.ascontiguousarray(array)
    elif array.nbytes // len(array) > _PIECE:
        for part in array:
            yield from _pieces(part)
    else:
        step = max(1, _PIECE * len(array) // array.nbytes)
        for start in range(0, len(array), step):
            yield np.ascontiguousarray(array[start : start + step])


def _build(array: np.ndarray, kind: int, meta: Any) -> SharedStore:
    builder = ShareBuilder()
    builder.expect(array.nbytes)
    for piece in _pieces(array):
        builder.raw(piece.reshape(-1).view(np.uint8))
    return builder.finish(kind, pickle.dumps(meta))


def share_array(array: np.ndarray) -> np.ndarray:
    """Returns a read-only array with the elements of ``array`` in shared memory."""
    if array.dtype.hasobject:
        raise TypeError(
            f"an array of dtype {array.dtype} holds Python objects: share(array.tolist()) shares their values"
        )
    is_fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    store = _build(array.T if is_fortran else array, ARRAY, (array.dtype, array.shape, is_fortran))
    return array_of(store)


def array_of(store: SharedStore) -> np.ndarray:
    """Returns a read-only array over the data of an image."""
    dtype, shape, is_fortran = pickle.loads(store.meta)
    # From the first shared array on, ForkingPickler sends shared arrays to new processes as descriptors.
    pickling.register(np.ndarray, pickling.reduce_array)
    return np.ndarray(shape, dtype, store.data(), order="F" if is_fortran else "C")


class SharedTensor(torch.Tensor):
    """A tensor in shared memory, made by ``rustloader.share``. Results of computations with it are plain tensors."""

    # As in torch.nn.Parameter.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    store: SharedStore

    def plain(self) -> torch.Tensor:
        """Returns a plain tensor over the same memory."""
        return self.detach()

    def _with_attributes(self, tensor: torch.Tensor) -> torch.Tensor:
        vars(tensor).update((name, value) for name, value in vars(self).items() if name != "store")
        return tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._with_attributes(self.plain()).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        copy = memo[id(self)] = self._with_attributes(self.plain().clone())
        return copy


def share_tensor(tensor: torch.Tensor) -> SharedTensor:
    """Returns a tensor with the elements of ``tensor`` in shared memory, and with its Python attributes."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise TypeError(
            f"only dense tensors in CPU memory can be shared, but this tensor is {tensor.layout} on {tensor.device}: "
            "use share(tensor.cpu().to_dense())"
        )
    if tensor.requires_grad:
        raise TypeError("a tensor that requires grad cannot be shared: use share(tensor.detach())")
    plain = tensor.resolve_conj().resolve_neg()
    # NumPy lacks bfloat16 and other types, so the array has an integer type of the same size.
    size = plain.element_size()
    integer_type = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(size)
    array = (plain.view(integer_type) if integer_type is not None else plain).numpy()
    return tensor_of(_build(array, TENSOR, (tensor.dtype, tuple(tensor.shape), vars(tensor))))


def tensor_of(store: SharedStore) -> SharedTensor:
    """Returns the tensor over the data of an image."""
    dtype, shape, attributes = pickle.loads(store.meta)
    numel = torch.Size(shape).numel()
    if numel == 0:
        plain = torch.empty(shape, dtype=dtype, device="cpu")
    else:
        if numel * dtype.itemsize > len(data := store.data()):
            raise ValueError(f"the image of a shared tensor has {len(data)} bytes, too few for {shape} of {dtype}")
        strides = torch.empty(shape, device="meta").stride()
        plain = torch.empty(0, dtype=dtype, device="cpu").set_(data.storage(), 0, shape, strides)
    tensor: SharedTensor = torch.Tensor._make_subclass(SharedTensor, plain)
    vars(tensor).update(attributes, store=store)
    return tensor


def _reduce_tensor(tensor: SharedTensor) -> Any:
    return tensor_of, (tensor.store,)


pickling.register(SharedTensor, _reduce_tensor)
