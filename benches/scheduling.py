"""Uneven batches, slow storage, large samplers and tables: `make compare KIND=scheduling`.

Each row runs torch's loader, rustloader's with the row's options, and a lower bound, in alternating order. The figures
are medians of the rounds. Work is a sleep, which needs no processor, so four workers are fair on two cores.

    spikes    batches of one sample; 1 in 10 takes 60 ms, the others 4.5 ms; 4 workers. Bound: sum of the naps / 4
    lognormal batches of one sample; log-normal naps of mean 20 ms, sigma 1.5; 4 workers. Bound: sum of the naps / 4
    step      batches of 4; every 40th sample takes 200 ms, the others 2 ms; the loop takes 10 ms per batch; 4 workers.
              Bound: the longer of the loop and the sum of the naps / 4
    storage   batches of 64 samples of 30 ms; 2 workers. Bound: all samples of a batch at the same time
    indices   the first batch of 20,000,000 shuffled indices. Bound: torch.randperm
    table     TensorDataset of 100,000 x 64 float32, batches of 1,024, shuffled, no workers. Bound: slicing by hand
    table2    the same with 2 persistent workers
    crops     batches of 16 crops of 3 x 96 x 96 float32, 2 persistent workers. Bound: two bare processes that stack the
              same samples into warm shared memory
"""

import argparse
import json
import math
import mmap
import os
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
import torch
import torch.utils.data
from epochs import Failure, difference

import rustloader

STEP = 0.01
THREADS = 16
INDICES = 20_000_000


class Naps(torch.utils.data.Dataset):
    """Sample i is i, after a nap of `seconds[i]`."""

    def __init__(self, seconds: Sequence[float]):
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds[index])
        return index


class Crops(torch.utils.data.Dataset):
    """Sample i is a crop of an image."""

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
    """What a row compares. The bound is in seconds, or a function that measures it."""

    dataset: Any
    arguments: dict[str, Any]
    options: dict[str, Any]
    bound: float | Callable[[], float]
    step: float = 0.0
    # Only the first batch is waited for.
    first: bool = False
    times: dict[str, list[float]] = field(default_factory=lambda: {"torch": [], "rustloader": [], "bound": []})


def spikes() -> Row:
    chance = random.Random(1)
    naps = [0.06 if chance.random() < 0.1 else 0.0045 for _ in range(400)]
    options = {"dispatch": "shared_queue", "reorder_window": 32}
    return Row(Naps(naps), {"batch_size": 1, "num_workers": 4}, options, sum(naps) / 4)


def lognormal() -> Row:
    chance, sigma = random.Random(2), 1.5
    naps = [0.02 * math.exp(chance.gauss(-sigma * sigma / 2, sigma)) for _ in range(400)]
    options = {"dispatch": "shared_queue", "reorder_window": 64}
    return Row(Naps(naps), {"batch_size": 1, "num_workers": 4}, options, sum(naps) / 4)


def step() -> Row:
    naps = [0.2 if index % 40 == 39 else 0.002 for index in range(1600)]
    options = {"dispatch": "shared_queue", "reorder_window": 32}
    bound = max(sum(naps) / 4, len(naps) / 4 * STEP)
    return Row(Naps(naps), {"batch_size": 4, "num_workers": 4}, options, bound, step=STEP)


def storage() -> Row:
    naps = [0.03] * 640
    bound = len(naps) / 64 / 2 * math.ceil(64 / THREADS) * 0.03
    return Row(Naps(naps), {"batch_size": 64, "num_workers": 2}, {"worker_threads": THREADS}, bound)


def indices() -> Row:
    arguments = {"batch_size": 64, "num_workers": 2, "shuffle": True}
    return Row(range(INDICES), arguments, {}, timed(lambda: torch.randperm(INDICES)), first=True)


def table(workers: int = 0) -> Row:
    tensor = torch.rand(100_000, 64)

    def by_hand() -> None:
        order = torch.randperm(len(tensor))
        for start in range(0, len(tensor), 1024):
            tensor[order[start : start + 1024]]

    arguments = {"batch_size": 1024, "shuffle": True, "num_workers": workers, "persistent_workers": workers > 0}
    return Row(torch.utils.data.TensorDataset(tensor), arguments, {}, timed(by_hand))


def crops() -> Row:
    dataset = Crops(16 * 300)
    arguments = {"batch_size": 16, "num_workers": 2, "persistent_workers": True}
    return Row(dataset, arguments, {}, lambda: bare_stacking(dataset, 16, 2))


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


def timed(work: Callable[[], Any]) -> Callable[[], float]:
    def measure() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return measure


def bare_stacking(dataset: Any, batch_size: int, processes: int) -> float:
    """Seconds that processes need to stack the samples of a dataset into warm shared memory, each its share."""
    batches = len(dataset) // batch_size
    size = batch_size * dataset[0].numel() * 4
    reader, done = os.pipe()
    begin_reader, begin = os.pipe()
    for process in range(processes):
        if os.fork() == 0:
            torch.set_num_threads(1)
            out = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.float32).view(batch_size, *dataset[0].shape)
            out.fill_(1)
            os.write(done, b"r")
            os.read(begin_reader, 1)
            for batch in range(process, batches, processes):
                torch.stack([dataset[batch * batch_size + i] for i in range(batch_size)], out=out)
            os.write(done, b"d")
            os._exit(0)
    for _ in range(processes):
        os.read(reader, 1)
    start = time.perf_counter()
    os.write(begin, b"b" * processes)
    for _ in range(processes):
        os.read(reader, 1)
    taken = time.perf_counter() - start
    for _ in range(processes):
        os.wait()
    for fd in (reader, done, begin_reader, begin):
        os.close(fd)
    return taken


def run(loader: Any, row: Row) -> float:
    """Seconds of an epoch, or until its first batch."""
    start = time.perf_counter()
    iterator = iter(loader)
    count = 0
    for _ in iterator:
        count += 1
        if row.first:
            return time.perf_counter() - start
        if row.step:
            time.sleep(row.step)
    taken = time.perf_counter() - start
    if count != len(loader):
        raise Failure(f"{count} batches in place of {len(loader)}")
    return taken


def check(loaders: dict[str, Any], row: Row) -> None:
    """Compares the first batches of both loaders. This also starts and warms persistent workers."""
    batches: dict[str, list[Any]] = {}
    for name, loader in loaders.items():
        torch.manual_seed(5)
        batches[name] = [batch for batch, _ in zip(loader, range(3), strict=False)]
    found = difference(batches["torch"], batches["rustloader"])
    if found:
        raise Failure(found)
    if not row.first:
        for loader in loaders.values():
            if loader.persistent_workers:
                run(loader, row)


def measure(name: str, rounds: int) -> dict[str, Any]:
    row = ROWS[name]()
    loaders = {
        "torch": torch.utils.data.DataLoader(row.dataset, **row.arguments),
        "rustloader": rustloader.DataLoader(row.dataset, **row.arguments, **row.options),
    }
    check(loaders, row)
    for number in range(rounds):
        print(f"{name}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        for side in list(loaders) if number % 2 == 0 else list(loaders)[::-1]:
            row.times[side].append(run(loaders[side], row))
        row.times["bound"].append(row.bound() if callable(row.bound) else row.bound)
    return {"row": name, **{side: statistics.median(times) for side, times in row.times.items()}}


GROWTH = """
import re, sys
from pathlib import Path
from torch.utils.data import DataLoader
if sys.argv[1] == "rustloader":
    from rustloader import DataLoader
def first(count):
    next(iter(DataLoader(range(count), batch_size=64, shuffle=True)))
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
before = first(1000)
print((first(int(sys.argv[2])) - before) / int(sys.argv[2]))
"""


def growth(name: str) -> float:
    """Bytes per index that a new process grows by, from `iter()` to the first batch of a shuffled range."""
    command = [sys.executable, "-c", GROWTH, name, str(INDICES)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def line(result: dict[str, Any]) -> str:
    torchs, ours, bound = result["torch"], result["rustloader"], result["bound"]
    cells = f"{torchs * 1e3:>11,.1f}{ours * 1e3:>12,.1f}{bound * 1e3:>11,.1f}"
    return f"{result['row']:<11}{cells}{torchs / ours:>13.2f}x{torchs / bound:>15.2f}x{ours / bound:>15.2f}x"


WHAT = {
    "spikes": "1 batch in 10 takes 60 ms, the others 4.5 ms; `shared_queue`, window 32",
    "lognormal": "log-normal batches, mean 20 ms, sigma 1.5; `shared_queue`, window 64",
    "step": "every 40th sample takes 200 ms, batch 4, a step of 10 ms; `shared_queue`, window 32",
    "storage": "samples of 30 ms, batch 64, 2 workers; `worker_threads=16`",
    "indices": "first batch of 20,000,000 shuffled indices",
    "table": "`TensorDataset` of 100,000 x 64, batch 1,024, shuffled, no workers",
    "table2": "the same, 2 persistent workers",
    "crops": "16 crops of 3 x 96 x 96 float32, 2 persistent workers",
}


def table_of(results: list[dict[str, Any]]) -> str:
    """A table in Markdown, a line per row."""
    lines = ["| work | torch | rustloader | lower bound | gain | of the bound |", "|---|---:|---:|---:|---:|---:|"]
    for result in results:
        torchs, ours, bound = result["torch"], result["rustloader"], result["bound"]
        times = " | ".join(f"{seconds * 1e3:,.0f} ms" for seconds in (torchs, ours, bound))
        lines.append(f"| {WHAT[result['row']]} | {times} | {torchs / ours:.1f}x | {ours / bound:.2f}x |")
    return "\n".join(lines)


def picture(results: list[dict[str, Any]]) -> str:
    """Bars as SVG: the time of torch, of rustloader and the lower bound, as multiples of the bound."""
    titles = {
        "spikes": "1 batch in 10 takes 60 ms, the others 4.5 ms",
        "lognormal": "log-normal batches, sigma 1.5",
        "step": "every 40th sample takes 200 ms; a step of 10 ms",
    }
    sides = (("torch", "#b0b0b0"), ("rustloader", "#1f5fa8"), ("bound", "#7fa8d9"))
    left, width, top, high = 16, 400, 66, 84
    shown = [result for result in results if result["row"] in titles]
    longest = max(result["torch"] / result["bound"] for result in shown)
    bottom = top + high * len(shown)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 60} {bottom}" '
        'font-family="sans-serif" font-size="14">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{left}" y="22" fill="#222222" font-weight="bold">Time of an epoch, lower bound = 1</text>',
    ]
    for k, (side, color) in enumerate(sides):
        out.append(f'<rect x="{left + 130 * k}" y="34" width="12" height="12" fill="{color}"/>')
        words = "lower bound" if side == "bound" else side
        out.append(f'<text x="{left + 130 * k + 18}" y="45" fill="#222222">{words}</text>')
    for k, result in enumerate(shown):
        y = top + high * k
        out.append(f'<text x="{left}" y="{y + 14}" fill="#222222">{titles[result["row"]]}</text>')
        for j, (side, color) in enumerate(sides):
            ratio, at = result[side] / result["bound"], y + 20 + 17 * j
            out.append(f'<rect x="{left}" y="{at}" width="{width * ratio / longest:.1f}" height="14" fill="{color}"/>')
            place = left + width * ratio / longest + 5
            out.append(f'<text x="{place:.0f}" y="{at + 12}" fill="#222222" font-size="12">{ratio:.2f}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), metavar="NAME,...", help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="of each row (default: %(default)s)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument(
        "--docs", action="store_true", help="write the table into docs/performance.md, and docs/head-of-line.svg"
    )
    options = parser.parse_args()
    names = options.rows.split(",")
    for name in names:
        if name not in ROWS:
            parser.error(f"no row {name}; there are {', '.join(ROWS)}")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"{'':<11}{'torch':>11}{'rustloader':>12}{'bound':>11}")
    print(f"{'row':<11}{'ms':>11}{'ms':>12}{'ms':>11}{'torch / ours':>14}{'torch / bound':>16}{'ours / bound':>16}")
    results = []
    for name in names:
        results.append(measure(name, options.rounds))
        print(line(results[-1]), flush=True)
    if "indices" in names:
        print(f"indices: {growth('torch'):.2f} bytes per index with torch, {growth('rustloader'):.2f} with rustloader")
    if options.save:
        options.save.write_text(json.dumps(results, indent=1) + "\n")
    if options.docs:
        docs = Path(__file__).parents[1] / "docs"
        report.write(docs / "performance.md", table_of(results), "<!-- scheduling -->")
        (docs / "head-of-line.svg").write_text(picture(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
