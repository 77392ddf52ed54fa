"""What deaths, stuck workers and the options against them cost: `make compare-restarts`.

death   a worker kills itself; from there to the batch that it was at, made by the worker that replaces it; fork,
        2 workers, median of the deaths
stuck   a worker is stuck in C and holds the GIL, with `stall_timeout=1`; from there to its batch
equal   the batches of an epoch in which workers are killed, against one without; `seed_by="sample"`
NAME    a row of `make compare`, in batches per second with all options and without, in alternating order, 2 workers;
        no worker dies and no sample fails. All rows by default
"""

import argparse
import ctypes
import json
import logging
import mmap
import os
import signal
import statistics
import struct
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
import rows
import torch
import torch.utils.data
from epochs import Failure, Side, run_epoch
from rows import Samples

import rustloader

OPTIONS = {"max_restarts": 1000, "stall_timeout": 60, "on_error": "skip", "max_errors": 1000}
BATCH = 4


class Faulty(torch.utils.data.Dataset):
    """Samples with random numbers. The first sample of every batch in `at` ends its worker, or stops it, once."""

    def __init__(self, length: int, at: range, fault: Callable[[], None]):
        self.length, self.at, self.fault = length, at, fault
        # For each batch when its fault came, in ns. All processes share it.
        self.times = mmap.mmap(-1, 8 * (length // BATCH))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        batch, place = divmod(index, BATCH)
        if place == 0 and batch in self.at and not self.time_of(batch):
            struct.pack_into("q", self.times, 8 * batch, time.monotonic_ns())
            self.fault()
        return torch.rand(8)

    def time_of(self, batch: int) -> int:
        found: int = struct.unpack_from("q", self.times, 8 * batch)[0]
        return found


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    # PyDLL holds the GIL during the call.
    ctypes.PyDLL(None).sleep(1000)


def batches_of(dataset: Faulty, **options: Any) -> list[tuple[int, torch.Tensor]]:
    """Each batch with the time at which it came, in ns."""
    torch.manual_seed(5)
    loader = rustloader.DataLoader(dataset, BATCH, num_workers=2, max_restarts=1000, seed_by="sample", **options)
    return [(time.monotonic_ns(), batch) for batch in loader]


def delay(number: int, fault: Callable[[], None], **options: Any) -> float:
    """The median time from a fault to the batch of its worker, in milliseconds."""
    dataset = Faulty(BATCH * 20 * number, range(10, 20 * number, 20), fault)
    came = batches_of(dataset, **options)
    return statistics.median((came[batch][0] - dataset.time_of(batch)) / 1e6 for batch in dataset.at)


def unequal(number: int) -> int:
    """How many batches of an epoch with that many deaths differ from those of an epoch without."""
    length = BATCH * 10 * number
    killed = Faulty(length, range(5, 10 * number, 10), die)
    found = [batch for _, batch in batches_of(killed)]
    wanted = [batch for _, batch in batches_of(Faulty(length, range(0), die))]
    if any(not killed.time_of(batch) for batch in killed.at) or len(found) != len(wanted):
        raise Failure(f"{len(found)} batches in place of {len(wanted)}, or a worker was not killed")
    return sum(not torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@dataclass
class Result:
    """A line of the table."""

    row: str
    what: str
    goal: str
    found: str
    held: bool


def faults(deaths: int) -> list[Result]:
    death, stuck, differ = delay(deaths, die), delay(3, hang, stall_timeout=1), unequal(100)
    return [
        Result(
            "death", "a death to the batch of the worker in its place", "at most 60 ms", f"{death:.0f} ms", death <= 60
        ),
        Result(
            "stuck",
            "a worker stuck in C to its batch, `stall_timeout=1`",
            "at most 1.3 s",
            f"{stuck / 1e3:.2f} s",
            stuck <= 1300,
        ),
        Result("equal", 'batches that differ after 100 deaths, `seed_by="sample"`', "0", str(differ), differ == 0),
    ]


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
    with_options, without = (side.median("wall") for side in sides)
    ratio = without / with_options
    return Result(row.name, row.what, "at least 0.97", f"{ratio:.3f} of the rate without", ratio >= 0.97)


def table_of(results: list[Result]) -> str:
    """A table in Markdown, a line per row."""
    lines = ["| what | goal | measured |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {result.what} | {result.goal} | {result.found} |" for result in results)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["faults", *(row.name for row in rows.ROWS)]
    parser.add_argument(
        "--rows", default=",".join(names), metavar="NAME,...", help="faults, or rows of `make compare`; default: all"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each row (default: %(default)s)")
    parser.add_argument("--deaths", type=int, default=20, help="for the row `death` (default: %(default)s)")
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
    results = faults(options.deaths) if "faults" in wanted else []
    for result in results:
        print(f"{result.row}: {result.found}; goal: {result.goal}", flush=True)
    for row in rows.ROWS:
        if row.name in wanted:
            results.append(throughput(row, options.rounds))
            print(f"{row.name}: {results[-1].found}; goal: {results[-1].goal}", flush=True)
    if options.save:
        options.save.write_text(json.dumps([vars(result) for result in results], indent=1) + "\n")
    if options.docs:
        report.write(Path(__file__).parents[1] / "docs/reliability.md", table_of(results), "<!-- restarts -->")
    return 0 if all(result.held for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
