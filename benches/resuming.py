"""Measures the cost of saving and resuming a position: `make compare KIND=resuming`.

Each row runs rustloader's StatefulDataLoader and torchdata's in turn, with a lower bound where there is one. The
figures are medians of the rounds, with confidence intervals. The first batch of a resumed epoch is compared with
the expected one.

    state       time per call of state_dict() in mid-epoch; a map-style dataset, 2 workers
    rate        batches per second with and without a state_dict() after each; tokens, batch 32, 2 persistent workers
    sequential  time to the first batch at 50 % of 100,000,000 indices, less that of a new epoch; each in a new process
    shuffled    time to the first batch at 99 % of 10,000,000 shuffled indices. Bound: torch.randperm
    iterable    time to the first batch at 50 % of an iterable dataset without a state; 1 ms per sample, 4 workers.
                Bound: four bare processes that read the same samples
    large       batches per second of an iterable dataset with a state of 10 MB and of the same dataset without one;
                snapshot_every_n_steps=1, 1 ms per sample, 2 workers
    size        bytes of a pickled state in an epoch of 100,000,000 indices

`sequential` and `shuffled` resume from a state that was saved after the second batch and whose counts were changed.
"""

import importlib
import itertools
import multiprocessing
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rows
import torch
import torch.utils.data
from floors import seconds
from harness.processes import at_once, fresh
from harness.program import Program, main

from rustloader.tools.harness.rounds import Failure, Rounds, spread

SIDES = {"rustloader": "rustloader.stateful_dataloader", "torchdata": "torchdata.stateful_dataloader"}
BATCH = 64
SEED = 5


def loader_class(side: str) -> Any:
    return importlib.import_module(SIDES[side]).StatefulDataLoader


def each(measure: Callable[..., Any], *arguments: Any) -> dict[str, Callable[[], Any]]:
    """Returns, for each side, a function that measures the side."""
    return {side: lambda side=side: measure(side, *arguments) for side in SIDES}


def epoch_of(loader: Any, batches: int, each_batch: Callable[[], object] = int) -> float:
    """Returns the batches per second of an epoch."""
    count, start = 0, time.perf_counter()
    for _ in loader:
        count += 1
        each_batch()
    if count != batches:
        raise Failure(f"{count} batches instead of {batches}")
    return batches / (time.perf_counter() - start)


# --- in mid-epoch ----------------------------------------------------------------------------------


def state(row: str) -> None:
    calls, batches = 1000, 200

    def measure(side: str) -> dict[str, float]:
        loader = loader_class(side)(range(BATCH * (batches + 8)), BATCH, num_workers=2)
        iterator = iter(loader)
        once = [seconds(loader.state_dict) for _ in itertools.islice(iterator, batches)]
        again = statistics.median(seconds(loader.state_dict) for _ in range(calls))
        return {"once": statistics.median(once) * 1e6, "again": again * 1e6}

    rounds = program.interleave(each(measure), row)
    cells = {side: spread(rounds.of(side, "again"), "{:,.1f} us".format) for side in SIDES}
    single = ", ".join(f"{side} {rounds.median(side, 'once'):,.1f} us" for side in SIDES)
    held = rounds.median("rustloader", "again") <= 8
    what = "`state_dict()`, map-style, 2 workers"
    result(row, what, cells, f"once after each batch: {single}", "at most 8 us", held, rounds)


def rate(row: str) -> None:
    size, batches = 32, 400
    dataset = rows.Samples(rows.tokens(), size * batches)
    loaders = {side: loader_class(side)(dataset, size, num_workers=2, persistent_workers=True) for side in SIDES}
    for loader in loaders.values():
        epoch_of(loader, batches, loader.state_dict)
    sides = {side: lambda it=it: epoch_of(it, batches, it.state_dict) for side, it in loaders.items()}
    without = {f"{side}, without": lambda it=it: epoch_of(it, batches) for side, it in loaders.items()}
    rounds = program.interleave(sides | without, row)
    ratios = {side: rounds.ratios(side, f"{side}, without") for side in SIDES}
    rates = {side: f"{rounds.median(side):,.0f}/s" for side in SIDES}
    cells = {
        side: f"{spread(values, '{:.2f}'.format)} of the rate without, {rates[side]}" for side, values in ratios.items()
    }
    gain = rounds.ratio("rustloader", "torchdata")
    held = statistics.median(ratios["rustloader"]) >= 0.85 and gain >= 5
    what = "a `state_dict()` after every batch: tokens, batch 32, 2 persistent workers"
    goal = "at least 0.85, and 5 times torchdata's rate"
    result(row, what, cells, f"{gain:.1f} times torchdata's rate", goal, held, rounds)


class Walk(torch.utils.data.IterableDataset):
    """A stream of `count` samples per worker. Each sample takes `nap` seconds."""

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
    """A `Walk` with a position and 10 MB of strings, like those in a shuffle buffer."""

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
    """A `Buffer` whose state is the position and the strings."""

    def state_dict(self) -> dict[str, Any]:
        return {"buffer": self.buffer, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buffer, self.position = state["buffer"], state["position"]


def large(row: str) -> None:
    size, workers = 16, 2
    # torchdata is much slower, so it gets a shorter epoch.
    lengths = {"rustloader": 1200, "torchdata": 100}

    def epoch(side: str, dataset: type[Walk]) -> float:
        walk = dataset(lengths[side] // workers * size)
        loader = loader_class(side)(walk, size, num_workers=workers, snapshot_every_n_steps=1)
        return epoch_of(loader, lengths[side])

    without = {f"{side}, without": measure for side, measure in each(epoch, Buffer).items()}
    rounds = program.interleave(each(epoch, Stateful) | without, row)
    ratios = {side: rounds.ratios(side, f"{side}, without") for side in SIDES}
    cells = {side: f"{spread(values, '{:.3f}'.format)} of the rate without" for side, values in ratios.items()}
    held = statistics.median(ratios["rustloader"]) >= 0.98
    what = "a dataset with a state of 10 MB, `snapshot_every_n_steps=1`, 16 samples of 1 ms, 2 workers"
    result(row, what, cells, "", "at least 0.98", held, rounds)


# --- resuming --------------------------------------------------------------------------------------


def changed(value: Any, position: int) -> Any:
    """Returns a copy of a state in which the counts say that ``position`` batches have been delivered."""
    numbers = dict.fromkeys(("_snapshot_step", "_num_yielded", "_sampler_iter_yielded", "delivered"), position)
    numbers |= dict.fromkeys(("samples_yielded", "yielded"), position * BATCH)
    if not isinstance(value, dict):
        return value
    return {key: numbers[key] if key in numbers else changed(inner, position) for key, inner in value.items()}


def first_in(value: Any, name: str) -> Any:
    """Returns the first value other than None under the key ``name`` in a nested dict; None if there is none."""
    if not isinstance(value, dict):
        return None
    if value.get(name) is not None:
        return value[name]
    return next((match for inner in value.values() if (match := first_in(inner, name)) is not None), None)


def order(side: str, state: Any, length: int) -> torch.Tensor:
    """Returns the indices of the shuffled epoch whose state `early_state` returned."""
    generator = torch.Generator()
    if side == "torchdata":
        generator.set_state(first_in(state, "generator"))
    else:
        # torch draws the workers' seed first, then the sampler's.
        torch.manual_seed(SEED)
        seeds = [int(torch.empty((), dtype=torch.int64).random_().item()) for _ in range(2)]
        generator.manual_seed(seeds[1])
    return torch.randperm(length, generator=generator)


def early_state(side: str, length: int, shuffle: bool) -> Any:
    """Returns the state after two batches."""
    torch.manual_seed(SEED)
    loader = loader_class(side)(range(length), BATCH, shuffle=shuffle, num_workers=2)
    iterator = iter(loader)
    for _ in itertools.islice(iterator, 2):
        pass
    return loader.state_dict()


def first_batch(side: str, length: int, shuffle: bool, file: str | None) -> tuple[float, list[int]]:
    """Returns the seconds from the loader's construction to the first batch, and that batch."""
    torch.set_num_threads(1)
    state = None if file is None else torch.load(file)
    start = time.perf_counter()
    loader = loader_class(side)(range(length), BATCH, shuffle=shuffle, num_workers=2)
    if state is not None:
        loader.load_state_dict(state)
    batch = next(iter(loader))
    return time.perf_counter() - start, batch.tolist()


def resumed(row: str, length: int, percent: int, shuffle: bool) -> Rounds:
    """Returns the seconds to the first batch of a resumed and of a new epoch, each in a new process."""
    position = length // BATCH * percent // 100 // 2 * 2
    with tempfile.TemporaryDirectory() as folder:
        expected = {}
        for side in SIDES:
            state = changed(early_state(side, length, shuffle), position)
            torch.save(state, f"{folder}/{side}")
            indices = order(side, state, length) if shuffle else torch.arange(length)
            expected[side] = indices[position * BATCH : (position + 1) * BATCH].tolist()

        def measure(side: str) -> float:
            seconds_taken, batch = fresh(first_batch, side, length, shuffle, f"{folder}/{side}")
            if batch != expected[side]:
                raise Failure(f"{side} resumed with {batch[:4]} ... instead of {expected[side][:4]} ...")
            return seconds_taken

        new = {f"{side}, new": lambda side=side: fresh(first_batch, side, length, shuffle, None)[0] for side in SIDES}
        bound = {"bound": lambda: seconds(lambda: torch.randperm(length))} if shuffle else {}
        return program.interleave(each(measure) | new, row, references=bound)


def sequential(row: str) -> None:
    rounds = resumed(row, 100_000_000, 50, shuffle=False)
    pairs = {side: zip(rounds[side], rounds[f"{side}, new"], strict=True) for side in SIDES}
    extra = {side: [resumed - new for resumed, new in each] for side, each in pairs.items()}
    cells = {side: f"{spread(values, '{:,.3f} s'.format)} over a new epoch" for side, values in extra.items()}
    reference = "new epoch: " + ", ".join(f"{side} {rounds.median(f'{side}, new'):.3f} s" for side in SIDES)
    held = statistics.median(extra["rustloader"]) <= 0.1
    what = "first batch at 50 % of 100,000,000 sequential indices"
    result(row, what, cells, reference, "at most 0.1 s over a new epoch", held, rounds)


def shuffled(row: str) -> None:
    rounds = resumed(row, 10_000_000, 99, shuffle=True)
    cells = {side: spread(rounds[side], "{:,.3f} s".format) for side in SIDES}
    held = rounds.median("rustloader") <= rounds.median("bound") + 0.1
    what = "first batch at 99 % of 10,000,000 shuffled indices"
    reference = f"`torch.randperm`: {rounds.median('bound'):.3f} s"
    result(row, what, cells, reference, "at most 0.1 s over the permutation", held, rounds)


class Counted:
    """A collate function that calls default_collate, and counts its calls in all processes."""

    def __init__(self) -> None:
        self.calls = multiprocessing.get_context("fork").Value("i", 0)

    def __call__(self, samples: list[Any]) -> Any:
        with self.calls.get_lock():
            self.calls.value += 1
        return torch.utils.data.default_collate(samples)


def iterable(row: str) -> None:
    size, workers, batches = 16, 4, 200  # batches per worker
    half = workers * batches // 2

    def make(side: str, collate: Counted) -> Any:
        return loader_class(side)(Walk(batches * size), size, num_workers=workers, collate_fn=collate)

    states, expected = {}, {}
    for side in SIDES:
        loader = make(side, Counted())
        iterator = iter(loader)
        for _ in itertools.islice(iterator, half):
            pass
        states[side], expected[side] = loader.state_dict(), next(iterator).tolist()
        del iterator

    def measure(side: str) -> dict[str, float]:
        start = time.perf_counter()
        loader = make(side, counted := Counted())
        loader.load_state_dict(states[side])
        batch = next(iter(loader)).tolist()
        seconds_taken = time.perf_counter() - start
        if batch != expected[side]:
            raise Failure(f"{side} resumed with {batch} instead of {expected[side]}")
        return {"seconds": seconds_taken, "collated": counted.calls.value}

    def bare_walk() -> dict[str, float]:
        return {"seconds": at_once(workers, lambda _: lambda: list(Walk(batches // 2 * size)))}

    rounds = program.interleave(each(measure), row, references={"bound": bare_walk})
    collated = {side: max(rounds.of(side, "collated")) for side in SIDES}
    times = {side: spread(rounds.of(side, "seconds"), "{:.3f} s".format) for side in SIDES}
    cells = {side: f"{text}, {collated[side]} batches collated" for side, text in times.items()}
    bound = rounds.median("bound", "seconds")
    # The first batches of the resumed epoch are prefetched: at most two per worker.
    held = rounds.median("rustloader", "seconds") <= 1.1 * bound and collated["rustloader"] <= 2 * workers
    what = "first batch at 50 % of an iterable dataset without a state, 1 ms per sample, 4 workers"
    result(row, what, cells, f"reading the samples alone: {bound:.3f} s", "at most 1.1 times the reading", held, rounds)


def size(row: str) -> None:
    sizes = {side: {"sequential": len(pickle.dumps(early_state(side, 100_000_000, False)))} for side in SIDES}
    # torchdata is left out, because its loader would hold two lists of 100,000,000 integers.
    sizes["rustloader"]["shuffled"] = len(pickle.dumps(early_state("rustloader", 100_000_000, True)))
    cells = {
        side: ", ".join(f"{kind} {value:,} B" for kind, value in bytes_of.items()) for side, bytes_of in sizes.items()
    }
    held = max(sizes["rustloader"].values()) <= 8192
    result(row, "pickled state, epoch of 100,000,000 indices", cells, "", "at most 8,192 B", held, sizes)


ROWS = {it.__name__: it for it in (state, rate, sequential, shuffled, iterable, large, size)}
DOCS = Path(__file__).parent / "RESULTS.md"
program = Program(__doc__, list(ROWS), docs=(DOCS, "<!-- resuming -->"))


def result(row: str, what: str, cells: dict[str, str], reference: str, goal: str, held: bool, figures: object) -> None:
    program.line(row, what, *(cells[side] for side in SIDES), reference, goal, held=held, rounds=figures)


if __name__ == "__main__":
    main(program, lambda row: ROWS[row](row), "what", *SIDES, "for comparison", "goal")
