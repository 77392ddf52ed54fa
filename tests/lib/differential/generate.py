"""Generates random programs, chosen so that every pair of values of two dimensions occurs."""

import itertools
import random

from . import samples
from .program import BATCHES, DIMENSIONS, MAP, OPTIONS, Program, why_invalid

# A new program is the best of this many candidates. Each is drawn around a pair that has occurred too rarely.
CANDIDATES = 12
# Occurrences after which a pair is no longer sought. (Not all programs have enough batches to count.)
ENOUGH = 12
# Tries after which a pair is assumed to occur in no program.
TRIES = 400

SIZES = {"0": (0, 0), "1": (1, 1), "2-9": (2, 9), "10-49": (10, 49), "50-200": (50, 200)}


def pairs(program):
    """The pairs of values that a program tries."""
    values = [[(name, v) for v in program.value_of(name)] for name in DIMENSIONS]
    for one, other in itertools.combinations(values, 2):
        yield from itertools.product(one, other)


def all_pairs():
    values = [[(name, v) for v in DIMENSIONS[name]] for name in DIMENSIONS]
    for one, other in itertools.combinations(values, 2):
        yield from itertools.product(one, other)


class Generator:
    """Yields random programs, the same ones for the same arguments.

    Args:
        only: {dimension or property of a program: text of the value that all programs have}.

    Attributes:
        missing: {pair: occurrences} of the pairs that have occurred too rarely.
        impossible: the pairs that were found in no program.
    """

    def __init__(self, seed, start_method="fork", only=None):
        self.random = random.Random(f"{seed} {start_method}")
        self.start_method, self.only = start_method, only or {}
        values = {name: [v for v in DIMENSIONS.get(name, ()) if str(v) == text] for name, text in self.only.items()}
        self.fixed = {name: found[0] for name, found in values.items() if found}
        possible = (pair for pair in all_pairs() if all(self.fixed.get(name, v) == v for name, v in pair))
        self.missing = dict.fromkeys(possible, 0)
        self.order = list(self.missing)
        self.impossible = set()

    def __iter__(self):
        return self

    def __next__(self):
        best = max((self.candidate() for _ in range(CANDIDATES)), key=self.gain)
        for pair in pairs(best):
            if pair in self.missing:
                self.missing[pair] += 1
                if self.missing[pair] == ENOUGH:
                    del self.missing[pair]
        return best

    def gain(self, program):
        return sum(1 / (1 + self.missing[pair]) for pair in pairs(program) if pair in self.missing)

    def candidate(self):
        """A random program with a pair that has occurred too rarely."""
        while True:
            while self.order and self.order[-1] not in self.missing:
                self.order.pop()
            pair = self.random.choice(self.order) if self.order else ()
            if pair and pair not in self.missing:
                continue
            for _ in range(TRIES):
                p = draw(self.random, self.fixed | dict(pair), self.start_method)
                if why_invalid(p) is None and self.is_wanted(p) and all(v in p.value_of(name) for name, v in pair):
                    return p
            if pair:
                self.impossible.add(pair)
                self.missing.pop(pair)

    def is_wanted(self, program):
        return all(text in map(str, program.value_of(name)) for name, text in self.only.items())


def overlapping(r):
    """Values of a program whose epochs overlap. They may be shorter than what is under way."""
    return {
        "overlap_epochs": True,
        "persistent": True,
        "sampler": r.choice(["default", "default", "shuffle", "replacement", "distributed"]),
        "pattern": r.choice(["full epochs", "draws between epochs", "dataset changed", "break"]),
        "dataset": r.choice(MAP),
        "num_workers": r.randint(1, 4),
        "seed_by": r.choice([None, "batch", "sample"]),
    }


def draw(r, fixed, start_method):
    """A random program, which may be invalid. `fixed`: {dimension: value} that it must have."""

    def pick(name, weighted=None):
        return fixed[name] if name in fixed else r.choice(weighted or DIMENSIONS[name])

    epochs = pick("epochs", [2, 2, 3, 3, 8] if start_method == "fork" else [2])
    if epochs > 3 and r.random() < 0.7:
        fixed = overlapping(r) | fixed
    usual_sizes = ["1", "2-9", "2-9"] if epochs > 3 else ["0", "1", "2-9", *["10-49", "50-200"] * 3]
    dataset = pick("dataset")
    size = r.randint(*SIZES[pick("size", usual_sizes)])
    sampler = pick("sampler", None if dataset in MAP else ["none"])
    sizes = {
        "none": None,
        "1": 1,
        "some": r.randint(2, r.choice([3, max(2, size // 3)])),
        "larger": size + r.randint(1, 5),
    }
    batch_size = sizes[pick("batch_size", ["none", "1", "1", "some", "some", "some", "larger"])]
    if sampler in BATCHES:
        batch_size = 1
    structure = pick("structure")
    collate = pick("collate")
    is_collated = collate in ("default", "wrapped default") and batch_size is not None
    kinds = r.sample(
        list(samples.COLLATED if is_collated else samples.MAKE), 1 if structure == "alone" else r.randint(1, 3)
    )
    if "samples" in fixed:
        kinds[0] = fixed["samples"]
    if is_collated and (r.random() < 0.1 or kinds[0] in samples.REFUSED):
        kinds = [kinds[0] if kinds[0] in samples.REFUSED else r.choice(list(samples.REFUSED))]
    error_in = pick("error_in", ["nowhere"] * 6 + list(DIMENSIONS["error_in"])) if "error" not in fixed else None
    error_in = error_in or pick("error_in")
    workers = pick("num_workers", [0, 1, 1, 2, 2, 2, 3, 3, 4] if start_method == "fork" else [1, 2])
    more = {}
    if workers:
        more = {name: pick(name) for name in ("prefetch_factor", "persistent", "timeout", "context", "init")}
        more["in_order"] = pick("in_order", [True, True, False])
    if "given" in fixed or any(name in fixed for name in OPTIONS) or r.random() < 0.7:
        more |= {name: pick(name) for name in OPTIONS}
        more["given"] = pick("given") if any(more[name] for name in OPTIONS) else "keyword"
    if more.get("seed_by") and "samples" not in fixed and r.random() < 0.5:
        kinds = [r.choice(samples.DRAWN), *r.sample(samples.SIMPLE, len(kinds) - 1)]
    return Program(
        seed=r.randrange(2**31),
        dataset=dataset,
        size=size,
        samples=tuple(dict.fromkeys(kinds)),
        structure=structure,
        sampler=sampler,
        batch_size=batch_size,
        drop_last=pick("drop_last"),
        collate=collate,
        num_workers=workers,
        generator=pick("generator"),
        pin_memory=pick("pin_memory", [False, False, False, True]),
        error_in=error_in,
        error="none" if error_in == "nowhere" else pick("error", DIMENSIONS["error"][1:]),
        error_at=() if error_in == "nowhere" else tuple(sorted(r.sample(range(max(size, 4)), r.randint(1, 3)))),
        length_asked=pick("length_asked"),
        warnings_raise=pick("warnings_raise", [False, False, True]),
        pattern=pick("pattern"),
        cache=pick("cache", [False, False, False, True]),
        epochs=epochs,
        take=r.randint(1, 6),
        start_method=start_method,
        **more,
    )
