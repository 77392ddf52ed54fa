"""Operations that put values into containers and objects."""

import collections
import functools
import types

import torch
from sample_data import Config, Row

from roundtrip import objects

__all__ = ["OPERATIONS", "TIES"]


def pairs(parts):
    return list(zip(parts[::2], parts[1::2], strict=False))


def padded(parts, count):
    return [*parts, None, None, None][:count]


def attributes(result, parts, names=("first", "second")):
    for name, part in zip(names, parts, strict=False):
        setattr(result, name, part)
    return result


def defaultdict(*parts):
    return collections.defaultdict(list, pairs(parts))


def subclass(kind, *parts):
    return attributes(kind(parts[1:]), parts[:1], ["more"])


def dict_subclass(*parts):
    return attributes(objects.DictWithMore(pairs(parts)), parts[1:2], ["more"])


def module(*parts):
    """A torch module with parameters, buffers and other attributes."""
    result = torch.nn.Module()
    for i, part in enumerate(parts):
        if isinstance(part, torch.nn.Parameter):
            result.register_parameter(f"p{i}", part)
        elif isinstance(part, torch.Tensor):
            result.register_buffer(f"b{i}", part)
        else:
            setattr(result, f"a{i}", part)
    return result


def packed(*parts):
    return torch.nn.utils.rnn.PackedSequence(parts[0].flatten(), torch.tensor([1] * parts[0].numel()))


def exception(*parts):
    return attributes(ValueError(*parts), parts[:1], ["note"])


def deep(kind, depth, value):
    for _ in range(depth):
        value = {"list": lambda v: [v], "tuple": lambda v: (v,), "dict": lambda v: {"k": v}}[kind](value)
    return value


def tie(container, value):
    """Puts a value into an existing container, which may create a cycle."""
    for kind, put in TIES.items():
        if isinstance(container, kind):
            put(container, value)
            return container
    raise TypeError(type(container))


TIES = {
    list: lambda c, v: c.append(v),
    collections.deque: lambda c, v: c.append(v),
    dict: lambda c, v: c.__setitem__("tie", v),
    objects.Plain: lambda c, v: setattr(c, "tie", v),
    objects.Slotted: lambda c, v: setattr(c, "first", v),
    objects.Stateful: lambda c, v: c.parts.append(v),
    types.SimpleNamespace: lambda c, v: setattr(c, "tie", v),
    objects.Record: lambda c, v: setattr(c, "more", v),
    objects.Labelled: lambda c, v: setattr(c, "label", v),
}

OPERATIONS = {
    "list": lambda *parts: list(parts),
    "tuple": lambda *parts: tuple(parts),
    "dict": lambda *parts: dict(pairs(parts)),
    "set": lambda *parts: set(parts),
    "frozenset": lambda *parts: frozenset(parts),
    "namedtuple": lambda *parts: objects.Pair(*padded(parts, 2)),
    "dataclass": lambda *parts: objects.Record(*padded(parts, 3)),
    "frozen_dataclass": lambda *parts: objects.Frozen(parts),
    "slotted_dataclass": lambda *parts: objects.SlottedRecord(*padded(parts, 2)),
    "OrderedDict": lambda *parts: collections.OrderedDict(pairs(parts)),
    "defaultdict": defaultdict,
    "Counter": lambda *parts: collections.Counter(parts),
    "ChainMap": lambda *parts: collections.ChainMap(*[p for p in parts if isinstance(p, dict)]),
    "UserDict": lambda *parts: collections.UserDict(pairs(parts)),
    "deque": lambda *parts: collections.deque(parts),
    "bounded_deque": lambda *parts: collections.deque(parts, maxlen=len(parts)),
    "mapping": lambda *parts: Config(pairs(parts)),
    "sequence": lambda *parts: Row(parts),
    "plain": lambda *parts: attributes(objects.Plain(), parts),
    "slotted": lambda *parts: attributes(objects.Slotted(), parts),
    "reduced": lambda *parts: objects.Reduced(*parts),
    "stateful": lambda *parts: objects.Stateful(*parts),
    "list_subclass": lambda *parts: subclass(objects.ListWithMore, *parts),
    "dict_subclass": dict_subclass,
    "namespace": lambda *parts: types.SimpleNamespace(**{f"n{i}": part for i, part in enumerate(parts)}),
    "exception": exception,
    "call": lambda *parts: functools.partial(objects.float_from_bits, *parts),
    "module": module,
    "packed": packed,
    "many": lambda part: [part] * 300,
    "deep": lambda value, kind, depth: deep(kind, depth, value),
    "tie": tie,
}
