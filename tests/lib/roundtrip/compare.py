"""A deep record of a value, and the differences between two records."""

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import mmap
import operator
import pathlib
import struct
import types
import uuid

import numpy as np
import torch

from roundtrip import objects
from roundtrip.build import NotMade
from roundtrip.memory import alone, digest, leaf_of, sharing

__all__ = ["Difference", "Record", "differences"]

# Compared with ==.
SIMPLE = (
    bool,
    int,
    str,
    bytes,
    fractions.Fraction,
    pathlib.PurePath,
    datetime.date,
    datetime.timedelta,
    uuid.UUID,
    range,
    slice,
    enum.Enum,
    NotMade,
    torch.Size,
    torch.device,
)
# Compared by identity, as == does.
UNIQUE = (
    type(None),
    type(...),
    type(NotImplemented),
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    torch.dtype,
    torch.layout,
    torch.memory_format,
)
# Python may create or reuse these objects as it likes.
NO_IDENTITY = (int, float, *UNIQUE)

VIEWS = {
    float: lambda v: struct.pack("<d", v),
    complex: lambda v: struct.pack("<dd", v.real, v.imag),
    bytearray: bytes,
    array.array: lambda v: (v.typecode, v.tobytes()),
    decimal.Decimal: repr,
    operator.itemgetter: repr,
    np.dtype: lambda v: dtype_facts(v),
    np.generic: lambda v: (dtype_facts(v.dtype), array_content(np.asarray(v))),
    mmap.mmap: lambda v: "a map",
}


@dataclasses.dataclass(frozen=True)
class Difference:
    path: str
    fact: str
    actual: object
    reference: object

    def __str__(self):
        return f"{self.path or 'the root'}: {self.fact}: got {self.actual!r}, expected {self.reference!r}"


class Record:
    """What can be observed of a value, as {path: {fact: value}}, and its leaves."""

    def __init__(self, value):
        self.facts = {}
        self.objects = {}
        self.leaves = []
        self._seen = {}
        self._storages = {}
        todo = [("", value)]
        while todo:
            path, value = todo.pop()
            todo.extend(reversed(self._visit(path, value)))
        tensors = [leaf for leaf in self.leaves if leaf.kind == "tensor"]
        for leaf, shared in zip(tensors, sharing(tensors), strict=True):
            self.facts[leaf.path]["shares"] = shared
        if len(tensors) < len(self.leaves):
            for leaf, apart in zip(self.leaves, alone(self.leaves), strict=True):
                if leaf.kind == "array":
                    self.facts[leaf.path]["alone"] = apart

    def _visit(self, path, value):
        """Records the facts of one object; returns the values in it, which are visited next."""
        self.objects[path] = value  # keeps it alive, so that no other object gets its address
        if not isinstance(value, NO_IDENTITY):
            first = self._seen.setdefault(id(value), path)
            if first != path:
                self.facts[path] = {"same as": first}
                return []
        facts = self.facts[path] = {"type": type(value)}
        children = self._describe(path, value, facts)
        return [(f"{path}{name}", child) for name, child in children]

    def _describe(self, path, value, facts):
        how = way_of(type(value))
        if how == "tensor":
            with torch._C.DisableTorchFunctionSubclass():
                return self._tensor(path, value, facts)
        if how == "storage":
            return self._storage(path, value, facts)
        if how == "array":
            return self._array(path, value, facts)
        if how == "simple":
            facts["value"] = value
            return (
                attributes(value)
                if type(value).__module__ == objects.__name__ and not isinstance(value, enum.Enum)
                else []
            )
        if how == "void":
            facts["dtype"] = dtype_facts(value.dtype)
            return object_items(np.asarray(value))
        if how == "container":
            return container(value, facts)
        facts["value"] = how(value)
        return []

    def _tensor(self, path, t, facts):
        children = [] if type(t).__module__.startswith("torch.nested") else attributes(t)
        if isinstance(t, torch.nn.parameter.UninitializedTensorMixin):
            facts |= {"dtype": t.dtype, "device": t.device, "requires_grad": t.requires_grad}
            return []
        facts |= {
            "dtype": t.dtype,
            "device": t.device,
            "layout": t.layout,
            "shape": tuple(t.shape) if not t.is_nested else None,
            "requires_grad": t.requires_grad,
            "is_leaf": t.is_leaf,
            "inference": t.is_inference(),
            "nested": t.is_nested,
        }
        if t.grad is not None:
            children.append((".grad", t.grad))
        if t.is_nested:
            return children + nested_parts(t, facts)
        if t.layout != torch.strided:
            return children + sparse_parts(t, facts)
        facts |= {
            "stride": t.stride(),
            "storage_offset": t.storage_offset(),
            "is a view": t._base is not None,
            "conj": t.is_conj(),
            "neg": t.is_neg(),
        }
        if t.device.type == "meta":
            facts["nbytes"] = t.untyped_storage().nbytes()
            return children
        facts["in shared memory"] = t.is_shared()
        self._on_storage(path, t.untyped_storage(), facts)
        if t.is_quantized:
            facts["quantizer"] = quantizer(t)
            return [*children, (".storage", t.untyped_storage())]
        leaf = leaf_of(path, t)
        if leaf is not None:
            self.leaves.append(leaf)
        resolved = t.resolve_conj().resolve_neg()
        leaf = leaf if resolved is t else leaf_of(path, resolved)
        facts["content"] = digest(leaf.content) if leaf else ""
        return children

    def _on_storage(self, path, storage, facts):
        facts["nbytes"] = storage.nbytes()
        facts["storage of"] = self._storages.setdefault(storage._cdata, path)

    def _storage(self, path, storage, facts):
        facts["device"] = storage.device
        if storage.device.type != "cpu":
            facts["nbytes"] = storage.nbytes()
            return []
        self._on_storage(path, storage, facts)
        leaf = leaf_of(path, storage)
        facts["content"] = digest(leaf.content) if leaf else ""
        if leaf:
            self.leaves.append(leaf)
        return attributes(storage)

    def _array(self, path, a, facts):
        facts |= {
            "dtype": dtype_facts(a.dtype),
            "shape": a.shape,
            "strides": a.strides,
            "writeable": a.flags.writeable,
            "aligned": a.flags.aligned,
            "contiguous": (a.flags.c_contiguous, a.flags.f_contiguous),
            "owns": (a.flags.owndata, a.base is None),
        }
        leaf = leaf_of(path, a)
        if leaf is not None:
            self.leaves.append(leaf)
        children = attributes(a)
        if isinstance(a, np.ma.MaskedArray):
            children = [(f".{name}", getattr(a, name)) for name in ("_mask", "_fill_value", "_hardmask", "_sharedmask")]
        plain = a.view(np.ndarray)
        if a.dtype.hasobject:
            return children + object_items(plain)
        facts["content"] = array_content(plain)
        return children


@functools.cache
def way_of(kind):
    """How objects of a type are inspected."""
    ways = {torch.Tensor: "tensor", torch.UntypedStorage: "storage", np.ndarray: "array", np.void: "void", **VIEWS}
    for base, way in ways.items():
        if issubclass(kind, base):
            return way
    return "simple" if issubclass(kind, SIMPLE + UNIQUE) else "container"


def attributes(value):
    """What an object has in its __dict__ and in its slots."""
    items = [(f".{name}", item) for name, item in getattr(value, "__dict__", {}).items()]
    for kind in type(value).__mro__:
        if kind.__module__ in (objects.__name__, "sample_data"):
            slots = kind.__dict__.get("__slots__", ())
            items += [(f".{name}", getattr(value, name)) for name in slots if hasattr(value, name)]
    return items


def container(value, facts):
    """The parts of a value that is not a tensor, an array or an atom; adds its facts."""
    children = attributes(value)
    if isinstance(value, dict):
        for i, (key, item) in enumerate(value.items()):
            children += [(f".key{i}", key), (f"[{i}]", item)]
        if isinstance(value, collections.defaultdict):
            facts["default_factory"] = value.default_factory
    elif isinstance(value, (list, tuple, collections.deque)):
        children += [(f"[{i}]", item) for i, item in enumerate(value)]
        facts["maxlen"] = getattr(value, "maxlen", None)
    elif isinstance(value, (set, frozenset)):
        facts["value"] = sorted(map(key_facts, value))
    elif isinstance(value, BaseException):
        children.append((".args", value.args))
    elif isinstance(value, torch.TypedStorage):
        facts["dtype"] = value.dtype
        children = [(".untyped", value._untyped_storage)]
    elif isinstance(value, functools.partial):
        children += [(".func", value.func), (".args", value.args)]
    elif not hasattr(value, "__dict__") and not hasattr(type(value), "__slots__"):
        facts["value"] = value  # equal to nothing but itself
    return children


def key_facts(value):
    """A text that distinguishes the members of sets."""
    if isinstance(value, (tuple, frozenset)):
        parts = [key_facts(part) for part in value]
        return repr((type(value), sorted(parts) if isinstance(value, frozenset) else parts))
    if isinstance(value, float):
        return struct.pack("<d", value).hex()
    return repr((type(value), value))


def dtype_facts(dtype):
    fields = None
    if dtype.names:
        fields = tuple((name, dtype_facts(dtype.fields[name][0]), *dtype.fields[name][1:]) for name in dtype.names)
    inner = None if dtype.subdtype is None else (dtype_facts(dtype.subdtype[0]), dtype.subdtype[1])
    metadata = None if dtype.metadata is None else repr(dict(dtype.metadata))
    facts = (dtype.char, dtype.str, dtype.isnative, dtype.alignment, dtype.isalignedstruct, dtype.type)
    return (*facts, fields, inner, metadata)


def array_content(a):
    if a.dtype.names:
        return tuple(array_content(a[name]) for name in a.dtype.names)
    content = a.tobytes()
    if a.dtype.char in "gG":  # ten of the sixteen bytes hold the value
        content = np.frombuffer(content, np.uint8).reshape(-1, 16)[:, :10].tobytes()
    return digest(content)


def object_items(a):
    if a.dtype.names:
        return [(f".{name}{path}", item) for name in a.dtype.names for path, item in object_items(a[name])]
    if a.dtype != object:
        return [("", array_content(a))]
    return [(f"[{i}]", item) for i, item in enumerate(a.reshape(-1).tolist())]


def nested_parts(t, facts):
    if t.layout == torch.jagged:
        names, context = t.__tensor_flatten__()
        facts["ragged"] = (context["ragged_idx"], context["requires_grad"])
        return [(f".{name}", getattr(t, name)) for name in names]
    names = ["_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets", "values"]
    return [(f".{name}", getattr(t, name)()) for name in names]


def sparse_parts(t, facts):
    if t.layout == torch.sparse_coo:
        facts["coo"] = (t.is_coalesced(), t.sparse_dim(), t.dense_dim())
        return [(".indices", t._indices()), (".values", t._values())]
    rows = t.layout in (torch.sparse_csr, torch.sparse_bsr)
    names = ["crow_indices", "col_indices"] if rows else ["ccol_indices", "row_indices"]
    return [(f".{name}", getattr(t, name)()) for name in [*names, "values"]]


def quantizer(t):
    try:
        t.qscheme()
    except RuntimeError:
        return None
    if t.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return t.qscheme(), t.q_scale(), t.q_zero_point()
    return (
        t.qscheme(),
        t.q_per_channel_scales().tolist(),
        t.q_per_channel_zero_points().tolist(),
        t.q_per_channel_axis(),
    )


def differences(actual, reference):
    """The differences between rustloader's record and torch's."""
    result = []
    for path in dict.fromkeys([*reference.facts, *actual.facts]):
        a, b = actual.facts.get(path), reference.facts.get(path)
        if a is None or b is None:
            result.append(Difference(path, "present", a is not None, b is not None))
            continue
        for fact in dict.fromkeys([*b, *a]):
            if not equal(a.get(fact), b.get(fact)):
                result.append(Difference(path, fact, a.get(fact), b.get(fact)))
    return result


def equal(a, b):
    return type(a) is type(b) and a == b
