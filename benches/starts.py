"""Measures how long a loader takes from its construction to its first batch: `make compare KIND=starts`.

Each measurement is a separate program, in a fresh interpreter. torch and rustloader take turns; a ratio is the median
of the rounds' ratios. One goal excludes the time of the program's own `import torch`.

forkserver     4 workers, the first loader of a program, and its second one
forkserver-16  the same with 16 workers
spawn          4 workers, a dataset of 100 MB in a `bytes` object
spawn-array    the same in a NumPy array
"""

import os
import time
import warnings
from typing import NamedTuple

# At the top, this file does not import rustloader, because the spawned workers of both loaders import this file.


class Goal(NamedTuple):
    """A goal: ``limit`` is the maximum of ``limited`` in seconds, ``min_ratio`` the minimum ratio for ``figure``."""

    figure: str
    what: str
    limit: float | None
    limited: str
    min_ratio: float | None


class Row(NamedTuple):
    """The settings of a measured program and its loaders, and the goals."""

    method: str
    workers: int
    loaders: int
    megabytes: int
    array: bool
    goals: tuple[Goal, ...]


FIRST = Goal("first", "first loader: first batch (the limit is less one import of torch)", 0.6, "less import", 2)
SECOND = Goal("second", "second loader: first batch", 0.25, "second", 10)
MANY = Goal("second", "16 workers, second loader: first batch", 0.6, "second", None)
BYTES = Goal("first", "100 MB of bytes: first batch", None, "first", 2.2)
EACH = Goal("last", "the same: a batch from each worker", None, "last", 1)
ARRAY = Goal("first", "array of 100 MB: first batch", None, "first", 2.2)
ROWS = {
    "forkserver": Row("forkserver", 4, 2, 0, False, (FIRST, SECOND)),
    "forkserver-16": Row("forkserver", 16, 2, 0, False, (MANY,)),
    "spawn": Row("spawn", 4, 1, 100, False, (BYTES, EACH)),
    "spawn-array": Row("spawn", 4, 1, 100, True, (ARRAY,)),
}


class Samples:
    """A dataset with a large attribute."""

    def __init__(self, megabytes: int, array: bool):
        self.ballast: object = os.urandom(megabytes * 10**6)
        if array:
            import numpy

            self.ballast = numpy.frombuffer(self.ballast, "u1").copy()

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> int:
        return index


def started(name: str, side: str) -> dict[str, float]:
    """Returns the seconds that this program takes to import torch, and to get the first batch of each loader."""
    row, start = ROWS[name], time.perf_counter()
    import torch.utils.data

    seconds_of = {"import": time.perf_counter() - start}
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    import rustloader

    kind = {"torch": torch.utils.data.DataLoader, "rustloader": rustloader.DataLoader}[side]
    dataset = Samples(row.megabytes, row.array)
    for which in ("first", "second")[: row.loaders]:
        start = time.perf_counter()
        loader = kind(dataset, batch_size=2, num_workers=row.workers, multiprocessing_context=row.method)
        batches = iter(loader)
        next(batches)
        seconds_of[which] = time.perf_counter() - start
        for _ in range(row.workers - 1):
            next(batches)
        seconds_of["last"] = time.perf_counter() - start
        del batches, loader
    return seconds_of | {"less import": seconds_of["first"] - seconds_of["import"]}


if __name__ == "__main__":
    from harness.processes import fresh
    from harness.program import Program, main, missed

    from rustloader.tools.harness.rounds import spread

    program = Program(__doc__, list(ROWS))

    def measure(name: str) -> None:
        sides = {side: lambda side=side: fresh(started, name, side) for side in ("torch", "rustloader")}
        rounds = program.interleave(sides, name)
        for goal in ROWS[name].goals:
            value, ratio = (
                rounds.median("rustloader", goal.limited),
                rounds.ratio("torch", "rustloader", goal.figure),
            )
            held = (goal.limit is None or value <= goal.limit) and (goal.min_ratio is None or ratio >= goal.min_ratio)
            words = [f"<= {goal.limit} s (measured {value:.2f} s)"] * (goal.limit is not None)
            words += [f">= {goal.min_ratio}x"] * (goal.min_ratio is not None)
            seconds = [spread(rounds.of(side, goal.figure), "{:.2f} s".format) for side in sides]
            gain = spread(rounds.ratios("torch", "rustloader", goal.figure), "{:.2f}x".format)
            program.line(
                name, name, goal.what, *seconds, gain, ", ".join(words), missed(held), held=held, rounds=rounds
            )

    main(program, measure, "row", "what", "torch", "rustloader", "torch / rustloader", "goal", "")
