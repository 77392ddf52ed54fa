"""The intended differences from torch's loader: one list, each with its reason and its condition.

A condition is a predicate of one difference and the whole case. It is as narrow as possible: it checks that a result
that differs is also correct.
"""

import dataclasses
import pickle
from collections.abc import Callable

import numpy as np

from roundtrip.compare import Record, differences
from roundtrip.memory import overlap, sharing

__all__ = ["INTENDED", "Case", "Intended", "judge"]


class Case:
    """One tree as rustloader delivered it, as torch did, and (built on demand) as it was sent."""

    def __init__(self, actual, reference, make_sent):
        self.actual, self.reference = actual, reference
        self._make_sent = make_sent
        self._sent = None

    @property
    def sent(self):
        if self._sent is None:
            self._sent = Record(self._make_sent())
        return self._sent

    def tight(self, path):
        """Whether the storage of a tensor that rustloader delivered holds only what the batch shows of it."""
        facts = self.actual.facts
        on = [f for f in facts.values() if f.get("storage of") == facts[path].get("storage of")]
        spans = [span for span in map(span_of, on) if span is not None]
        if not spans:
            return facts[path]["nbytes"] == 0
        return min(s[0] for s in spans) == 0 and max(s[1] for s in spans) == facts[path]["nbytes"]

    def was_separated(self, path):
        """Whether the tensor overlaps another that torch delivers on the same storage but rustloader on another."""
        actual, reference = self.actual.facts, self.reference.facts
        leaves = {leaf.path: leaf for leaf in self.actual.leaves if leaf.kind == "tensor"}
        return path in leaves and any(
            reference.get(other, {}).get("storage of") == reference[path]["storage of"]
            and actual[other]["storage of"] != actual[path]["storage of"]
            and overlap(leaves[path], leaf)
            for other, leaf in leaves.items()
        )

    def sharing(self, record):
        """Which delivered tensors share memory: {path: digest}. A digest depends on the tensors before it, so lazy
        conjugates and negatives are left out, as is what neither loader delivers: gradients, attributes of plain
        tensors."""
        leaves = {id(leaf.owner): leaf for leaf in record.leaves}
        arrived = [leaf.path for leaf in self.actual.leaves if leaf.kind == "tensor" and not self.is_lazy(leaf.path)]
        places = map(self.sent_path, arrived) if record is self.sent else arrived
        return dict(zip(arrived, sharing([leaves[id(record.objects[path])] for path in places]), strict=True))

    def sent_path(self, path):
        """The path of an object in the record of what was sent. It may lie in a part that neither loader delivers."""
        facts = self.sent.facts
        if path in facts and "same as" not in facts[path]:
            return path
        for end in range(len(path), 0, -1):
            first = facts.get(path[:end], {}).get("same as")
            if first is not None:
                return self.sent_path(first + path[end:])
        return path

    def sent_facts(self, path):
        """The facts of what was sent at this path."""
        return self.sent.facts[self.sent_path(path)]

    def is_lazy(self, path):
        """Whether a lazy conjugate or negative was sent at this path."""
        facts = self.sent_facts(path)
        return bool(facts.get("conj") or facts.get("neg"))


def span_of(facts):
    """The first byte and the end of what a tensor or storage shows of its storage; None if it shows nothing."""
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
        name: its name in the counts.
        reason: why it is intended.
        facts: the facts that differ.
        holds: whether this explains a difference.
        example: a description that shows it.
    """

    name: str
    reason: str
    facts: set[str]
    holds: Callable[[object, Case], bool]
    example: tuple


def own_storage(d, case):
    actual, reference = case.actual.facts[d.path], case.reference.facts[d.path]
    if d.fact == "storage_offset" and span_of(actual) is None:
        return False
    if d.fact == "storage of" and case.was_separated(d.path):
        return False
    # What goes through torch's reducers keeps its storage, without the views that were separated from it.
    whole = all(actual.get(fact) == reference.get(fact) for fact in ("nbytes", "storage_offset"))
    return case.tight(d.path) or (whole and d.fact == "storage of")


def holes_closed(d, case):
    """A view with holes arrives dense, in the same order of dimensions."""
    facts = case.actual.facts[d.path]
    original = sorted((s, n) for n, s in zip(facts["shape"], d.reference, strict=True) if n > 1 and s)
    strides = sorted((s, n) for n, s in zip(facts["shape"], d.actual, strict=True) if n > 1 and s)
    dense, step = [], 1
    for _, n in original:
        dense.append((step, n))
        step *= n
    still = [bool(s) for n, s in zip(facts["shape"], d.reference, strict=True) if n > 1]
    return (
        strides == dense
        and still == [bool(s) for n, s in zip(facts["shape"], d.actual, strict=True) if n > 1]
        and case.tight(d.path)
    )


def resolved(d, case):
    """The values arrive as they were sent. Tensors that share memory still do."""
    lazy = case.is_lazy(d.path)
    if d.fact == "shares":
        return d.actual == "own" if lazy else case.sharing(case.actual)[d.path] == case.sharing(case.reference)[d.path]
    if not lazy:
        return False
    if d.fact in ("stride", "storage_offset"):
        expected = case.sent.objects[case.sent_path(d.path)].detach().resolve_conj().resolve_neg()
        return d.actual == getattr(expected, d.fact)()
    return d.actual == case.sent_facts(d.path)["content"]


def as_in_the_worker(d, case):
    """Tensors share memory as they did in the worker."""
    return case.sharing(case.actual)[d.path] == case.sharing(case.sent)[d.path]


def quantizer_kept(d, case):
    return d.reference is None and d.actual == case.sent_facts(d.path)["quantizer"]


def equal_atoms(d, case):
    """One object twice in the tree: equal, but two objects."""
    actual, reference = case.actual.facts[d.path], case.reference.facts[d.path]
    first = reference.get("same as")
    return first is not None and actual["type"] in (str, bytes, complex) and actual == case.actual.facts[first]


def as_by_protocol_4(array):
    """The array as multiprocessing delivers it up to Python 3.13."""
    return array if pickle.DEFAULT_PROTOCOL < 5 else pickle.loads(pickle.dumps(array, protocol=4))


def normalized(d, case):
    sent = case.sent.objects[case.sent_path(d.path)]
    return type(sent) is np.ndarray and d.actual == Record(as_by_protocol_4(sent)).facts[""][d.fact]


def irrelevant_strides(d, case):
    """Only strides that no element's address depends on differ."""
    shape = case.actual.facts[d.path]["shape"]
    moved = [n > 1 for n in shape]
    return 0 in shape or all(a == b for a, b, m in zip(d.actual, d.reference, moved, strict=True) if m)


VIEWED = (("tensor", (), "float32", (6, 8), 1), ("cut", (0,), 1, 2, 5, 0), ("list", (1,)))

INTENDED = [
    Intended(
        "storages of what is shown",
        "A view does not bring along all of its base: the storage of a delivered tensor holds only what the batch "
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
        lambda d, case: (d.actual, d.reference) == (False, True),
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
        "memory shared by storages",
        "Tensors over one array share its memory in the worker. torch moves each storage separately, which ends that.",
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
        "equal atoms",
        "In plain trees a string or bytes object under 1 KiB, or a complex number, that occurs twice arrives as two "
        "equal objects.",
        {"same as", "type", "value"},
        equal_atoms,
        (("str", (), "image"), ("list", (0, 0))),
    ),
    Intended(
        "who owns an array's memory",
        "An array under 16 KiB owns its memory, and the base of a larger one holds a lease. With torch, all but the "
        "smallest lie in memory that the unpickler has read.",
        {"owns"},
        lambda d, case: case.actual.facts[d.path]["writeable"] and case.actual.facts[d.path].get("alone", True),
        (("array", (), "float32", (2000,), 1, "C"), ("list", (0,))),
    ),
    Intended(
        "irrelevant strides of arrays",
        "NumPy may choose any strides for dimensions of one element, and for arrays without elements.",
        {"strides"},
        irrelevant_strides,
        (("array", (), "float32", (0, 3), 1, "C"), ("list", (0,))),
    ),
]
if pickle.DEFAULT_PROTOCOL >= 5:
    INTENDED.append(
        Intended(
            "normalized arrays",
            "Arrays arrive writable, in native byte order, and in C or F order, on each Python. From Python 3.14 on, "
            "torch's keep what they had.",
            {"writeable", "dtype", "content", "strides", "contiguous"},
            normalized,
            (("array", (), ">i4", (7,), 1, "C"), ("array_frozen", (0,)), ("list", (1,))),
        )
    )


def judge(case):
    """The names of the intended differences of a case, and the differences that are not intended."""
    names, unintended = [], []
    for d in differences(case.actual, case.reference):
        for intended in INTENDED:
            if d.fact in intended.facts and _holds(intended, d, case):
                names.append(intended.name)
                break
        else:
            unintended.append(d)
    return names, unintended


def _holds(intended, difference, case):
    try:
        return intended.holds(difference, case)
    except (KeyError, TypeError, ValueError):  # the structures differ
        return False
