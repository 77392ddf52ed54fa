"""Pickles values that are not plain trees of tensors, arrays and numbers.

The dispatch table is ForkingPickler's, with the reducers that torch and programs have registered there. This module
replaces only the reducers of plain CPU tensors, plain arrays and CPU storages. A batch's pickle has tokens instead of
these objects. The objects travel out of band (protocol 5) through the codec, which knows what memory they share and
which part of their storages they use. Other tensors keep torch's reducers, which reduce a tensor to its storage; the
storage travels as a tensor of its bytes.
"""

from __future__ import annotations

import copyreg
import io
import operator
import os
import pickle
from collections.abc import Callable, Sequence
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.multiprocessing import reductions

from rustloader._core import INLINE_LIMIT, is_plain_leaf
from rustloader.sharing.pickling import reduce_array as reduce_shared_array
from rustloader.workers import arguments, by_name

# The first protocol with out-of-band buffers.
_PROTOCOL = 5

_extra_reducers: dict[type, Callable[[Any], Any]] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]

_Reducers = dict[type, Callable[[Any], Any]]


def _reducers(storage: Any, tensor: Any, array: Any) -> _Reducers:
    return {torch.UntypedStorage: storage, torch.Tensor: tensor, torch.nn.Parameter: tensor, np.ndarray: array}


# The reducers that this module replaces, by type: None if none is registered by default. All others are kept.
_TORCH_REDUCERS = _reducers(reductions.reduce_storage, reductions.reduce_tensor, None)

# What the reducers of these packages return travels in the pickle, out of band, or through the resource sharer.
_SELF_CONTAINED = ("torch", "multiprocessing")

_sharer: Any = resource_sharer._resource_sharer  # type: ignore[attr-defined]

# Short names for `leaves_are_ours`, which runs once per batch.
_Tensor, _UntypedStorage, _ndarray = torch.Tensor, torch.UntypedStorage, np.ndarray
_reducer_of = _extra_reducers.get
_torch_reduce_tensor, _torch_reduce_storage = _TORCH_REDUCERS[_Tensor], _TORCH_REDUCERS[_UntypedStorage]


def leaves_are_ours() -> bool:
    """Returns True if a plain batch needs no pickle: no program has registered reducers for tensors or arrays."""
    return (
        _reducer_of(_Tensor) is _torch_reduce_tensor
        and _reducer_of(_UntypedStorage) is _torch_reduce_storage
        and _reducer_of(_ndarray) in (None, reduce_shared_array)
        and _ndarray not in copyreg.dispatch_table
    )


def _is_foreign(reducer: Callable[[Any], Any]) -> bool:
    """Returns True if the results of a reducer may be readable only while the process that made them is alive."""
    package = str(getattr(reducer, "__module__", None)).partition(".")[0]
    return package not in _SELF_CONTAINED or getattr(reducer, "__name__", "").endswith("reduce_event")


# Reducers that were registered when this module was imported, except foreign ones.
_known_reducers = {kind: reducer for kind, reducer in _extra_reducers.items() if not _is_foreign(reducer)}


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    # torch's reducer drops the conjugate and negative bits, so the values would arrive wrong.
    if tensor.layout == torch.strided and (tensor.is_conj() or tensor.is_neg()) and tensor.is_leaf:
        return _rebuild_leaf, (type(tensor), tensor.detach().resolve_conj().resolve_neg(), tensor.requires_grad)
    if tensor.is_quantized:
        # torch's reducer for multiprocessing loses the quantizer; its reducer for files keeps it.
        return tensor._reduce_ex_internal(2)
    return reductions.reduce_tensor(tensor)


def _rebuild_times(numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return numbers.view(dtype)


def _reduce_array(array: np.ndarray) -> Any:
    if array.nbytes < INLINE_LIMIT:
        # Protocol 5 would make it a view of a buffer. With torch's loader an array owns its memory.
        return array.__reduce_ex__(4)
    # With torch's loader arrays arrive in C or F order, in native byte order, and writable. An out-of-band buffer would
    # keep the array's own byte order and flags.
    dtype = array.dtype
    native = dtype if dtype.isnative or dtype.names else dtype.newbyteorder("=")
    if native is not dtype or not (array.flags.writeable and array.flags.forc):
        array = array.astype(native, order="A")
    if native.kind in "mM":
        # NumPy exports no buffers of datetimes and timedeltas.
        return _rebuild_times, (array.view(np.int64), native)
    return array.__reduce_ex__(_PROTOCOL)


def _rebuild_storage(buffer: Any) -> torch.UntypedStorage:
    if len(buffer) == 0:
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    if storage.device.type != "cpu":
        return reductions.reduce_storage(storage)
    return _rebuild_storage, (pickle.PickleBuffer(_bytes_of(storage).numpy()),)  # type: ignore[arg-type]


# Reducers that put everything into the pickle itself.
_ALONE = _reducers(_reduce_storage, _reduce_tensor, _reduce_array)


def _rebuild_object(obj: Any) -> Any:
    return obj


def _rebuild_storage_of(content: torch.Tensor) -> torch.UntypedStorage:
    storage = content.untyped_storage()
    if storage.nbytes() != content.numel():  # it arrived inside a larger storage
        storage = content.clone().untyped_storage()
    return storage


def _rebuild_leaf(cls: type, tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    if cls is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def _rebuild_view(content: torch.Tensor, *other_args: Any) -> torch.Tensor:
    layout = content._typed_storage(), content.storage_offset(), content.size(), content.stride()
    return torch._utils._rebuild_tensor_v2(*layout, *other_args)


def _reduce_subclass(tensor: torch.Tensor) -> Any:
    """Returns torch's reduction of an instance of a subclass, with a view of the tensor's data instead of its entire
    storage."""
    reduced = tensor.__reduce_ex__(_PROTOCOL)
    match reduced:
        case (torch._tensor._rebuild_from_type_v2, (torch._utils._rebuild_tensor_v2, cls, (storage, *args), state)):
            content = torch._utils._rebuild_tensor(storage, *args[:3])
            if is_plain_leaf(content):
                return reduced[0], (_rebuild_view, cls, (content, *args[3:]), state)
    return reduced


# Reduces an object as the pickler would if the table had no entry for its type.
_reduce_by_itself: Callable[[Any], Any] = operator.methodcaller("__reduce_ex__", _PROTOCOL)


class _Table(dict[type, Callable[[Any], Any]]):
    """The reducers by type. The first instance of a type adds an entry: ``_reduce_subclass`` for a subclass of
    ``torch.Tensor``, and the default reducer for any other type. The entry saves a call for each later instance."""

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        if issubclass(kind, type):
            raise KeyError(kind)
        is_subclass = issubclass(kind, torch.Tensor) and kind.__reduce_ex__ is torch.Tensor.__reduce_ex__
        return self.setdefault(kind, _reduce_subclass if is_subclass else _reduce_by_itself)


class _OutOfBand:
    """The out-of-band objects of a pickle, in the order of their tokens.

    A token is a writable buffer of one byte. ``pickle.loads`` receives the objects and replaces the tokens with them,
    in order.
    """

    def __init__(self, views: bool) -> None:
        self.objects: list[Any] = []
        # True if unpickling needs this process to be alive, for a descriptor or device memory.
        self.tied = False
        self._by_token: dict[int, Any] = {}
        self._views = views

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Handles a buffer as the pickler's ``buffer_callback``. Returns False if the buffer travels out of band."""
        token = id(buffer)
        if token in self._by_token:
            self.objects.append(self._by_token.pop(token))
            return False
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous
            return True
        if raw.nbytes < INLINE_LIMIT:
            return True
        # The list marks a buffer; an array that is not in a list arrives as an array.
        self.objects.append([np.frombuffer(raw, np.uint8)])
        return False

    def recording_use(self, reducer: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wraps a foreign reducer so that its use sets ``tied``."""

        def reduce(obj: Any) -> Any:
            self.tied = True
            return reducer(obj)

        return reduce

    def _token(self, rebuild: Callable[..., Any], obj: Any) -> Any:
        token = pickle.PickleBuffer(bytearray(1))
        self._by_token[id(token)] = obj
        return rebuild, (token,)

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type != "cpu":
            return reductions.reduce_storage(storage)
        return self._token(_rebuild_storage_of, _bytes_of(storage))

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if self._views:
            if is_plain_leaf(tensor):
                return self._token(_rebuild_object, tensor)
            # Apart from the data, torch's reducer keeps only the class and `requires_grad` of such a tensor.
            needs_grad = tensor.requires_grad and tensor.is_leaf
            if needs_grad or type(tensor) is torch.nn.Parameter:
                content = tensor.detach()
                if is_plain_leaf(content):
                    if needs_grad:
                        torch.utils.hooks.warn_if_has_hooks(tensor)
                    return _rebuild_leaf, (type(tensor), content, needs_grad)
        self.tied |= tensor.device.type not in ("cpu", "meta")
        return _reduce_tensor(tensor)

    def _reduce_array(self, array: np.ndarray) -> Any:
        return self._token(_rebuild_object, array) if is_plain_leaf(array) else _reduce_array(array)


def _registered() -> _Reducers:
    """Returns the reducers that torch and programs have registered, without the one for arrays of ``rustloader.share``:
    in a batch, such arrays are pickled like any others."""
    return {kind: reducer for kind, reducer in _extra_reducers.items() if reducer is not reduce_shared_array}


def _table(reducers: _Reducers) -> _Reducers:
    table = {**copyreg.dispatch_table, **_registered()}
    replacing = {kind: reducer for kind, reducer in reducers.items() if table.get(kind) is _TORCH_REDUCERS[kind]}
    if torch.UntypedStorage not in replacing:
        # The program has its own reducer for storages, and only torch's reducer for tensors calls it.
        replacing.pop(torch.Tensor, None)
        replacing.pop(torch.nn.Parameter, None)
    table.update(replacing)
    return table


def _pickle(value: Any, table: _Reducers, callback: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    out = io.BytesIO()
    pickler = by_name.pickler(out, protocol=_PROTOCOL, buffer_callback=callback)
    pickler.dispatch_table = table
    pickler.dump(value)
    return out.getvalue()


def dumps(value: Any, *, views: bool = True) -> tuple[bytes, list[Any], bool]:
    """Pickles a batch. With ``views=False`` tensors travel as entire storages, which always works.

    Returns the pickle, its out-of-band objects, and whether unpickling needs this process to be alive.
    """
    out_of_band = _OutOfBand(views)
    table = _table(_reducers(out_of_band._reduce_storage, out_of_band._reduce_tensor, out_of_band._reduce_array))
    if views and table.get(torch.Tensor) == out_of_band._reduce_tensor:
        table = _Table(table)
    if _extra_reducers != _known_reducers:
        for kind, reducer in _registered().items():
            if _known_reducers.get(kind) is not reducer and kind in table and _is_foreign(reducer):
                table[kind] = out_of_band.recording_use(reducer)
    key_before = _sharer._key
    payload = _pickle(value, table, out_of_band.take)
    return payload, out_of_band.objects, out_of_band.tied or _sharer._key != key_before


def loads(payload: bytes, objects: Sequence[Any]) -> Any:
    """Unpickles the result of :func:`dumps`."""
    return pickle.loads(payload, buffers=[memoryview(obj[0]) if type(obj) is list else obj for obj in objects])


def dumps_alone(value: Any) -> bytes:
    """Pickles an error or an index batch, with everything in the pickle itself."""
    return _pickle(value, _table(_ALONE))


def dumps_index(index: Any) -> bytes:
    """Pickles an index batch. If that fails, a note on the error names the sampler as the source of the batch."""
    try:
        return dumps_alone(index)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        note = "The DataLoader's sampler or batch_sampler yielded an index that cannot be pickled."
        arguments.add_first_note(error, note)
        raise


def dumps_error(error: ExceptionWrapper) -> bytes:
    """Pickles a worker's error, or a RuntimeError with the same message if the error's class cannot be pickled."""
    try:
        return dumps_alone(error)
    except Exception as reason:
        where = f"{error.where} (pid {os.getpid()}; its class cannot be pickled: {reason})"
        substitute = ExceptionWrapper((RuntimeError, RuntimeError(), None), where=where)
        substitute.__dict__ |= {"exc_msg": error.exc_msg, "note": getattr(error, "note", None)}
        return dumps_alone(substitute)
