"""The property: rustloader delivers what torch delivers, except for the intended differences."""

import collections
import zlib

import numpy as np

from roundtrip.build import build
from roundtrip.compare import Record
from roundtrip.intended import INTENDED, Case, judge
from roundtrip.memory import check_writes
from roundtrip.ways import Error, packed, packed_by_torch

__all__ = ["PACKER_OPTIONS", "Checker", "reproducer"]

# How the packer runs in one process: with torch's C functions, without them, and with large leaves that already lie in
# shared memory.
PACKER_OPTIONS = [{}, {"exchange": False}, {"adopt": 4096}]


class Checker:
    """Compares outcomes, counts them, and checks that kept batches do not change.

    Args:
        keep: the number of values that are kept.
    """

    def __init__(self, keep=40):
        self.trees = 0
        self.steps = collections.Counter()
        self.outcomes = collections.Counter()
        self.intended = collections.Counter({intended.name: 0 for intended in INTENDED})
        self.in_trees = collections.Counter()
        self.corrupted = []
        self._keep = keep
        self._kept = collections.deque()

    def through_workers(self, loaders, indices):
        """Sends indices as one epoch."""
        assert not self.corrupted, self.corrupted[0]
        for index, (actual, reference) in zip(indices, loaders.send(indices), strict=True):
            self.check(index, actual, reference, lambda index=index: loaders.make(index), "workers")

    def through_packer(self, description, ways=None):
        """Packs and unpacks a tree in this process, in one of the ways, or in those that are given."""
        name = repr(description).encode("utf-8", "surrogatepass")
        for options in ways or [PACKER_OPTIONS[zlib.crc32(name) % len(PACKER_OPTIONS)]]:
            actual, reference = packed(description, **options), packed_by_torch(description)
            way = f"packer {options or ''}".strip()
            self.check(description, actual, reference, lambda: build(description), way, kept=False)

    def check(self, index, actual, reference, make_sent, way, kept=True):
        """Raises an AssertionError if the outcomes differ in a way that is not intended."""
        if isinstance(reference, Error):
            self.check_error(index, actual, reference, make_sent, way)
            return
        if isinstance(actual, Error):
            raise AssertionError(
                f"{way}: got {actual.kind.__name__} ({actual.text}), expected a value\n{reproducer(index)}"
            )
        case = Case(Record(actual), Record(reference), make_sent)
        names, unintended = judge(case)
        if unintended:
            listed = "\n".join(map(str, unintended[:10]))
            raise AssertionError(f"{way}: {len(unintended)} differences\n{listed}\n{reproducer(index)}")
        self.count(index, "value", names, way)
        wrong = check_writes(case.actual.leaves)
        assert wrong is None, f"{way}: {wrong}\n{reproducer(index)}"
        if kept:
            self.keep(index, case.actual)

    def check_error(self, index, actual, reference, make_sent, way):
        """What torch cannot send raises the same error with rustloader, or arrives as it was sent."""
        if isinstance(actual, Error):
            errors = (
                f"got {actual.kind.__name__} ({actual.text}), expected {reference.kind.__name__} ({reference.text})"
            )
            same = actual.kind is reference.kind and (not is_list(index) or actual.last_line == reference.last_line)
            assert same, f"{way}: {errors}\n{reproducer(index)}"
            self.count(index, "the same error", [], way)
            return
        sent = Record(make_sent())
        _, unintended = judge(Case(Record(actual), sent, make_sent))
        listed = "\n".join(map(str, unintended[:10]))
        assert not unintended, f"{way}: differs from what was sent; torch: {reference}\n{listed}\n{reproducer(index)}"
        self.count(index, "right where torch fails", [], way)

    def count(self, index, outcome, names, way):
        self.outcomes[way, outcome] += 1
        self.intended.update(names)
        self.in_trees.update(set(names))
        if way == "workers":
            self.trees += 1
            for description in index if is_list(index) else [index]:
                self.steps.update({operation for operation, *_ in description})

    def keep(self, index, record):
        """Keeps a value, after overwriting parts of every third one; checks the oldest values before dropping them."""
        leaves = [leaf for leaf in record.leaves if leaf.can_be_written]
        if self.trees % 3 == 0:
            for leaf in leaves[:4]:
                np.copyto(leaf.view, 0x55)
        self._kept.append((index, record, [hash(leaf.content) for leaf in record.leaves]))
        while len(self._kept) > self._keep:
            self.recheck(*self._kept.popleft())

    def finish(self):
        """Checks everything that is still kept."""
        while self._kept:
            self.recheck(*self._kept.popleft())
        assert not self.corrupted, "\n".join(self.corrupted[:5])

    def recheck(self, index, record, before):
        for leaf, was in zip(record.leaves, before, strict=True):
            if hash(leaf.content) != was:
                self.corrupted.append(
                    f"{leaf.path or 'the root'} has changed since it was delivered\n{reproducer(index)}"
                )


def is_list(index):
    """Whether an index is a list of descriptions."""
    return not isinstance(index[0][0], str)


def reproducer(index):
    """The command that sends a tree, or the samples of a batch, again."""
    return f'make stress KIND=batches ARGS="--tree \\"{index!r}\\""'
