"""Measures how soon ``num_workers="auto"`` settles, and its cost: `make compare KIND=auto`.

Each row is a dataset whose samples sleep, and a loop that takes 10 ms per batch. The best number of workers is
therefore known, and two cores are enough to measure it. In each round, a new loader with "auto" and loaders with fixed
numbers run the same epochs in turn.

    two       samples of 19 ms: 2 workers
    eight     samples of 75 ms: 8 workers
    twelve    samples of 115 ms: 12 workers

The figures are medians over the rounds, for each epoch. The best fixed number is the one whose median over all epochs
is the smallest. The ratios compare epochs that ran in the same turn.
"""

import statistics
import time
from typing import Any

from harness.program import Program, main
from rows import Naps

import rustloader
from rustloader.tools.harness.rounds import Failure, Rounds, interleave, spread

STEP, EPOCHS, BATCHES = 0.01, 5, 200
# For each row: the seconds that a sample takes, and the fixed numbers of workers to compare with.
ROWS = {"two": (0.019, (1, 2, 4)), "eight": (0.075, (4, 8, 16)), "twelve": (0.115, (6, 12, 24))}

program = Program(__doc__, list(ROWS), rounds=3)


def run(loader: Any) -> float:
    """Returns the seconds that an epoch takes. Raises Failure if a batch is wrong or missing."""
    start = time.perf_counter()
    samples = []
    for batch in loader:
        samples.append(int(batch))
        time.sleep(STEP)
    seconds = time.perf_counter() - start
    if samples != list(range(len(loader))):
        raise Failure(f"{len(samples)} batches instead of {len(loader)}, or batches in the wrong order")
    return seconds


def measure(name: str) -> None:
    nap, fixed = ROWS[name]
    rounds: list[Rounds] = []
    counts: list[list[int]] = []
    for number in range(program.options.rounds):
        dataset, chosen = Naps([nap] * BATCHES), []
        loaders = {str(it): rustloader.DataLoader(dataset, num_workers=it) for it in ("auto", *fixed)}
        sides = {it: lambda loader=loader: run(loader) for it, loader in loaders.items()}
        auto = loaders["auto"]
        note = lambda: chosen.append(auto.num_workers)  # noqa: B023, E731
        rounds.append(interleave(sides, EPOCHS, f"{name}, round {number + 1}: epochs", after=note))
        counts.append(chosen)
    medians = {str(it): statistics.median(seconds for one in rounds for seconds in one[str(it)]) for it in fixed}
    best = min(medians, key=lambda it: medians[it])
    ratios_by_epoch = list(zip(*(one.ratios("auto", best) for one in rounds), strict=True))
    program.line(
        name,
        name,
        ", ".join(f"{it} workers {seconds:.2f} s" for it, seconds in medians.items()),
        *(spread(ratios, "{:.2f}".format) for ratios in ratios_by_epoch),
        " / ".join(" ".join(map(str, chosen)) for chosen in counts),
        counts=counts,
        best=best,
        rounds=rounds,
    )


if __name__ == "__main__":
    epochs = ["auto / best fixed number: 1st epoch", "2nd", "3rd", "4th", "5th"]
    main(program, measure, "row", "an epoch with fixed numbers", *epochs, "auto's workers by epoch (/: next round)")
