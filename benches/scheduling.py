"""Measures uneven batches, slow storage, large samplers and tables: `make compare KIND=scheduling`.

Each row runs torch's loader, rustloader's with the row's options, and a lower bound, in alternating order. The figures
are medians of the rounds. The work of a sample is a sleep (a nap), so four workers on two cores are a fair test.

    spikes    batches of one sample; 1 in 10 takes 60 ms, the others 4.5 ms; 4 workers. Bound: sum of the naps / 4
    lognormal batches of one sample; log-normal naps of mean 20 ms, sigma 1.5; 4 workers. Bound: sum of the naps / 4
    step      batches of 4; every 40th sample takes 200 ms, the others 2 ms; the loop takes 10 ms per batch; 4 workers.
              Bound: the longer of the loop and the sum of the naps / 4
    storage   batches of 64 samples of 30 ms; 2 workers. Bound: 16 samples of a batch at a time
    indices   the first batch of 20,000,000 shuffled indices. Bound: torch.randperm
    table     TensorDataset of 100,000 x 64 float32, batches of 1,024, shuffled, no workers. Bound: indexing by hand
    table2    the same with 2 persistent workers
    crops     batches of 16 crops of 3 x 96 x 96 float32, 2 persistent workers. Bound: two bare processes that stack the
              same samples into warm shared memory
"""

import math
import mmap
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
from drawing import bars
from epochs import KINDS, difference
from floors import seconds
from harness.processes import at_once, fresh
from harness.program import Program
from rows import Naps

from rustloader.system.procfs import amounts, read
from rustloader.tools.harness.rounds import Failure, spread

STEP = 0.01
THREADS = 16
INDICES = 20_000_000
DOCS = Path(__file__).parents[1] / "docs"
# The rows in the picture docs/head-of-line.svg, and their titles there.
PICTURED = {
    "spikes": "1 batch in 10 takes 60 ms, the others 4.5 ms",
    "lognormal": "log-normal batches, sigma 1.5",
    "step": "every 40th sample takes 200 ms; a step of 10 ms",
}


class Crops(torch.utils.data.Dataset):
    """A dataset whose sample i is a crop of an image."""

    SIDE = 96

    def __init__(self, length: int):
        self.image = torch.rand(3, 256, 256)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        top, left = index * 7 % 160, index * 13 % 160
        return self.image[:, top : top + self.SIDE, left : left + self.SIDE]


@dataclass
class Row:
    """A row of the comparison. The lower bound is a time in seconds, or a function that measures it."""

    what: str
    dataset: Any
    arguments: dict[str, Any]
    options: dict[str, Any]
    bound: float | Callable[[], float]
    step: float = 0.0
    # Whether to measure only the time to the first batch.
    first: bool = False


def spikes() -> Row:
    chance = random.Random(1)
    naps = [0.06 if chance.random() < 0.1 else 0.0045 for _ in range(400)]
    options = {"dispatch": "shared_queue", "reorder_window": 32}
    what = f"{PICTURED['spikes']}; `shared_queue`, window 32"
    return Row(what, Naps(naps), {"batch_size": 1, "num_workers": 4}, options, sum(naps) / 4)


def lognormal() -> Row:
    chance, sigma = random.Random(2), 1.5
    naps = [0.02 * math.exp(chance.gauss(-sigma * sigma / 2, sigma)) for _ in range(400)]
    options = {"dispatch": "shared_queue", "reorder_window": 64}
    what = "log-normal batches, mean 20 ms, sigma 1.5; `shared_queue`, window 64"
    return Row(what, Naps(naps), {"batch_size": 1, "num_workers": 4}, options, sum(naps) / 4)


def step() -> Row:
    naps = [0.2 if index % 40 == 39 else 0.002 for index in range(1600)]
    options = {"dispatch": "shared_queue", "reorder_window": 32}
    bound = max(sum(naps) / 4, len(naps) / 4 * STEP)
    what = "every 40th sample takes 200 ms, batch 4, a step of 10 ms; `shared_queue`, window 32"
    return Row(what, Naps(naps), {"batch_size": 4, "num_workers": 4}, options, bound, step=STEP)


def storage() -> Row:
    naps = [0.03] * 640
    bound = len(naps) / 64 / 2 * math.ceil(64 / THREADS) * 0.03
    what = "samples of 30 ms, batch 64, 2 workers; `worker_threads=16`"
    return Row(what, Naps(naps), {"batch_size": 64, "num_workers": 2}, {"worker_threads": THREADS}, bound)


def indices() -> Row:
    arguments = {"batch_size": 64, "num_workers": 2, "shuffle": True}
    bound = lambda: seconds(lambda: torch.randperm(INDICES))  # noqa: E731
    return Row("first batch of 20,000,000 shuffled indices", range(INDICES), arguments, {}, bound, first=True)


def table(workers: int = 0) -> Row:
    tensor = torch.rand(100_000, 64)

    def by_hand() -> None:
        order = torch.randperm(len(tensor))
        for start in range(0, len(tensor), 1024):
            tensor[order[start : start + 1024]]

    arguments = {"batch_size": 1024, "shuffle": True, "num_workers": workers, "persistent_workers": workers > 0}
    what = "`TensorDataset` of 100,000 x 64, batch 1,024, shuffled, no workers"
    what = "the same, 2 persistent workers" if workers else what
    return Row(what, torch.utils.data.TensorDataset(tensor), arguments, {}, lambda: seconds(by_hand))


def crops() -> Row:
    dataset = Crops(16 * 300)
    arguments = {"batch_size": 16, "num_workers": 2, "persistent_workers": True}
    what = "16 crops of 3 x 96 x 96 float32, 2 persistent workers"
    return Row(what, dataset, arguments, {}, lambda: bare_stacking(dataset, 16, 2))


ROWS: dict[str, Callable[[], Row]] = {
    "spikes": spikes,
    "lognormal": lognormal,
    "step": step,
    "storage": storage,
    "indices": indices,
    "table": table,
    "table2": lambda: table(2),
    "crops": crops,
}
program = Program(__doc__, list(ROWS), docs=(DOCS / "performance.md", "<!-- scheduling -->"))


def bare_stacking(dataset: Any, batch_size: int, processes: int) -> float:
    """Returns the seconds that bare processes need to stack their shares of a dataset into warm shared memory."""
    batches, size = len(dataset) // batch_size, batch_size * dataset[0].numel() * 4

    def prepare(process: int) -> Callable[[], object]:
        torch.set_num_threads(1)
        out = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.float32).view(batch_size, *dataset[0].shape).fill_(1)

        def work() -> None:
            for batch in range(process, batches, processes):
                torch.stack([dataset[batch * batch_size + i] for i in range(batch_size)], out=out)

        return work

    return at_once(processes, prepare)


def run(loader: Any, row: Row) -> float:
    """Returns the seconds that an epoch takes, or the seconds to its first batch if ``row.first``."""
    start = time.perf_counter()
    count = 0
    for _ in loader:
        count += 1
        if row.first:
            return time.perf_counter() - start
        if row.step:
            time.sleep(row.step)
    seconds = time.perf_counter() - start
    if count != len(loader):
        raise Failure(f"{count} batches instead of {len(loader)}")
    return seconds


def check(loaders: dict[str, Any], row: Row) -> None:
    """Raises Failure if the first batches of the two loaders differ. Also starts and warms up persistent workers."""
    batches: dict[str, list[Any]] = {}
    for name, loader in loaders.items():
        torch.manual_seed(5)
        batches[name] = [batch for batch, _ in zip(loader, range(3), strict=False)]
    if problem := difference(batches["torch"], batches["rustloader"]):
        raise Failure(problem)
    for loader in loaders.values():
        if loader.persistent_workers:
            run(loader, row)


def measure(name: str) -> None:
    row = ROWS[name]()
    options = {"torch": {}, "rustloader": row.options}
    loaders = {side: KINDS[side](row.dataset, **row.arguments, **more) for side, more in options.items()}
    check(loaders, row)
    sides = {side: lambda loader=loader: run(loader, row) for side, loader in loaders.items()}
    bound = row.bound if callable(row.bound) else lambda: row.bound
    rounds = program.interleave(sides, name, references={"bound": bound})
    seconds = [f"{rounds.median(side) * 1e3:,.0f} ms" for side in rounds]
    gain, of_bound = (rounds.ratios(*pair) for pair in (("torch", "rustloader"), ("rustloader", "bound")))
    cells = [*seconds, spread(gain, "{:.1f}x".format), spread(of_bound, "{:.2f}x".format)]
    grown = {side: fresh(growth, side) for side in sides} if name == "indices" else {}
    medians = {side: rounds.median(side) for side in rounds}
    program.line(name, row.what, *cells, medians=medians, rounds=rounds, bytes_per_index=grown)
    if grown:
        ours, theirs = grown["rustloader"], grown["torch"]
        print(f"In `indices`, a process grows by {ours:.1f} bytes per index, and with torch by {theirs:.1f}.")


def growth(side: str) -> float:
    """Returns the bytes per index by which a process grows, from `iter()` to the first batch of a shuffled range."""

    def first(count: int) -> int:
        next(iter(KINDS[side](range(count), batch_size=64, shuffle=True)))
        return amounts(read("/proc/self/status"))["VmHWM"]

    before = first(1000)
    return (first(INDICES) - before) / INDICES


def picture() -> str:
    """Draws the times of torch, rustloader and the lower bound, as multiples of the bound."""
    colors = {"torch": "#b0b0b0", "rustloader": "#1f5fa8", "lower bound": "#7fa8d9"}
    medians = {result["row"]: result["medians"] for result in program.results if result["row"] in PICTURED}
    groups = {
        PICTURED[row]: {name: times[side] / times["bound"] for name, side in zip(colors, times, strict=True)}
        for row, times in medians.items()
    }
    return bars("Time of an epoch, lower bound = 1", colors, groups)


if __name__ == "__main__":
    status = program.run(measure, ["work", "torch", "rustloader", "lower bound", "gain", "time / bound"])
    if program.options.docs:
        (DOCS / "head-of-line.svg").write_text(picture())
    sys.exit(status)
