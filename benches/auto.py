"""How soon ``num_workers="auto"`` settles, and what it costs against the best fixed number: `make compare KIND=auto`.

Each row is a dataset whose samples take a while without a processor, and a loop that takes 10 ms per batch. So the best
number of workers is known, and two cores are enough to measure it. In each round a new loader with "auto" and loaders
with fixed numbers run the same epochs in turn, in an order that changes from epoch to epoch.

    two       samples of 19 ms: 2 workers
    eight     samples of 75 ms: 8 workers
    twelve    samples of 115 ms: 12 workers

The figures are medians over the rounds, of each epoch. The best fixed number is the one whose median over all epochs is
the smallest; the ratios are of epochs that ran in the same turn.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch.utils.data
from epochs import Failure

import rustloader

STEP = 0.01


class Naps(torch.utils.data.Dataset):
    """Sample i is i, after a nap of ``seconds``."""

    def __init__(self, length: int, seconds: float):
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        return index


class Row(NamedTuple):
    """The seconds of a sample, and the fixed numbers of workers to compare with."""

    nap: float
    fixed: tuple[int, ...]


ROWS = {"two": Row(0.019, (1, 2, 4)), "eight": Row(0.075, (4, 8, 16)), "twelve": Row(0.115, (6, 12, 24))}


def run(loader: Any) -> float:
    """Seconds of an epoch."""
    start = time.perf_counter()
    samples = []
    for batch in loader:
        samples.append(int(batch))
        time.sleep(STEP)
    taken = time.perf_counter() - start
    if samples != list(range(len(loader))):
        raise Failure(f"{len(samples)} batches in place of {len(loader)}, or in another order")
    return taken


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    row = ROWS[name]
    settings: list[int | str] = ["auto", *row.fixed]
    times: dict[int | str, list[list[float]]] = {setting: [] for setting in settings}
    counts: list[list[int]] = []
    for number in range(options.rounds):
        print(f"{name}: round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        dataset = Naps(options.batches, row.nap)
        loaders: dict[int | str, Any] = {
            setting: rustloader.DataLoader(dataset, num_workers=setting, persistent_workers=options.persistent)  # type: ignore[arg-type]
            for setting in settings
        }
        for found in times.values():
            found.append([])
        counts.append([])
        for epoch in range(options.epochs):
            turn = (number + epoch) % len(settings)
            for setting in settings[turn:] + settings[:turn]:
                times[setting][-1].append(run(loaders[setting]))
                if setting == "auto":
                    counts[-1].append(loaders["auto"].num_workers)
    of_fixed = {setting: statistics.median(chain.from_iterable(times[setting])) for setting in row.fixed}
    best = min(of_fixed, key=lambda setting: of_fixed[setting])
    by_epoch = [statistics.median(epoch) for epoch in zip(*times["auto"], strict=True)]
    return {
        "row": name,
        "counts": counts,
        "auto": by_epoch,
        "fixed": of_fixed,
        "best": best,
        "of_best": [
            statistics.median(ratios) for ratios in zip(*map(_ratios, times["auto"], times[best]), strict=True)
        ],
    }


def _ratios(times: list[float], others: list[float]) -> list[float]:
    return [seconds / other for seconds, other in zip(times, others, strict=True)]


def lines(result: dict[str, Any]) -> str:
    fixed = ", ".join(f"{count} workers {seconds:.2f} s" for count, seconds in result["fixed"].items())
    epochs = "  ".join(
        f"{seconds:.2f} s ({ratio:.2f}x)" for seconds, ratio in zip(result["auto"], result["of_best"], strict=True)
    )
    rounds = " | ".join(" ".join(map(str, counts)) for counts in result["counts"])
    return f"{result['row']}: fixed: {fixed}\n  auto, by epoch: {epochs}\n  its workers, by round: {rounds}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), metavar="NAME,...", help="default: all")
    parser.add_argument("--rounds", type=int, default=3, help="of each row (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="of each round (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=200, help="of each epoch (default: %(default)s)")
    parser.add_argument("--persistent", action="store_true", help="keep the workers from epoch to epoch")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the results as JSON")
    options = parser.parse_args()
    names = options.rows.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"unknown rows: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    warnings.filterwarnings("ignore", "This DataLoader will create")
    results = []
    for name in names:
        try:
            results.append(measure(name, options))
        except Failure as failure:
            print(f"{name}: {failure}", file=sys.stderr)
            return 1
        print(lines(results[-1]), flush=True)
    if options.save:
        options.save.write_text(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
