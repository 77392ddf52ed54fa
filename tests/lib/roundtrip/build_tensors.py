"""Operations on tensors. Numbers that must lie in a range are taken modulo its size, so that any number is valid."""

import contextlib
import warnings

import numpy as np
import torch
from torch.utils.data import default_collate

from roundtrip.objects import Labelled, Pair, Tagged

__all__ = ["DTYPES", "OPERATIONS", "QUANTIZED", "numpy_apart"]


QUANTIZED = [n for n in ("quint8", "qint8", "qint32", "quint4x2", "quint2x4") if hasattr(torch, n)]


def _dtypes():
    """Names of the dtypes of which torch can create tensors here."""
    names = []
    for name, dtype in sorted(vars(torch).items()):
        if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}" and name not in QUANTIZED:
            with contextlib.suppress(RuntimeError, NotImplementedError, TypeError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.empty(4, dtype=dtype)
                names.append(name)
    return names


DTYPES = _dtypes()
NOISE = np.random.default_rng(1).integers(0, 256, 1 << 16, dtype=np.uint8)


def noise(nbytes, seed):
    """`nbytes` bytes generated from the seed."""
    return np.resize(np.roll(NOISE, -37 * seed), nbytes)


def fill(storage, seed, boolean=False):
    """Random bits for a storage: NaN payloads and denormal numbers among them."""
    content = noise(storage.nbytes(), seed)
    if boolean:
        content = content & 1
    if len(content):
        torch.empty(0, dtype=torch.uint8).set_(storage).numpy()[:] = content


def tensor(dtype, shape, seed):
    result = torch.empty(shape, dtype=getattr(torch, dtype))
    fill(result.untyped_storage(), seed, dtype == "bool")
    return result


def numbers(dtype, shape, seed):
    """Small integers, for operations that compute with them."""
    count = int(np.prod(shape))
    return torch.from_numpy((noise(count, seed) % 7).astype(np.int64)).to(getattr(torch, dtype)).reshape(shape)


# Views


def dim_of(t, dim):
    return dim % t.dim()


def cut(t, dim, start, stop, step):
    dim = dim_of(t, dim)
    size = t.size(dim) + 1
    return t[(slice(None),) * dim + (slice(start % size, stop % size or None, step % 4 + 1),)]


def narrow(t, dim, start, length):
    dim = dim_of(t, dim)
    start %= t.size(dim) + 1
    return t.narrow(dim, start, length % (t.size(dim) - start + 1))


def select(t, dim, i):
    return t.select(dim_of(t, dim), i % t.size(dim_of(t, dim)))


def permute(t, seed):
    return t.permute(*np.random.default_rng(seed).permutation(t.dim()).tolist())


def expand(t, n):
    return t.expand(n, *t.shape)


def expand_ones(t, n):
    """The first row, n times."""
    return t[:1].expand(n, *t.shape[1:])


def windows(t, size, step):
    flat = t.reshape(-1)
    return flat.unfold(0, size % max(1, flat.numel()) + 1, step + 1)


def as_strided(t, rows, columns, row, column, offset):
    """A view that may overlap itself."""
    room = t.untyped_storage().nbytes() // t.element_size()
    offset %= max(1, room - (rows - 1) * row - (columns - 1) * column)
    return t.as_strided((rows, columns), (row, column), offset)


def piece(t, how, n, i):
    pieces = t[:8].unbind(0) if how == "unbind" else t.split(max(n, t.size(0) // 8))
    return pieces[i % len(pieces)]


def channels_last(t):
    shaped = t.reshape(1, 1, 1, -1) if t.dim() < 4 else t.reshape(t.size(0), t.size(1), t.size(2), -1)
    return shaped.to(memory_format=torch.channels_last)


def channels_last_3d(t):
    return t.reshape(1, -1, 1, 2, 2).to(memory_format=torch.channels_last_3d)


# Tensors that are not plain


def differentiable(t):
    return t if t.is_floating_point() or t.is_complex() else t.to(torch.float32)


def parameter(t, requires_grad):
    return torch.nn.Parameter(differentiable(t) if requires_grad else t, requires_grad=requires_grad)


def with_grad(t):
    leaf = differentiable(t).detach().requires_grad_()
    leaf.grad = torch.ones_like(leaf)
    return leaf


def labelled(t, label):
    result = t.as_subclass(Labelled)
    result.label = label
    return result


def attributed(t, note):
    """A plain tensor with an attribute, which torch's loader drops."""
    t.note = note
    return t


def sparse(layout, seed, coalesced=True):
    dense = numbers("float32", (4, 6), seed)
    if layout == "coo":
        coo = dense.to_sparse()
        return coo.coalesce() if coalesced else torch.sparse_coo_tensor(coo.indices(), coo.values(), coo.shape)
    if layout == "hybrid":
        return numbers("int64", (3, 2, 4), seed).to_sparse(1)
    block = {"blocksize": (2, 2)} if layout in ("bsr", "bsc") else {}
    return getattr(dense, f"to_sparse_{layout}")(**block)


def nested(layout, sizes, seed):
    parts = [numbers("float32", (n, 3), seed + i) for i, n in enumerate(sizes)]
    return torch.nested.nested_tensor(parts, layout=getattr(torch, layout))


def quantized(dtype, n, channels, seed):
    kind = getattr(torch, dtype)
    if channels:
        scales, zeros = torch.arange(1, n + 1) / 8, torch.zeros(n, dtype=torch.int64)
        result = torch._empty_per_channel_affine_quantized((n, 4), scales=scales, zero_points=zeros, axis=0, dtype=kind)
    else:
        result = torch._empty_affine_quantized((n, 4), scale=0.5, zero_point=3, dtype=kind)
    fill(result.untyped_storage(), seed)
    return result


def inference(dtype, shape, seed):
    with torch.inference_mode():
        return tensor(dtype, shape, seed).clone()


def numpy_apart(t):
    """Like `t.numpy()`, over a copy of the memory."""
    copied = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage().clone(), t.storage_offset(), t.shape, t.stride())
    t.numpy()  # for its errors
    return copied.numpy()


def batch(samples, many, seed):
    """What default_collate returns for `many` samples; in a worker, it lies in shared memory."""
    return default_collate([sample(samples, seed + i) for i in range(many)])


def sample(spec, seed):
    """A sample: ("tensor", dtype, shape), the name of something smaller, or (container, parts)."""
    kind, *rest = spec
    if kind in SMALL:
        return SMALL[kind](seed)
    if kind in CONTAINERS:
        return CONTAINERS[kind](sample(part, seed + i) for i, part in enumerate(rest[0]))
    dtype, shape = rest
    if kind == "ragged":  # some of these cannot be stacked
        shape = (seed % 2 + 1, *shape)
    result = tensor(dtype, shape, seed)
    if kind == "transposed" and shape:
        return result.transpose(0, -1)
    return result.numpy() if kind == "array" else result


SMALL = {
    "int": int,
    "float": lambda seed: seed / 7,
    "str": lambda seed: "s" * (seed % 5),
    "np.float32": np.float32,
    "none": lambda seed: None,
}
CONTAINERS = {
    "tuple": tuple,
    "list": list,
    "dict": lambda parts: {str(i): part for i, part in enumerate(parts)},
    "namedtuple": lambda parts: Pair(*(*parts, 1, 2)[:2]),
}


def part(value, i):
    """The i-th value of a container."""
    if isinstance(value, dict):
        value = list(value.values())
    return value[i % len(value)] if isinstance(value, (list, tuple)) and value else value


OPERATIONS = {
    "tensor": tensor,
    "transpose": lambda t, a, b: t.transpose(dim_of(t, a), dim_of(t, b)),
    "permute": permute,
    "cut": cut,
    "narrow": narrow,
    "select": select,
    "expand": expand,
    "expand_ones": expand_ones,
    "windows": windows,
    "as_strided": as_strided,
    "piece": piece,
    "return_type": lambda t: torch.sort(t.reshape(-1)[:5].to(torch.float32)),
    "diagonal": lambda t: t.diagonal(),
    "flat": lambda t: t.reshape(-1),
    "unsqueeze": lambda t, dim: t.unsqueeze(dim % (t.dim() + 1)),
    "squeeze": lambda t: t.squeeze(),
    "flip": lambda t: t.flip(0),
    "alias": lambda t: t.view(t.shape),
    "view_dtype": lambda t, dtype: t.view(getattr(torch, dtype)),
    "clone": lambda t: t.clone(),
    "channels_last": channels_last,
    "channels_last_3d": channels_last_3d,
    "conj": lambda t: t.conj(),
    "neg": lambda t: t.conj().imag,
    "imag": lambda t: t.to(torch.complex64).imag,
    "parameter": parameter,
    "leaf": lambda t: differentiable(t).detach().requires_grad_(),
    "with_grad": with_grad,
    "labelled": labelled,
    "tagged": lambda t: t.as_subclass(Tagged),
    "attributed": attributed,
    "sparse": sparse,
    "nested": nested,
    "meta": lambda t: t.to("meta"),
    "quantized": quantized,
    "inference": inference,
    "shared": lambda t: t.clone().share_memory_(),  # a clone: share_memory_() frees the memory, which an array may view
    "storage": lambda t: t.untyped_storage(),
    "typed_storage": lambda t: t.storage(),
    "numpy": lambda t: t.numpy(),
    "sample": sample,
    "batch": batch,
    "part": part,
    "collated": lambda *samples: default_collate(list(samples)),
}
