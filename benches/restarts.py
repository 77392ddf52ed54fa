"""What the options against faults cost (`make compare KIND=restarts`). `KIND=reliability` measures the faults.

equal   the batches of an epoch in which workers are killed 100 times, against one without; `seed_by="sample"`
NAME    a row of `make compare`, in batches per second with all options and without, in alternating order, 2 workers;
        no worker dies and no sample fails. All rows by default
"""

import argparse
import json
import logging
import mmap
import os
import signal
import statistics
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import report
import rows
import torch
import torch.utils.data
from epochs import Failure, Side, run_epoch
from rows import Samples

import rustloader

OPTIONS = {"max_restarts": 1000, "stall_timeout": 60, "on_error": "skip", "max_errors": 1000}
BATCH = 4


class Mortal(torch.utils.data.Dataset):
    """Samples with random numbers. The first sample of every batch in `at` kills its worker, once."""

    def __init__(self, length: int, at: range):
        self.length, self.at = length, at
        # A byte for each batch. All processes share it.
        self.died = mmap.mmap(-1, length // BATCH)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        batch, place = divmod(index, BATCH)
        if place == 0 and batch in self.at and not self.died[batch]:
            self.died[batch] = 1
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.rand(8)


def batches_of(dataset: Mortal) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return list(rustloader.DataLoader(dataset, BATCH, num_workers=2, max_restarts=1000, seed_by="sample"))


def equal(deaths: int) -> "Result":
    """Compares the batches of an epoch with that many deaths with those of an epoch without."""
    length = BATCH * 10 * deaths
    killed = Mortal(length, range(5, 10 * deaths, 10))
    found, wanted = batches_of(killed), batches_of(Mortal(length, range(0)))
    if sum(killed.died[:]) != deaths or len(found) != len(wanted):
        raise Failure(f"{len(found)} batches in place of {len(wanted)}, after {sum(killed.died[:])} deaths")
    differ = sum(not torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    what = f'batches that differ after {deaths} deaths, `seed_by="sample"`'
    return Result("equal", what, "0", f"{differ} of {len(found)}", differ == 0)


@dataclass
class Result:
    """A line of the table."""

    row: str
    what: str
    goal: str
    found: str
    held: bool


def throughput(row: rows.Row, rounds: int) -> Result:
    """The rate of a row with all options, over that without."""
    dataset = Samples(row.samples(), row.batches * (row.batch_size or 1), row.fresh)
    common = {
        "batch_size": row.batch_size,
        "collate_fn": row.collate,
        "num_workers": row.workers or 2,
        "multiprocessing_context": row.start_method or "fork",
    }
    sides = [Side("rustloader", rustloader.DataLoader(dataset, **common, **options)) for options in (OPTIONS, {})]
    for number in range(rounds):
        print(f"{row.name}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        for side in sides if number % 2 == 0 else sides[::-1]:
            timing, _ = run_epoch(side, row.batches, row.epochs, row.to_first)
            side.timings.append(timing)
    # Of each round: a machine's speed changes between them.
    pairs = zip(*(side.timings for side in sides), strict=True)
    ratio = statistics.median(without.wall / with_options.wall for with_options, without in pairs)
    return Result(row.name, row.what, "at least 0.97", f"{ratio:.3f} of the rate without", ratio >= 0.97)


def table_of(results: list[Result]) -> str:
    """A table in Markdown, a line per row."""
    lines = ["| what | goal | measured |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {result.what} | {result.goal} | {result.found} |" for result in results)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["equal", *(row.name for row in rows.ROWS)]
    parser.add_argument("--rows", default=",".join(names), metavar="NAME,...", help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="of each row (default: %(default)s)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/reliability.md")
    options = parser.parse_args()
    wanted = options.rows.split(",")
    for name in wanted:
        if name not in names:
            parser.error(f"no row {name}; there are {', '.join(names)}")
    warnings.simplefilter("ignore")
    logging.getLogger("rustloader").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    results = [equal(100)] if "equal" in wanted else []
    for result in results:
        print(f"{result.row}: {result.found}; goal: {result.goal}", flush=True)
    for row in rows.ROWS:
        if row.name in wanted:
            results.append(throughput(row, options.rounds))
            print(f"{row.name}: {results[-1].found}; goal: {results[-1].goal}", flush=True)
    if options.save:
        options.save.write_text(json.dumps([vars(result) for result in results], indent=1) + "\n")
    if options.docs:
        report.write(Path(__file__).parents[1] / "docs/reliability.md", table_of(results), "<!-- options -->")
    return 0 if all(result.held for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
