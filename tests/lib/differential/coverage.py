"""Counts how often each value of a dimension, and each pair of values of two dimensions, was tried."""

import collections

from .generate import pairs
from .program import DIMENSIONS

# What a full run must cover.
PROGRAMS_PER_VALUE = 100
PROGRAMS_PER_PAIR = 5


class Coverage:
    """The values and pairs tried so far."""

    def __init__(self):
        self.programs = self.counted = self.batches = 0
        self.values, self.pairs = collections.Counter(), collections.Counter()

    def add(self, program, record):
        """Counts a program. One with fewer than 3 batches does not count, unless it is small on purpose."""
        batches = sum(e[0] == "next" and e[2] != "end" for e in record.get("main", ()))
        self.programs += 1
        self.batches += batches
        if batches >= 3 or program.is_small_on_purpose:
            self.counted += 1
            self.values.update({(name, v) for name in DIMENSIONS for v in program.value_of(name)})
            self.pairs.update(set(pairs(program)))

    def report(self, all_pairs, impossible, detailed=False):
        """A report. `impossible`: the pairs that exclude each other. `detailed`: whether pairs are listed by name."""
        all_pairs = list(all_pairs)
        values = [(name, v) for name in DIMENSIONS for v in DIMENSIONS[name]]
        few = {p: self.pairs[p] for p in all_pairs if self.pairs[p] < PROGRAMS_PER_PAIR and p not in impossible}
        lines = [f"{self.programs} programs, {self.counted} of them counted, {self.batches} batches from each loader"]
        lines += [f"  {n}: " + ", ".join(f"{v} {self.values[n, v]}" for v in DIMENSIONS[n]) for n in DIMENSIONS]
        rare = [f"{name} {v}" for name, v in values if self.values[name, v] < PROGRAMS_PER_VALUE]
        lines += [f"values in fewer than {PROGRAMS_PER_VALUE} programs: {len(rare)} of {len(values)} {rare[:20]}"]
        lines += [f"pairs of values: {len(all_pairs)}, of which {len(impossible)} exclude each other"]
        lines += [f"other pairs in fewer than {PROGRAMS_PER_PAIR} programs: {len(few)}"]
        if detailed:
            lines += [f"  {one} {other}: {n}" for (one, other), n in few.items()]
            lines += [f"  excluded: {one} {other}" for one, other in sorted(impossible, key=repr)]
        return "\n".join(lines)
