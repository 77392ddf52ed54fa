"""How long a loader takes from its construction to its first batch: `make compare KIND=starts`.

Each measurement is a program of its own, in a fresh interpreter. torch and rustloader take turns; a ratio is the median
of the rounds' ratios. `import` is the time that the same program's `import torch` takes.

forkserver     4 workers, the first loader of a program, and its second one
forkserver-16  the same with 16 workers
spawn          4 workers, a dataset of 100 MB in a `bytes` object
spawn-array    the same in a NumPy array
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A program, its number of loaders, and its goals: a figure, what it is, the most seconds, the least ratio."""

    method: str
    workers: int
    loaders: int = 1
    megabytes: int = 0
    array: bool = False
    goals: tuple[tuple[str, str, float | None, float | None], ...] = ()


ROWS = {
    "forkserver": Row(
        "forkserver",
        4,
        loaders=2,
        goals=(
            ("first", "first loader: first batch, less one import of torch", 0.6, 2),
            ("second", "second loader: first batch", 0.25, 10),
        ),
    ),
    "forkserver-16": Row(
        "forkserver", 16, loaders=2, goals=(("second", "16 workers, second loader: first batch", 0.6, None),)
    ),
    "spawn": Row(
        "spawn",
        4,
        megabytes=100,
        goals=(
            ("first", "100 MB of bytes: first batch", None, 2.2),
            ("last", "the same: a batch of each worker", None, 1),
        ),
    ),
    "spawn-array": Row(
        "spawn", 4, megabytes=100, array=True, goals=(("first", "array of 100 MB: first batch", None, 2.2),)
    ),
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


def program(row: Row, side: str) -> None:
    """Prints the seconds of a program: of its import of torch, and of each loader."""
    start = time.perf_counter()
    import torch.utils.data

    found = {"import": time.perf_counter() - start}
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    import rustloader

    kind = {"torch": torch.utils.data.DataLoader, "rustloader": rustloader.DataLoader}[side]
    dataset = Samples(row.megabytes, row.array)
    for name in ("first", "second")[: row.loaders]:
        start = time.perf_counter()
        loader = kind(dataset, batch_size=2, num_workers=row.workers, multiprocessing_context=row.method)
        batches = iter(loader)
        next(batches)
        found[name] = time.perf_counter() - start
        for _ in range(row.workers - 1):
            next(batches)
        found["last"] = time.perf_counter() - start
        del batches, loader
    if row.method == "forkserver":
        found["less import"] = found["first"] - found["import"]
    print(json.dumps(found))


def measured(name: str, side: str) -> dict[str, float]:
    """The figures of one program."""
    command = [sys.executable, os.path.abspath(__file__), "--program", name, side]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="rows to measure, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--program", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        program(ROWS[options.program[0]], options.program[1])
        return 0
    print(
        "| row | what | torch | rustloader | torch / rustloader | goal | |\n|---|---|---|---|---|---|---|", flush=True
    )
    missed = 0
    for name in options.rows.split(","):
        rounds = []
        for number in range(options.rounds):
            sides = ("torch", "rustloader") if number % 2 == 0 else ("rustloader", "torch")
            rounds.append({side: measured(name, side) for side in sides})
        for key, what, most, least in ROWS[name].goals:
            seconds = {side: statistics.median(it[side][key] for it in rounds) for side in ("torch", "rustloader")}
            ratio = statistics.median(it["torch"][key] / it["rustloader"][key] for it in rounds)
            counted = "less import" if "less one import" in what else key
            value = statistics.median(it["rustloader"][counted] for it in rounds)
            held = (most is None or value <= most) and (least is None or ratio >= least)
            missed += not held
            goal = ", ".join(
                [f"<= {most} s (found {value:.2f} s)"] * (most is not None) + [f">= {least}x"] * (least is not None)
            )
            print(
                f"| {name} | {what} | {seconds['torch']:.2f} s | {seconds['rustloader']:.2f} s | {ratio:.2f}x "
                f"| {goal} | {'' if held else 'missed'} |",
                flush=True,
            )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
