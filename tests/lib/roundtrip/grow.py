"""Grows descriptions step by step."""

from roundtrip import weights
from roundtrip.build_arrays import ARRAY_DTYPES
from roundtrip.build_tensors import DTYPES, QUANTIZED
from roundtrip.objects import ATOMS, NASTY
from roundtrip.reduce import prune

__all__ = ["Forester", "sample_steps"]


def sample_of(draw, deep=2):
    """A specification for the operation "sample"; default_collate refuses some samples."""
    if deep and draw.chance(40):
        parts = tuple(sample_of(draw, deep - 1) for _ in range(draw.integer(0, 3)))
        return (draw.pick(["tuple", "dict", "list", "namedtuple"]), parts)
    kind = draw.weighted(weights.LEAVES)
    if kind in ("tensor", "array", "transposed", "ragged"):
        dtypes = weights.COMMON[:6] if kind == "array" else weights.COMMON
        return (
            kind,
            draw.pick(dtypes),
            draw.pick(weights.SAMPLE_SHAPES),
        )
    return (kind,)


def sample_steps(draw):
    sample, seed = sample_of(draw), draw.integer(0, 999)
    return tuple((("sample", (), sample, seed + i),) for i in range(draw.integer(1, 3)))


class Forester:
    """Grows a description step by step."""

    def __init__(self, draw):
        self.draw = draw
        self.steps = []
        self.kinds = []  # the kind of each step's value: "tensor", "array", "key", "batch", "container", ""
        self.loose = []  # steps that nothing holds yet
        self.plain = False

    def tree(self):
        self.plain = self.draw.chance(40)
        families = weights.PLAIN_FAMILIES if self.plain else weights.FAMILIES
        for _ in range(self.draw.integer(1, 14)):
            getattr(self, self.draw.weighted(families))()
        self.container(root=True)
        return prune(self.steps)

    def add(self, kind, operation, parts=(), *arguments):
        self.steps.append((operation, tuple(parts), *arguments))
        self.kinds.append(kind)
        self.loose.append(len(self.steps) - 1)
        return len(self.steps) - 1

    def some(self, kind):
        """An earlier step of a kind, preferring recent ones; created if there is none."""
        steps = [i for i, k in enumerate(self.kinds) if k == kind]
        if not steps:
            return {"tensor": self.tensor, "array": self.array, "key": self.key}[kind]()
        i = steps[-1 - min(self.draw.integer(0, len(steps) - 1), self.draw.integer(0, len(steps) - 1))]
        # What is used only through its views is often not part of the batch itself.
        if i in self.loose and self.draw.chance(50):
            self.loose.remove(i)
        return i

    def seed(self):
        return self.draw.integer(0, 999)

    # Atoms

    def atom(self):
        self.add("", "atom", (), self.draw.pick(list(ATOMS)))

    def key(self):
        kind = self.draw.weighted({"int": 4, "str": 4, "float": 1, "tuple": 2, "atom": 2})
        draw = self.draw
        if self.plain and kind in ("int", "atom"):
            return self.add("key", "atom", (), draw.pick(weights.PLAIN_KEYS.split(";")))
        if kind == "int":
            return self.add("key", "int", (), draw.pick([0, 1, -1, 255, 2**31, -(2**63), 2**64, 10**30]))
        if kind == "float":
            return self.add("key", "float", (), draw.integer(0, 2**64 - 1))
        if kind == "tuple":
            return self.add("key", "tuple", [self.some("key") for _ in range(draw.integer(0, 2))])
        if kind == "atom":
            return self.add("key", "atom", (), draw.pick(weights.KEYS.split(";")))
        return self.add("key", "str", (), draw.pick(["", "a", "b", "image", "ü", "x" * 300]))

    def nasty(self):
        self.add("", "nasty", (), self.draw.pick(list(NASTY)))

    # Tensors

    def dtype(self):
        return self.draw.pick(DTYPES) if self.draw.chance(40) and not self.plain else self.draw.pick(weights.COMMON)

    def shape(self):
        draw = self.draw
        how = draw.weighted({"small": 60, "limit": 14, "matrix": 14, "large": 4, "image": 8})
        if how == "small":
            return tuple(draw.pick([2, 3, 1, 4, 0, 6]) for _ in range(draw.integer(0, 4)))
        if how == "limit":  # in bytes, for items of one to eight bytes
            return (weights.LIMIT // draw.pick([1, 2, 4, 8]) + draw.integer(-1, 1),)
        if how == "matrix":
            return (draw.pick([6, 40, 128, 200]), draw.pick([6, 40, 128, 200]))
        if how == "image":
            return (2, 3, draw.pick([5, 40]), 32)
        return draw.pick(weights.LARGE)

    def tensor(self):
        return self.add("tensor", "tensor", (), self.dtype(), self.shape(), self.seed())

    def view(self):
        draw, t = self.draw, self.some("tensor")
        how = draw.weighted(weights.VIEWS)
        n = draw.integer
        arguments = {
            "transpose": lambda: (n(0, 3), n(0, 3)),
            "permute": lambda: (n(0, 99),),
            "cut": lambda: (n(0, 3), n(0, 40), n(0, 300), n(0, 3)),
            "narrow": lambda: (n(0, 3), n(0, 300), n(0, 300)),
            "select": lambda: (n(0, 3), n(0, 300)),
            "expand": lambda: (n(0, 5),),
            "expand_ones": lambda: (n(0, 5),),
            "windows": lambda: (n(0, 5), n(0, 5)),
            "as_strided": lambda: (n(0, 5), n(1, 5), n(0, 6), n(0, 3), n(0, 50)),
            "piece": lambda: (draw.pick(["split", "unbind"]), n(1, 5), n(0, 9)),
            "unsqueeze": lambda: (n(0, 3),),
            "view_dtype": lambda: (self.dtype(),),
        }.get(how, tuple)()
        if how == "piece":  # several pieces of one tensor
            for i in range(n(0, 2)):
                self.add("tensor", how, [t], *arguments[:2], arguments[2] + i + 1)
        return self.add("tensor", how, [t], *arguments)

    def odd_tensor(self):
        draw, n = self.draw, self.draw.integer
        how = draw.weighted(weights.ODD_TENSORS)
        of_one = {
            "parameter": lambda: (draw.pick([False, True]),),
            "leaf": tuple,
            "with_grad": tuple,
            "tagged": tuple,
            "conj": tuple,
            "neg": tuple,
            "meta": tuple,
            "shared": tuple,
            "storage": tuple,
            "typed_storage": tuple,
            "return_type": tuple,
        }
        if how in ("conj", "neg"):
            t = self.add(
                "tensor", "tensor", (), draw.pick(["complex64", "complex128", "complex32"]), self.shape(), self.seed()
            )
            return self.add("tensor", how, [t])
        if how in of_one:
            kind = "" if how in ("storage", "typed_storage", "meta", "return_type") else "tensor"
            return self.add(kind, how, [self.some("tensor")], *of_one[how]())
        if how in ("labelled", "attributed"):
            return self.add("tensor", how, [self.some("tensor"), self.anything()])
        if how == "sparse":
            layout = draw.pick(["coo", "csr", "csc", "bsr", "bsc", "hybrid"])
            return self.add("", how, (), layout, self.seed(), draw.pick([True, False]))
        if how == "nested":
            sizes = tuple(n(0, 4) for _ in range(n(1, 3)))
            return self.add("", how, (), draw.pick(["strided", "jagged"]), sizes, self.seed())
        if how == "quantized":
            return self.add(
                "", how, (), draw.pick(QUANTIZED), draw.pick([2, 3000]), draw.pick([False, True]), self.seed()
            )
        return self.add("tensor", "inference", (), self.dtype(), self.shape(), self.seed())

    def batch(self):
        """What default_collate returns, and parts of it."""
        draw = self.draw
        batch = self.add("batch", "batch", (), sample_of(draw), draw.integer(1, 4), self.seed())
        for _ in range(draw.integer(0, 2)):
            picked = self.add("tensor", "part", [batch], draw.integer(0, 3))
            if draw.chance(50):
                self.add("tensor", "cut", [picked], 0, draw.integer(0, 2), draw.integer(0, 4), 0)

    # Arrays

    def array(self):
        draw = self.draw
        names = list(ARRAY_DTYPES)
        dtype = draw.pick(names) if draw.chance(50) and not self.plain else draw.pick(names[:4])
        return self.add("array", "array", (), dtype, self.shape(), self.seed(), draw.pick(["C", "F"]))

    def array_view(self):
        draw, n = self.draw, self.draw.integer
        how = draw.weighted(weights.PLAIN_ARRAY_VIEWS if self.plain else weights.ARRAY_VIEWS)
        if how == "numpy":
            return self.add("array", how, [self.some("tensor")])
        arguments = {
            "array_cut": lambda: (n(0, 3), n(0, 40), n(0, 300), n(0, 6)),
            "array_transpose": lambda: (n(0, 99),),
            "array_broadcast": lambda: (n(0, 3),),
        }.get(how, tuple)()
        if how in weights.FIELDS:
            fields = self.add(
                "array", "array", (), draw.pick(weights.FIELDS[how]), (draw.pick([3, 2000]),), self.seed(), "C"
            )
            return self.add("array", how, [fields])
        kind = {"from_numpy": "tensor", "from_buffer": "tensor", "array_item": ""}.get(how, "array")
        return self.add(kind, how, [self.some("array")], *arguments)

    def odd_array(self):
        draw, n = self.draw, self.draw.integer
        how = draw.weighted(weights.ODD_ARRAYS)
        if how == "of_objects":
            return self.add("array", how, [self.anything() for _ in range(n(0, 4))])
        if how == "record_of_objects":
            return self.add("array", how, [self.anything(), self.anything()])
        if how == "unaligned":
            return self.add("array", how, (), draw.pick(["float32", "int64", "complex128"]), n(0, 5000), self.seed())
        if how in ("memmap", "array_bytes"):
            return self.add("array", how, (), draw.pick([50, 1000]) if how == "memmap" else draw.pick([0, 9, 20_000]))
        arguments = {
            "masked": lambda: (self.seed(), draw.pick([False, True])),
            "noted": lambda: (draw.pick([None, "note"]),),
        }.get(how, tuple)()
        if how in weights.FIELDS:
            fields = self.add("array", "array", (), draw.pick(weights.FIELDS[how]), (3,), self.seed(), "C")
            return self.add("array", how, [fields])
        return self.add("array", how, [self.some("array")], *arguments)

    # Containers

    def anything(self):
        """A step of any kind: mostly one that nothing holds yet."""
        if not self.steps or self.draw.chance(10):
            return self.key()
        pool = self.loose if self.loose and self.draw.chance(75) else range(len(self.steps))
        i = pool[-1 - self.draw.integer(0, len(pool) - 1)]
        if i in self.loose:
            self.loose.remove(i)
        return i

    def container(self, root=False):
        draw = self.draw
        if self.plain:
            return self.plain_container(root)
        family = draw.weighted({"list": 24, "dict": 20, "objects": 14, "set": 4, "deep": 2, "other": 4})
        if root:
            return self.root(family)
        if family == "dict":
            parts = [p for _ in range(draw.integer(0, 3)) for p in (self.some("key"), self.anything())]
            return self.add("container", draw.pick(weights.LIKE_DICTS.split()), parts)
        if family == "set":
            parts = [self.some("key") for _ in range(draw.integer(0, 3))]
            how = draw.pick(["frozenset", "set", "Counter"])
            return self.add("key" if how == "frozenset" else "container", how, parts)
        if family == "deep":
            depth = draw.pick([1, 10, 63, 64, 65, 66, 150])
            return self.add("container", "deep", [self.anything()], draw.pick(["list", "tuple", "dict"]), depth)
        if family == "other":
            how = draw.pick(["call", "ChainMap", "packed", "many", "collated"])
            if how in ("ChainMap", "call"):
                return self.add("container", how, [self.anything() for _ in range(draw.integer(0, 2))])
            if how == "collated":
                t = self.some("tensor")
                return self.add("tensor", how, [t] * draw.integer(1, 3))
            return self.add("container", how, [self.some("tensor") if how == "packed" else self.anything()])
        names = weights.LIKE_LISTS if family == "list" else weights.OBJECTS
        parts = [self.anything() for _ in range(draw.integer(0, 4))]
        return self.add("container", draw.pick(names.split()), parts)

    def plain_container(self, root):
        draw = self.draw
        kind = draw.pick(["list", "tuple", "dict"])
        if root:
            parts = [*self.loose] + [
                draw.integer(0, len(self.steps) - 1) for _ in range(draw.integer(0, 2) if self.steps else 0)
            ]
        else:
            parts = [self.anything() for _ in range(draw.integer(0, 4))]
        if kind == "dict":
            parts = [p for part in parts for p in (self.some("key"), part)]
        return self.add("container", kind, parts)

    def root(self, family):
        """A container of all values that nothing holds yet, and of some that it holds twice."""
        draw = self.draw
        if len(self.loose) == 1 and draw.chance(30):
            return
        parts = [*self.loose]
        if self.steps:
            parts += [draw.integer(0, len(self.steps) - 1) for _ in range(draw.integer(0, 2))]
        if family == "dict":
            keys = [self.add("key", "int", (), i) for i in range(len(parts))]
            how = draw.pick(weights.LIKE_DICTS.split())
            self.add("container", how, [p for pair in zip(keys, parts, strict=True) for p in pair])
        elif family == "objects":
            self.add("container", draw.pick(["sequence", "reduced", "stateful", "namespace"]), parts)
        else:
            self.add("container", draw.pick(["list", "tuple", "deque", "frozen_dataclass", "list_subclass"]), parts)

    def tie(self):
        containers = [i for i, kind in enumerate(self.kinds) if kind == "container"]
        if containers:
            inner = self.draw.pick(containers)
            outer = self.draw.pick(containers)
            self.add("container", "tie", [inner, outer])
