"""What saving and resuming a position cost: `make compare KIND=resuming`.

Each row runs rustloader's StatefulDataLoader and torchdata's in alternating order, with a lower bound where there is
one. The figures are medians of the rounds. Where an epoch resumes, the first batch is compared with the right one.

    state       state_dict() per call in mid-epoch; a map-style dataset, 2 workers
    rate        batches per second with a state_dict() after each and without; tokens, batch 32, 2 persistent workers
    sequential  the first batch at 50 % of 100,000,000 indices, over that of a new epoch; each in a new process
    shuffled    the first batch at 99 % of 10,000,000 shuffled indices. Bound: torch.randperm
    iterable    the first batch at 50 % of an iterable dataset without a state; 1 ms a sample, 4 workers. Bound: the
                walk of four bare processes through the same samples
    large       batches per second of an iterable dataset with a state of 10 MB and of the same dataset without one;
                snapshot_every_n_steps=1, 1 ms a sample, 2 workers
    size        bytes of a pickled state in 100,000,000 indices

`sequential` and `shuffled` resume from a state of the second batch whose numbers were changed.
"""

import argparse
import importlib
import itertools
import json
import multiprocessing
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
import rows
import torch
import torch.utils.data
from epochs import Failure

MODULES = {"rustloader": "rustloader.stateful_dataloader", "torchdata": "torchdata.stateful_dataloader"}
BATCH = 64
SEED = 5


def loader_class(side: str) -> Any:
    return importlib.import_module(MODULES[side]).StatefulDataLoader


@dataclass
class Result:
    """A line of the table: a text for each side that ran, and for what they are compared with."""

    row: str
    what: str
    goal: str
    cells: dict[str, str]
    beside: str = ""
    # Whether rustloader reached the goal; None if it did not run, or not all that it is compared with.
    held: bool | None = None


def median(rounds: int, measures: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Runs all measures in each round, every second time in reversed order. Returns their medians."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        for name in list(measures) if number % 2 == 0 else list(measures)[::-1]:
            found[name].append(measures[name]())
    return {name: statistics.median(values) for name, values in found.items()}


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# --- in mid-epoch ----------------------------------------------------------------------------------


def state(sides: list[str], rounds: int) -> Result:
    calls, batches = 1000, 200
    after_batch: dict[str, list[float]] = {side: [] for side in sides}

    def measure(side: str) -> float:
        loader = loader_class(side)(range(BATCH * (batches + 8)), BATCH, num_workers=2)
        iterator = iter(loader)
        for _ in itertools.islice(iterator, batches):
            after_batch[side].append(seconds(loader.state_dict))
        return statistics.median(seconds(loader.state_dict) for _ in range(calls))

    found = median(rounds, {side: lambda side=side: measure(side) for side in sides})
    cells = {side: f"{value * 1e6:,.1f} us" for side, value in found.items()}
    single = {side: statistics.median(values) * 1e6 for side, values in after_batch.items()}
    beside = "once after each batch: " + ", ".join(f"{side} {value:,.1f} us" for side, value in single.items())
    held = found["rustloader"] <= 8e-6 if "rustloader" in found else None
    return Result("state", "`state_dict()`, map-style, 2 workers", "at most 8 us", cells, beside, held)


def rate(sides: list[str], rounds: int) -> Result:
    size, batches = 32, 400
    dataset = rows.Samples(rows.tokens(), size * batches)
    loaders = {side: loader_class(side)(dataset, size, num_workers=2, persistent_workers=True) for side in sides}

    def epoch(loader: Any, with_state: bool) -> float:
        count, start = 0, time.perf_counter()
        for _ in loader:
            count += 1
            if with_state:
                loader.state_dict()
        if count != batches:
            raise Failure(f"{count} batches in place of {batches}")
        return batches / (time.perf_counter() - start)

    for loader in loaders.values():
        epoch(loader, True)
    found = median(
        rounds,
        {
            f"{side} {with_state}": lambda side=side, with_state=with_state: epoch(loaders[side], with_state)
            for side in sides
            for with_state in (True, False)
        },
    )
    ratios = {side: found[f"{side} True"] / found[f"{side} False"] for side in sides}
    cells = {side: f"{ratio:.2f} of the rate without, {found[f'{side} True']:,.0f}/s" for side, ratio in ratios.items()}
    held, beside = None, ""
    if len(sides) == 2:
        gain = found["rustloader True"] / found["torchdata True"]
        beside = f"{gain:.1f} times torchdata's rate"
        held = ratios["rustloader"] >= 0.85 and gain >= 5
    what = "a `state_dict()` after every batch: tokens, batch 32, 2 persistent workers"
    return Result("rate", what, "at least 0.85, and 5 times torchdata's rate", cells, beside, held)


class Walk(torch.utils.data.IterableDataset):
    """Each worker has `count` samples of its own, a nap each."""

    def __init__(self, count: int, nap: float = 0.001):
        self.count = count
        self.nap = nap

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        first = 0 if worker is None else worker.id * self.count
        for i in range(self.count):
            time.sleep(self.nap)
            yield first + i


class Buffer(Walk):
    """The same with 10 MB of texts, as a shuffle buffer has them, and a position."""

    def __init__(self, count: int):
        super().__init__(count)
        self.buffer = [f"{i:01000d}" for i in range(10_000)]
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        for sample in super().__iter__():
            self.buffer[self.position % len(self.buffer)] = f"{-sample:01000d}"
            self.position += 1
            yield sample


class Stateful(Buffer):
    """The same with both as its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"buffer": self.buffer, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buffer, self.position = state["buffer"], state["position"]


def large(sides: list[str], rounds: int) -> Result:
    size, batches, workers = 16, 1200, 2
    # torchdata is slower by far, so it gets a shorter epoch.
    lengths = {side: batches if side == "rustloader" else 100 for side in sides}

    def epoch(side: str, dataset: type[Walk]) -> float:
        each = lengths[side] // workers
        loader = loader_class(side)(dataset(each * size), size, num_workers=workers, snapshot_every_n_steps=1)
        count, start = 0, time.perf_counter()
        for _ in loader:
            count += 1
        if count != lengths[side]:
            raise Failure(f"{count} batches in place of {lengths[side]}")
        return count / (time.perf_counter() - start)

    found = median(
        rounds,
        {
            f"{side} {dataset.__name__}": lambda side=side, dataset=dataset: epoch(side, dataset)
            for side in sides
            for dataset in (Stateful, Buffer)
        },
    )
    ratios = {side: found[f"{side} Stateful"] / found[f"{side} Buffer"] for side in sides}
    cells = {side: f"{ratio:.3f} of the rate without" for side, ratio in ratios.items()}
    held = ratios["rustloader"] >= 0.98 if "rustloader" in sides else None
    what = "a dataset with a state of 10 MB, `snapshot_every_n_steps=1`, 16 samples of 1 ms, 2 workers"
    return Result("large", what, "at least 0.98", cells, "", held)


# --- resuming --------------------------------------------------------------------------------------


def changed(value: Any, position: int) -> Any:
    """A state with another number of delivered batches."""
    numbers = dict.fromkeys(("_snapshot_step", "_num_yielded", "_sampler_iter_yielded", "delivered"), position)
    numbers |= dict.fromkeys(("samples_yielded", "yielded"), position * BATCH)
    if not isinstance(value, dict):
        return value
    return {key: numbers[key] if key in numbers else changed(inner, position) for key, inner in value.items()}


def found_in(value: Any, name: str) -> Any:
    """The first value of this key in a nested dict, or None."""
    if not isinstance(value, dict):
        return None
    if value.get(name) is not None:
        return value[name]
    return next((found for inner in value.values() if (found := found_in(inner, name)) is not None), None)


def order(side: str, state: Any, length: int) -> torch.Tensor:
    """The indices of the shuffled epoch that `early_state` was taken in."""
    generator = torch.Generator()
    if side == "torchdata":
        generator.set_state(found_in(state, "generator"))
    else:
        # torch's own draws: the workers' seed, then the sampler's.
        torch.manual_seed(SEED)
        draws = [int(torch.empty((), dtype=torch.int64).random_().item()) for _ in range(2)]
        generator.manual_seed(draws[1])
    return torch.randperm(length, generator=generator)


def early_state(side: str, length: int, shuffle: bool) -> Any:
    """The state after two batches."""
    torch.manual_seed(SEED)
    loader = loader_class(side)(range(length), BATCH, shuffle=shuffle, num_workers=2)
    iterator = iter(loader)
    for _ in itertools.islice(iterator, 2):
        pass
    return loader.state_dict()


def first_batch(side: str, length: int, shuffle: bool, state: Any) -> tuple[float, torch.Tensor]:
    """Seconds from the loader's construction to the first batch, and that batch."""
    start = time.perf_counter()
    loader = loader_class(side)(range(length), BATCH, shuffle=shuffle, num_workers=2)
    if state is not None:
        loader.load_state_dict(state)
    batch = next(iter(loader))
    return time.perf_counter() - start, batch


def child(task: str) -> None:
    """What a new process measures: `in_new_process` sends the task as JSON."""
    side, length, shuffle, file = json.loads(task)
    state = None if file is None else torch.load(file)
    taken, batch = first_batch(side, length, shuffle, state)
    print(json.dumps([taken, batch.tolist()]))


def in_new_process(side: str, length: int, shuffle: bool, file: str | None) -> tuple[float, list[int]]:
    command = [sys.executable, __file__, "--child", json.dumps([side, length, shuffle, file])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Failure(done.stderr)
    taken, batch = json.loads(done.stdout.splitlines()[-1])
    return taken, batch


def resumed(sides: list[str], rounds: int, length: int, percent: int, shuffle: bool) -> dict[str, float]:
    """Seconds to the first batch of a resumed and of a new epoch, each in a new process."""
    position = length // BATCH * percent // 100 // 2 * 2
    with tempfile.TemporaryDirectory() as folder:
        files, wanted = {}, {}
        for side in sides:
            state = changed(early_state(side, length, shuffle), position)
            torch.save(state, file := f"{folder}/{side}")
            files[side] = file
            indices = order(side, state, length) if shuffle else torch.arange(length)
            wanted[side] = indices[position * BATCH : (position + 1) * BATCH].tolist()

        def measure(side: str, file: str | None) -> float:
            taken, batch = in_new_process(side, length, shuffle, file)
            if batch != (wanted[side] if file else batch):
                raise Failure(f"{side} resumed with {batch[:4]} ... in place of {wanted[side][:4]} ...")
            return taken

        measures = {}
        for side in sides:
            measures[side] = lambda side=side: measure(side, files[side])
            measures[f"{side}, new"] = lambda side=side: measure(side, None)
        if shuffle:
            measures["bound"] = lambda: seconds(lambda: torch.randperm(length))
        return median(rounds, measures)


def sequential(sides: list[str], rounds: int) -> Result:
    found = resumed(sides, rounds, 100_000_000, 50, shuffle=False)
    over = {side: found[side] - found[f"{side}, new"] for side in sides}
    cells = {side: f"{value:,.3f} s over a new epoch" for side, value in over.items()}
    beside = "new epoch: " + ", ".join(f"{side} {found[f'{side}, new']:.3f} s" for side in sides)
    held = over["rustloader"] <= 0.1 if "rustloader" in over else None
    what = "first batch at 50 % of 100,000,000 sequential indices"
    return Result("sequential", what, "at most 0.1 s over a new epoch", cells, beside, held)


def shuffled(sides: list[str], rounds: int) -> Result:
    found = resumed(sides, rounds, 10_000_000, 99, shuffle=True)
    cells = {side: f"{found[side]:,.3f} s" for side in sides}
    beside = f"`torch.randperm`: {found['bound']:.3f} s"
    held = found["rustloader"] <= found["bound"] + 0.1 if "rustloader" in sides else None
    what = "first batch at 99 % of 10,000,000 shuffled indices"
    return Result("shuffled", what, "at most 0.1 s over the permutation", cells, beside, held)


class Counted:
    """default_collate, with a number of its calls in all processes."""

    def __init__(self) -> None:
        self.calls = multiprocessing.get_context("fork").Value("i", 0)

    def __call__(self, samples: list[Any]) -> Any:
        with self.calls.get_lock():
            self.calls.value += 1
        return torch.utils.data.default_collate(samples)


def bare_walk(processes: int, samples: int) -> float:
    """Seconds that the slowest of some processes needs to draw its samples."""
    reader, writer = os.pipe()
    for _ in range(processes):
        if os.fork() == 0:
            os.write(writer, f"{seconds(lambda: list(Walk(samples))):.6f}\n".encode())
            os._exit(0)
    os.close(writer)
    for _ in range(processes):
        os.wait()
    with open(reader) as lines:
        return max(float(line) for line in lines)


def iterable(sides: list[str], rounds: int) -> Result:
    size, workers, each = 16, 4, 200  # batches of each worker
    half = workers * each // 2

    def make(side: str, collate: Counted) -> Any:
        return loader_class(side)(Walk(each * size), size, num_workers=workers, collate_fn=collate)

    states, wanted = {}, {}
    for side in sides:
        loader = make(side, Counted())
        iterator = iter(loader)
        for _ in itertools.islice(iterator, half):
            pass
        states[side] = loader.state_dict()
        wanted[side] = next(iterator).tolist()
        del iterator
    collated: dict[str, list[int]] = {side: [] for side in sides}

    def measure(side: str) -> float:
        start = time.perf_counter()
        loader = make(side, counted := Counted())
        loader.load_state_dict(states[side])
        batch = next(iter(loader))
        taken = time.perf_counter() - start
        collated[side].append(counted.calls.value)
        if batch.tolist() != wanted[side]:
            raise Failure(f"{side} resumed with {batch.tolist()} in place of {wanted[side]}")
        return taken

    measures = {side: lambda side=side: measure(side) for side in sides}
    found = median(rounds, measures | {"bound": lambda: bare_walk(workers, each // 2 * size)})
    cells = {side: f"{found[side]:.3f} s, {max(collated[side])} batches collated" for side in sides}
    held = None
    if "rustloader" in sides:
        # The first batches of the resumed epoch are prefetched: at most two of each worker.
        held = found["rustloader"] <= 1.1 * found["bound"] and max(collated["rustloader"]) <= 2 * workers
    what = "first batch at 50 % of an iterable dataset without a state, 1 ms a sample, 4 workers"
    return Result("iterable", what, "at most 1.1 of the walk", cells, f"the walk alone: {found['bound']:.3f} s", held)


def size(sides: list[str], rounds: int) -> Result:
    sizes = {side: {"sequential": len(pickle.dumps(early_state(side, 100_000_000, False)))} for side in sides}
    if "rustloader" in sides:  # torchdata's loader would hold two lists of 100,000,000 integers
        sizes["rustloader"]["shuffled"] = len(pickle.dumps(early_state("rustloader", 100_000_000, True)))
    cells = {side: ", ".join(f"{kind} {value:,} B" for kind, value in found.items()) for side, found in sizes.items()}
    held = max(sizes["rustloader"].values()) <= 8192 if "rustloader" in sides else None
    return Result("size", "a pickled state in 100,000,000 indices", "at most 8,192 B", cells, "", held)


ROWS: dict[str, Callable[[list[str], int], Result]] = {
    "state": state,
    "rate": rate,
    "sequential": sequential,
    "shuffled": shuffled,
    "iterable": iterable,
    "large": large,
    "size": size,
}


# --- output ----------------------------------------------------------------------------------------


def line(result: Result) -> str:
    mark = {True: "reached", False: "MISSED", None: "not compared"}[result.held]
    lines = [f"{result.row}: {result.what}; goal: {result.goal}: {mark}"]
    lines += [f"    {side:<12}{text}" for side, text in result.cells.items()]
    return "\n".join([*lines, f"    {result.beside}"] if result.beside else lines)


def table_of(results: list[Result]) -> str:
    """A table in Markdown, a line per row."""
    lines = ["| what | rustloader | torchdata | beside it | goal |", "|---|---|---|---|---|"]
    for result in results:
        cells = [result.what, *(result.cells.get(side, "") for side in MODULES), result.beside, result.goal]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), metavar="NAME,...", help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="of each row (default: %(default)s)")
    parser.add_argument("--sides", default=",".join(MODULES), metavar="NAME,...", help="default: %(default)s")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/performance.md")
    parser.add_argument("--child", metavar="TASK", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, known in ((options.rows, ROWS), (options.sides, MODULES)):
        for part in name.split(","):
            if part not in known:
                parser.error(f"no {part}; there are {', '.join(known)}")
    return options


def main() -> int:
    options = parse_arguments()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.child:
        child(options.child)
        return 0
    sides, results = options.sides.split(","), []
    for name in options.rows.split(","):
        print(name, file=sys.stderr)
        results.append(ROWS[name](sides, options.rounds))
        print(line(results[-1]), flush=True)
    if options.save:
        options.save.write_text(json.dumps([vars(result) for result in results], indent=1) + "\n")
    if options.docs:
        report.write(Path(__file__).parents[1] / "docs" / "performance.md", table_of(results), "<!-- resuming -->")
    return 1 if any(result.held is False for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
