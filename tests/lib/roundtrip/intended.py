"""The differences from torch's loader that are intended: one list, each with its reason and when it holds.

A predicate sees one difference and the whole case, and is as narrow as possible: what it accepts is correct in another
way, which it checks.
"""

import dataclasses
from collections.abc import Callable

from roundtrip.compare import Record, differences
from roundtrip.memory import overlap, sharing

__all__ = ["INTENDED", "Case", "Intended", "judge"]


class Case:
    """One tree as it came from us and from torch, and (made on demand) as it was sent."""

    def __init__(self, ours, theirs, make_sent):
        self.ours, self.theirs = ours, theirs
        self._make_sent = make_sent
        self._sent = None

    @property
    def sent(self):
        if self._sent is None:
            self._sent = Record(self._make_sent())
        return self._sent

    def tight(self, path):
        """Whether the storage of a tensor that rustloader delivered holds nothing but what the batch shows of it."""
        facts = self.ours.facts
        on = [f for f in facts.values() if f.get("storage of") == facts[path].get("storage of")]
        spans = [span for span in map(span_of, on) if span is not None]
        if not spans:
            return facts[path]["nbytes"] == 0
        return min(s[0] for s in spans) == 0 and max(s[1] for s in spans) == facts[path]["nbytes"]

    def parted_within(self, path):
        """Whether the tensor overlaps another that torch delivers on the same storage, and rustloader on its own."""
        ours, theirs = self.ours.facts, self.theirs.facts
        leaves = {leaf.path: leaf for leaf in self.ours.leaves if leaf.kind == "tensor"}
        return path in leaves and any(
            theirs.get(other, {}).get("storage of") == theirs[path]["storage of"]
            and ours[other]["storage of"] != ours[path]["storage of"]
            and overlap(leaves[path], leaf)
            for other, leaf in leaves.items()
        )

    def sharing(self, record):
        """Which delivered tensors share memory: {path: name}. The name depends on what precedes it, so lazy conjugates
        and negatives are left out, and so is what neither loader delivers: gradients, attributes of plain tensors."""
        leaves = {id(leaf.owner): leaf for leaf in record.leaves}
        arrived = [leaf.path for leaf in self.ours.leaves if leaf.kind == "tensor" and not self.is_lazy(leaf.path)]
        places = map(self.sent_path, arrived) if record is self.sent else arrived
        return dict(zip(arrived, sharing([leaves[id(record.objects[path])] for path in places]), strict=True))

    def sent_path(self, path):
        """Where the record of what was sent has an object: met first, perhaps, in what neither loader delivers."""
        facts = self.sent.facts
        if path in facts and "same as" not in facts[path]:
            return path
        for end in range(len(path), 0, -1):
            first = facts.get(path[:end], {}).get("same as")
            if first is not None:
                return self.sent_path(first + path[end:])
        return path

    def sent_facts(self, path):
        """What was sent in this place."""
        return self.sent.facts[self.sent_path(path)]

    def is_lazy(self, path):
        """Whether a lazy conjugate or negative was sent in this place."""
        facts = self.sent_facts(path)
        return bool(facts.get("conj") or facts.get("neg"))


def span_of(facts):
    """First byte and end of what a tensor or storage shows of its storage; None if nothing."""
    if "stride" not in facts:
        return (0, facts["nbytes"]) if facts["nbytes"] else None
    shape, item = facts["shape"], facts["dtype"].itemsize
    if 0 in shape:
        return None
    start = facts["storage_offset"]
    last = start + sum((n - 1) * s for n, s in zip(shape, facts["stride"], strict=True))
    return start * item, (last + 1) * item


@dataclasses.dataclass
class Intended:
    """A difference that is intended.

    Attributes:
        name: what it is called in the counts.
        reason: why it is so.
        whats: the facts that differ.
        holds: whether a difference is this one.
        example: a description in which it is seen.
    """

    name: str
    reason: str
    whats: set[str]
    holds: Callable[[object, Case], bool]
    example: tuple


def own_storage(d, case):
    ours, theirs = case.ours.facts[d.path], case.theirs.facts[d.path]
    if d.what == "storage_offset" and span_of(ours) is None:
        return False
    if d.what == "storage of" and case.parted_within(d.path):
        return False
    # What goes through torch's reducers keeps its storage, without the views that were separated from it.
    whole = all(ours.get(what) == theirs.get(what) for what in ("nbytes", "storage_offset"))
    return case.tight(d.path) or (whole and d.what == "storage of")


def holes_closed(d, case):
    """A view with holes arrives dense, in the same order of dimensions."""
    facts = case.ours.facts[d.path]
    given = sorted((s, n) for n, s in zip(facts["shape"], d.theirs, strict=True) if n > 1 and s)
    made = sorted((s, n) for n, s in zip(facts["shape"], d.ours, strict=True) if n > 1 and s)
    dense, step = [], 1
    for _, n in given:
        dense.append((step, n))
        step *= n
    still = [bool(s) for n, s in zip(facts["shape"], d.theirs, strict=True) if n > 1]
    return (
        made == dense
        and still == [bool(s) for n, s in zip(facts["shape"], d.ours, strict=True) if n > 1]
        and case.tight(d.path)
    )


def resolved(d, case):
    """The values as they were sent. Where others lie in the same memory, they still do."""
    lazy = case.is_lazy(d.path)
    if d.what == "shares":
        return d.ours == "own" if lazy else case.sharing(case.ours)[d.path] == case.sharing(case.theirs)[d.path]
    if not lazy:
        return False
    if d.what in ("stride", "storage_offset"):
        made = case.sent.objects[case.sent_path(d.path)].detach().resolve_conj().resolve_neg()
        return d.ours == getattr(made, d.what)()
    return d.ours == case.sent_facts(d.path)["content"]


def as_in_the_worker(d, case):
    """Tensors share memory as they did in the worker."""
    return case.sharing(case.ours)[d.path] == case.sharing(case.sent)[d.path]


def quantizer_kept(d, case):
    return d.theirs is None and d.ours == case.sent_facts(d.path)["quantizer"]


def equal_atom(d, case):
    """The same text twice: equal, and two objects."""
    ours, theirs = case.ours.facts[d.path], case.theirs.facts[d.path]
    first = theirs.get("same as")
    return first is not None and ours["type"] in (str, bytes, complex) and ours == case.ours.facts[first]


def strides_of_nothing(d, case):
    """Only strides that no element hangs on."""
    shape = case.ours.facts[d.path]["shape"]
    moved = [n > 1 for n in shape]
    return 0 in shape or all(a == b for a, b, m in zip(d.ours, d.theirs, moved, strict=True) if m)


VIEWED = (("tensor", (), "float32", (6, 8), 1), ("cut", (0,), 1, 2, 5, 0), ("list", (1,)))

INTENDED = [
    Intended(
        "a storage of what is shown",
        "A view does not bring along all of its base: what lies in the storage of a delivered tensor is what the batch "
        "shows of it. Tensors that share an element stay on one storage.",
        {"storage_offset", "nbytes", "storage of"},
        own_storage,
        VIEWED,
    ),
    Intended(
        "holes closed",
        "A view with holes that shares no element with another tensor arrives without the holes.",
        {"stride"},
        holes_closed,
        VIEWED,
    ),
    Intended(
        "not in torch's shared memory",
        "The arena is shared memory, but not of the kind that torch's is_shared() asks for.",
        {"in shared memory"},
        lambda d, case: (d.ours, d.theirs) == (False, True),
        VIEWED,
    ),
    Intended(
        "lazy conjugates and negatives",
        "torch's reducer drops both bits and delivers other values; rustloader resolves them, in memory of their own.",
        {"content", "stride", "storage_offset", "shares"},
        resolved,
        (
            ("tensor", (), "complex64", (3,), 1),
            ("conj", (0,)),
            ("tensor", (), "complex64", (0,), 1),
            ("neg", (2,)),
            ("tuple", (0, 1, 3)),
        ),
    ),
    Intended(
        "memory of two storages",
        "Tensors made over one array share it in the worker. torch moves each storage for itself and parts them.",
        {"shares"},
        as_in_the_worker,
        (
            ("array", (), "float32", (6,), 1, "C"),
            ("from_numpy", (0,)),
            ("from_numpy", (0,)),
            ("tensor", (), "float32", (2,), 1),
            ("with_grad", (3,)),
            ("list", (4, 1, 2)),
        ),
    ),
    Intended(
        "quantized tensors",
        "torch's reducer loses the quantizer: what arrives cannot be used.",
        {"quantizer"},
        quantizer_kept,
        (
            ("quantized", (), "quint8", 2, False, 1),
            ("tensor", (), "float32", (), 1),
            ("attributed", (1, 0)),
            ("list", (2, 0)),
        ),
    ),
    Intended(
        "equal texts",
        "In plain trees a text or bytes object under 1 KiB, or a complex number, that comes twice arrives as two equal "
        "objects.",
        {"same as", "type", "value"},
        equal_atom,
        (("str", (), "image"), ("list", (0, 0))),
    ),
    Intended(
        "who owns an array's memory",
        "An array under 16 KiB owns its memory, and the base of a larger one holds a lease. From torch all but the "
        "smallest lie in what the pickle has read.",
        {"owns"},
        lambda d, case: case.ours.facts[d.path]["writeable"] and case.ours.facts[d.path].get("alone", True),
        (("array", (), "float32", (2000,), 1, "C"), ("list", (0,))),
    ),
    Intended(
        "strides of arrays that nothing hangs on",
        "The strides of dimensions of one element, and of arrays without elements, are NumPy's to choose.",
        {"strides"},
        strides_of_nothing,
        (("array", (), "float32", (0, 3), 1, "C"), ("list", (0,))),
    ),
]


def judge(case):
    """The names of the intended differences of a case, and the differences that are not intended."""
    names, left = [], []
    for d in differences(case.ours, case.theirs):
        for intended in INTENDED:
            if d.what in intended.whats and _holds(intended, d, case):
                names.append(intended.name)
                break
        else:
            left.append(d)
    return names, left


def _holds(intended, difference, case):
    try:
        return intended.holds(difference, case)
    except (KeyError, TypeError, ValueError):  # of another structure
        return False
