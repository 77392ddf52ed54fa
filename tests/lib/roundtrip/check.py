"""The property: rustloader delivers what torch delivers, except for the intended differences."""

import collections
import zlib

import numpy as np

from roundtrip.build import build
from roundtrip.compare import Record
from roundtrip.intended import INTENDED, Case, judge
from roundtrip.memory import check_writes
from roundtrip.ways import Error, packed, packed_by_torch

__all__ = ["Checker"]

# How the packer runs in one process: with torch's C functions and without, and with large leaves that lie in
# shared memory already.
PACKER = [{}, {"exchange": False}, {"adopt": 4096}]


class Checker:
    """Compares outcomes, counts what it saw, and checks again the batches that are kept.

    Args:
        keep: how many later values a delivered value is kept for.
    """

    def __init__(self, keep=40):
        self.trees = 0
        self.steps = collections.Counter()
        self.outcomes = collections.Counter()
        self.intended = collections.Counter({intended.name: 0 for intended in INTENDED})
        self.in_trees = collections.Counter()
        self.spoiled = []
        self._keep = keep
        self._kept = collections.deque()

    def through_workers(self, loaders, indices, make=build):
        """Sends indices as one epoch.

        Args:
            loaders: both loaders.
            indices: descriptions, or lists of them.
            make: makes of an index what should arrive.
        """
        assert not self.spoiled, self.spoiled[0]
        for index, (ours, theirs) in zip(indices, loaders.send(indices), strict=True):
            self.hold(index, ours, theirs, lambda index=index: make(index), "workers")

    def through_packer(self, description):
        """Packs and unpacks a tree in this process."""
        way = PACKER[zlib.crc32(repr(description).encode("utf-8", "surrogatepass")) % len(PACKER)]
        ours, theirs = packed(description, **way), packed_by_torch(description)
        self.hold(description, ours, theirs, lambda: build(description), f"packer {way or ''}".strip(), kept=False)

    def hold(self, index, ours, theirs, make_sent, way, kept=True):
        """Raises an AssertionError that names all differences which are not intended."""
        if isinstance(theirs, Error):
            self.hold_error(index, ours, theirs, make_sent, way)
            return
        if isinstance(ours, Error):
            raise AssertionError(f"{way}: {ours.kind.__name__}: {ours.text}, and not a value\n{reproducer(index)}")
        case = Case(Record(ours), Record(theirs), make_sent)
        names, left = judge(case)
        if left:
            listed = "\n".join(map(str, left[:10]))
            raise AssertionError(f"{way}: {len(left)} differences\n{listed}\n{reproducer(index)}")
        self.count(index, "value", names, way)
        wrong = check_writes(case.ours.leaves)
        assert wrong is None, f"{way}: {wrong}\n{reproducer(index)}"
        if kept:
            self.keep(index, case.ours)

    def hold_error(self, index, ours, theirs, make_sent, way):
        """What torch cannot send is the same error from us, or arrives as it was."""
        if isinstance(ours, Error):
            text = f"{way}: {ours.kind.__name__} ({ours.text}), and not {theirs.kind.__name__} ({theirs.text})"
            assert ours.kind is theirs.kind, f"{text}\n{reproducer(index)}"
            self.count(index, "the same error", [], way)
            return
        sent = Record(make_sent())
        _, left = judge(Case(Record(ours), sent, make_sent))
        listed = "\n".join(map(str, left[:10]))
        assert not left, f"{way}: differs from what was sent, torch: {theirs}\n{listed}\n{reproducer(index)}"
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
        """Keeps a value; overwrites some of those that are kept, and looks whether the others are as they were."""
        leaves = [leaf for leaf in record.leaves if leaf.can_be_written]
        if self.trees % 3 == 0:
            for leaf in leaves[:4]:
                np.copyto(leaf.view, 0x55)
        self._kept.append((index, record, [hash(leaf.content) for leaf in record.leaves]))
        while len(self._kept) > self._keep:
            self.look_again(*self._kept.popleft())

    def finish(self):
        """Checks everything that is still kept."""
        while self._kept:
            self.look_again(*self._kept.popleft())
        assert not self.spoiled, "\n".join(self.spoiled[:5])

    def look_again(self, index, record, before):
        for leaf, was in zip(record.leaves, before, strict=True):
            if hash(leaf.content) != was:
                self.spoiled.append(
                    f"{leaf.path or 'the root'} has changed since it was delivered\n{reproducer(index)}"
                )


def is_list(index):
    """Whether an index is a list of descriptions."""
    return not isinstance(index[0][0], str)


def reproducer(index):
    """The command that sends a tree, or the samples of a batch, again."""
    return f'make stress KIND=batches ARGS="--tree \\"{index!r}\\""'
