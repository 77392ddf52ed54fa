"""Turns what a user can observe (batches, exceptions, warnings, loaders) into plain lists that can be compared."""

import array
import collections
import dataclasses
import os
import re

import numpy as np
import torch
import torch.utils.data
from roundtrip.intended import as_by_protocol_4
from support import type_in_torch
from torch.utils.data import dataloader as torch_dataloader

from .recorder import crc

ATOMS = (type(None), bool, int, complex, str, bytes, type(Ellipsis), type(NotImplemented))
TEXTS_AND_NUMBERS = (str, bytes, int, float, complex)
LOADER_ATTRIBUTES = (
    "batch_size drop_last num_workers prefetch_factor pin_memory pin_memory_device timeout persistent_workers in_order "
    "_dataset_kind _auto_collation _IterableDataset_len_called"
).split()
ITERATOR_ATTRIBUTES = (
    "_num_yielded _base_seed _IterableDataset_len_called _num_workers _prefetch_factor _in_order _persistent_workers "
    "_pin_memory _pin_memory_device _timeout _drop_last _auto_collation _dataset_kind _world_size _rank "
    "_profile_name _shared_seed _pg _shutdown"
).split()


def short(text):
    """The text, or the length and checksum of a long one."""
    return text if len(text) <= 1000 else [len(text), crc(text.encode())]


def name_of(cls):
    return f"{cls.__module__}.{cls.__qualname__}"


def value(batch):
    """A batch: types, dtypes, shapes, strides, bytes, which values are one object, and which tensors share elements."""
    return _Walk().batch(batch)


def tensors(batch):
    """The strided tensors of a batch."""
    walk = _Walk()
    walk.walk(batch)
    return walk.leaves


class _Walk:
    def __init__(self):
        self.seen = {}  # id -> number of the object
        self.kept = []  # the objects, so that their ids stay unique
        self.leaves = []  # strided tensors

    def batch(self, batch):
        described = self.walk(batch)
        shared = self.shared()
        return [described, shared] if shared else [described]

    def walk(self, v):
        kind = type(v)
        if kind in ATOMS:
            return [kind.__name__, short(repr(v))]
        if kind is float:
            return ["float", v.hex()]
        if id(v) in self.seen:
            return ["again", self.seen[id(v)]]
        if not (kind is tuple and not v):
            self.seen[id(v)] = len(self.seen)
            self.kept.append(v)
        return [name_of(kind), *self.parts(v)]

    def parts(self, v):
        if isinstance(v, torch.Tensor):
            return self.tensor(v)
        if isinstance(v, np.ndarray):
            return self.array(v)
        if isinstance(v, np.generic):
            return [str(v.dtype), v.tobytes().hex()]
        if isinstance(v, torch.UntypedStorage):
            return [v.nbytes(), crc(bytes(v.tolist()))]
        if isinstance(v, type) or callable(v):
            return [getattr(v, "__qualname__", normal(repr(v)))]
        if isinstance(v, TEXTS_AND_NUMBERS):
            base = next(kind for kind in TEXTS_AND_NUMBERS if isinstance(v, kind))
            return [short(base.__repr__(v)), self.attributes(v)]
        if isinstance(v, (bytearray, memoryview)):
            return [short(bytes(v).hex())]
        if isinstance(v, (set, frozenset)):
            return sorted((self.walk(x) for x in v), key=repr)
        if isinstance(v, BaseException):
            return [self.walk(list(v.args)), self.attributes(v)]
        if dataclasses.is_dataclass(v):
            return [[f.name, self.walk(getattr(v, f.name))] for f in dataclasses.fields(v)]
        if isinstance(v, (dict, collections.UserDict)):
            extra = [repr(v.default_factory)] if isinstance(v, collections.defaultdict) else []
            return [*extra, [[self.walk(k), self.walk(x)] for k, x in v.items()], self.attributes(v)]
        if isinstance(v, (list, tuple, collections.deque)):
            return [[self.walk(x) for x in v], *self.attributes(v)]
        if isinstance(v, array.array):
            return [v.typecode, short(v.tobytes().hex())]
        if hasattr(v, "__dict__"):
            return self.attributes(v)
        return [normal(repr(v))]

    def attributes(self, v):
        return [[k, self.walk(x)] for k, x in sorted(getattr(v, "__dict__", {}).items())]

    def tensor(self, t):
        more = self.attributes(t)
        if t.is_nested:
            parts = t.unbind()
            return ["nested", str(t.dtype), t.requires_grad, [[list(x.shape), self.content(x)] for x in parts], more]
        facts = [str(t.dtype), str(t.device), list(t.shape), t.requires_grad, t.is_leaf, t._is_view(), more]
        plain = t.detach().as_subclass(torch.Tensor) if type(t) is not torch.Tensor else t.detach()
        if t.layout != torch.strided:
            return [str(t.layout), *facts, self.content(plain.to_dense())]
        self.leaves.append(plain)
        strides = list(plain.stride()) if plain.numel() else []
        return [
            *facts,
            {"leaf": len(self.leaves) - 1, "strides": strides, "compact": compact(plain.shape, strides)},
            self.content(plain),
        ]

    def content(self, t):
        t = t.contiguous().reshape(-1)
        return crc(t.view(torch.uint8).numpy().tobytes()) if t.numel() else 0

    def array(self, a):
        more = self.attributes(a)
        if type(a) is np.ndarray and not a.dtype.hasobject:
            a = as_by_protocol_4(a)
        order = "C" if a.flags.c_contiguous else "F" if a.flags.f_contiguous else "-"
        facts = [str(a.dtype.descr), list(a.shape), order, list(a.strides) if a.size else [], a.flags.writeable]
        # Large arrays from torch's loader have a base, too.
        facts += [a.base is None or a.nbytes >= 1000, more]
        if a.dtype.hasobject:
            return [*facts, [self.walk(x) for x in a.ravel().tolist()]]
        return [*facts, crc(a.tobytes())]

    def shared(self):
        """The pairs of tensors that share elements, with the offset of the second and the number of shared elements."""
        pairs = []
        spans = [(n, t.data_ptr(), _extent(t), t) for n, t in enumerate(self.leaves) if t.numel()]
        for k, (n, start, length, t) in enumerate(spans):
            for m, other_start, other_length, other in spans[:k]:
                if start < other_start + other_length and other_start < start + length:
                    common = np.intersect1d(_addresses(t), _addresses(other)).size
                    if common:
                        pairs.append([m, n, start - other_start, int(common)])
        return pairs


def _extent(t):
    return (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size()


def _addresses(t):
    at = np.zeros((), np.int64)
    for n, s in zip(t.shape, t.stride(), strict=True):
        at = np.add.outer(at, np.arange(n) * (s * t.element_size()))
    return at.ravel() + t.data_ptr()


def compact(shape, strides):
    """The strides without holes for the same order of dimensions; strides of 0 are kept."""
    dense, step = list(strides), 1
    if not strides:
        return dense
    for d in sorted(range(len(shape)), key=lambda d: (strides[d], shape[d])):
        if strides[d] != 0 and shape[d] > 1:
            dense[d] = step
            step *= shape[d]
    return dense


def normal(text):
    """A text with process IDs and addresses masked, and without the library's own frames."""
    text = re.sub(r"\bpid(\(s\))? [\d, ]+", r"pid\1 N", str(text))
    text = re.sub(r"0x[0-9a-f]{6,}", "0xN", text)
    # Since Python 3.14, notes of pickle's errors name the class of each object.
    text = re.sub(r"\b(?:torch\.utils\.data|rustloader)\.dataloader\.DataLoader\b", "DataLoader", text)
    return re.sub(r'  File "([^"]*)", line \d+, in (\S+)\n((?:    .*\n)*)', _frame, text)


def _frame(match):
    file, function, code = match.groups()
    if "/rustloader/" in file or file.endswith("utils/data/_utils/worker.py"):
        return ""
    return f"  {os.path.basename(file)} {function}: {code.strip().splitlines()[0] if code.strip() else ''}\n"


def error(e):
    """An exception: class, text, notes, cause; whatever a handler can inspect."""
    text = normal(e.args[0]) if e.args else ""
    try:
        shown = normal(e)
    except Exception as failed:
        shown = f"str() fails: {failed!r}"
    if isinstance(e, RecursionError):  # the number of frames depends on the caller
        text, shown = (t.splitlines()[:1] for t in (text, shown))
    # Leaves out the note that says what the worker was fetching, which torch does not add.
    notes = [normal(n) for n in getattr(e, "__notes__", []) if not re.match(r"Worker \d+ was fetching batch \d+", n)]
    described = [name_of(type_in_torch(e)), text, shown, notes]
    for link in (e.__cause__, None if e.__suppress_context__ else e.__context__):
        described.append(None if link is None else [name_of(type_in_torch(link)), normal(link)])
    return described


def warning(w):
    """A warning: category, text, and whether it points to user code or to a library."""
    file = w.filename
    place = "library" if "/torch/" in file or "/rustloader/" in file else "user"
    return [w.category.__name__, normal(w.message), place]


def loader(v):
    """A loader: the names of its attributes, the values of the plain ones, the types of the others."""
    values = [[name, repr(getattr(v, name))] for name in LOADER_ATTRIBUTES]
    types = [
        [name, name_of(type(getattr(v, name)))]
        for name in ("sampler", "batch_sampler", "collate_fn", "generator", "_index_sampler", "worker_init_fn")
    ]
    context = v.multiprocessing_context
    return [sorted(vars(v)), values, types, context and context.get_start_method()]


def iterator(v, loader=None):
    """An iterator: its class, its attributes, and which of them are also its loader's."""
    values = [[name, repr(getattr(v, name, "absent"))] for name in ITERATOR_ATTRIBUTES]
    same = loader is not None and [
        getattr(v, "_" + name, None) is getattr(loader, name)
        for name in ("dataset", "collate_fn", "worker_init_fn", "index_sampler")
        if hasattr(loader, name)
    ]
    bases = (torch_dataloader._BaseDataLoaderIter, torch_dataloader._MultiProcessingDataLoaderIter)
    return [type(v).__name__, [isinstance(v, base) for base in bases], values, same, iter(v) is v]
