"""Compares batches leaf by leaf, bit for bit."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from rustloader.system.formatting import type_name


class Leaf(NamedTuple):
    """An indivisible part of a batch, or the type of a container."""

    path: str
    kind: str
    value: Any


def leaves(value: Any, path: str = "batch", ancestors: tuple[int, ...] = ()) -> Iterator[Leaf]:
    """Yields the leaves of a batch in order. A container yields a leaf with its type and length, then its parts."""
    if id(value) in ancestors:
        yield Leaf(path, "a reference to an enclosing container", None)
        return
    enclosing = (*ancestors, id(value))
    if isinstance(value, torch.Tensor):
        yield Leaf(path, _tensor_kind(value), value)
        if type(value) is not torch.Tensor and vars(value):
            yield from leaves(vars(value), f"{path}.__dict__", enclosing)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        order = "Fortran" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        yield Leaf(path, f"{type_name(value)} {value.dtype} {list(value.shape)}, {order} order", value)
    elif isinstance(value, Mapping):
        yield Leaf(path, f"{type_name(value)} of {len(value)}", None)
        for key in value:
            yield from leaves(value[key], f"{path}[{key!r}]", enclosing)
    elif isinstance(value, (list, tuple)):
        yield Leaf(path, f"{type_name(value)} of {len(value)}", None)
        for k, item in enumerate(value):
            yield from leaves(item, f"{path}[{k}]", enclosing)
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes, bytearray)):
        yield Leaf(path, type_name(value), value)
    elif isinstance(value, type) or not (dataclasses.is_dataclass(value) or hasattr(value, "__dict__")):
        yield Leaf(path, type_name(value), value)
    elif dataclasses.is_dataclass(value):
        yield Leaf(path, type_name(value), None)
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name, None), f"{path}.{field.name}", enclosing)
    else:
        yield Leaf(path, type_name(value), None)
        yield from leaves(vars(value), f"{path}.__dict__", enclosing)


def summary(batch: Any) -> list[tuple[str, str, bytes]]:
    """Returns the path, kind and digest of each leaf. Equal batches have equal summaries."""
    return [
        (leaf.path, leaf.kind, hashlib.blake2b(_content(leaf.value), digest_size=16).digest()) for leaf in leaves(batch)
    ]


def nbytes(batch: Any) -> int:
    """Returns the size in bytes of a batch's tensors, arrays and bytes objects."""
    return sum(_nbytes(leaf.value) for leaf in leaves(batch))


def difference(theirs: Any, ours: Any) -> str:
    """Describes the first difference between two batches."""
    first, second = list(leaves(theirs)), list(leaves(ours))
    for a, b in zip(first, second, strict=False):
        if a.path != b.path:
            return f"torch has {a.path} where rustloader has {b.path}"
        if a.kind != b.kind:
            return f"{a.path}: torch {a.kind}, rustloader {b.kind}"
        if _content(a.value) != _content(b.value):
            return f"{a.path} ({a.kind}): {_values(a.value, b.value)}"
    if len(first) != len(second):
        return f"torch has {len(first)} parts, rustloader {len(second)}"
    return "the batches are equal now; one has changed since the first comparison"


def _tensor_kind(tensor: torch.Tensor) -> str:
    text = f"{type_name(tensor)} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if tensor.layout != torch.strided:
        text += f", {str(tensor.layout).removeprefix('torch.')}"
    elif tensor.stride() != torch.empty(tensor.shape, device="meta").stride():
        text += f", strides {list(tensor.stride())}"
    if tensor.device.type != "cpu":
        text += f", on {tensor.device}"
    return text + (", requires grad" if tensor.requires_grad else "")


def _content(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return _tensor_bytes(_plain(value))
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if value is None or isinstance(value, (bool, int, complex, str)):
        return repr(value).encode(errors="surrogatepass")
    if isinstance(value, float):
        return value.hex().encode()
    try:
        return pickle.dumps(value)
    except Exception:
        return repr(type(value)).encode()  # does not occur in a worker's batch, which has been pickled


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.layout == torch.strided else len(_tensor_bytes(_plain(value)))
    if isinstance(value, np.ndarray):
        return value.nbytes
    return len(value) if isinstance(value, (bytes, bytearray)) else 0


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _values(a: Any, b: Any) -> str:
    if isinstance(a, torch.Tensor) and a.layout == torch.strided and not a.is_quantized:
        a, b = (_plain(x).cpu().contiguous() for x in (a, b))
        rows = [np.frombuffer(_tensor_bytes(x), np.uint8).reshape(x.numel(), -1) for x in (a, b)]
        differ = np.flatnonzero((rows[0] != rows[1]).any(axis=1))
        at = [int(k) for k in np.unravel_index(differ[0], tuple(a.shape))]
        one, other = (x.flatten()[differ[0]].item() for x in (a, b))
        return f"{len(differ)} of {a.numel()} elements differ, the first at {at}: torch {one!r}, rustloader {other!r}"
    return f"torch {_short(a)}, rustloader {_short(b)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
