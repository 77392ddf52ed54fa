"""Measures what `rustloader.share` saves and costs, for 1,000,000 items: `make compare KIND=sharing`.

Each measurement is a separate program, in a fresh interpreter. The sides take turns. A figure is the median of the
rounds, with its confidence interval.

memory   private memory that a forked worker gains in one shuffled epoch, with 2 workers: torch's loader and
         rustloader's with a plain object, rustloader's with a shared one
reads    microseconds of CPU time to read an item in a worker, in random order, in later epochs: a plain object, a
         shared one, and the median of the rounds' differences
build    seconds and peak memory of share(): with the original in memory, and without one (from a generator)
"""

import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.utils.data
from harness.processes import fresh
from harness.program import Program, main, missed

import rustloader
from rustloader.system.procfs import amounts, private, read
from rustloader.tools.harness.rounds import Rounds, spread

ITEMS = 1_000_000
MB = 1e6
# Goals: maximum megabytes that a worker gains, and maximum extra microseconds for a read of a shared object.
GAIN, LONGER = 10, 0.5
READS, TURNS = 100_000, 7


def name(number: int) -> str:
    """Returns an item: a str of about 60 bytes."""
    return f"{number:07d}.jpg"


KINDS: dict[str, Callable[[], Any]] = {
    "list of str": lambda: [name(number) for number in range(ITEMS)],
    "dict of str to int": lambda: {name(number): number for number in range(ITEMS)},
    "list of tuples": lambda: [(name(number), number) for number in range(ITEMS)],
}
STREAMS: dict[str, Callable[[], Iterable[Any]]] = {
    "list of str": lambda: (name(number) for number in range(ITEMS)),
    "list of tuples": lambda: ((name(number), number) for number in range(ITEMS)),
}
SIDES = ("torch, plain", "rustloader, plain", "rustloader, shared")


class Reading(torch.utils.data.Dataset):
    """A dataset whose samples are numbers, each computed from an item."""

    def __init__(self, items: Any):
        self.items = items
        self.has_keys = isinstance(items, Mapping)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> int:
        return len(str(self.items[name(index) if self.has_keys else index]))


def memory(kind: str, side: str) -> dict[str, float]:
    """Returns the megabytes of private memory that a worker gains on average."""
    items = KINDS[kind]()
    if side.endswith("shared"):
        items = rustloader.share(items)
    loader_class = torch.utils.data.DataLoader if side.startswith("torch") else rustloader.DataLoader
    before = torch.zeros(2, dtype=torch.int64).share_memory_()

    def note(worker: int) -> None:
        before[worker] = private(os.getpid()) or 0

    settings: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
    loader = loader_class(Reading(items), batch_size=500, shuffle=True, collate_fn=sum, worker_init_fn=note, **settings)
    batches = iter(loader)
    total = sum(batches)
    assert total > ITEMS
    workers = batches._workers  # type: ignore[attr-defined]
    after = [private(worker.pid) or 0 for worker in workers]
    return {"gain": sum(after[worker] - int(before[worker]) for worker in range(2)) / 2 / MB}


class Timing(torch.utils.data.Dataset):
    """A dataset with one sample: for each turn, the microseconds per read of the plain and of the shared object."""

    def __init__(self, plain: Any, shared: Any):
        self.sides = plain, shared

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> list[tuple[float, float]]:
        order = random.Random(index).sample(range(ITEMS), READS)
        for items in self.sides:
            # The first reads of a plain object copy its pages to this process, so they are not timed.
            for number in range(ITEMS):
                items[name(number) if isinstance(items, Mapping) else number]
        timings = []
        for turn in range(TURNS):
            times = [0.0, 0.0]
            for side in (0, 1) if turn % 2 == 0 else (1, 0):
                times[side] = self.read(self.sides[side], order)
            timings.append((times[0], times[1]))
        return timings

    def read(self, items: Any, order: list[int]) -> float:
        # The strings are new, so their hashes have not been computed yet.
        keys: list[Any] = [name(number) for number in order] if isinstance(items, Mapping) else order
        start = time.process_time()
        for key in keys:
            items[key]
        return (time.process_time() - start) / len(keys) * 1e6


def reads(kind: str, side: str) -> dict[str, float]:
    """Returns the microseconds per read in a worker: of a plain and a shared object, and the difference."""
    plain = KINDS[kind]()
    loader = rustloader.DataLoader(
        Timing(plain, rustloader.share(plain)), batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    (turns,) = loader
    return {
        "plain": statistics.median(plain for plain, _ in turns),
        "shared": statistics.median(shared for _, shared in turns),
        "longer": statistics.median(shared - plain for plain, shared in turns),
    }


def build(kind: str, side: str) -> dict[str, float]:
    """Returns the seconds, the megabytes of the result, and the peak growth of this process's other memory."""
    items = STREAMS[kind]() if side == "generator" else KINDS[kind]()
    # Resets the peak to the memory that is resident now.
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before, start = amounts(read("/proc/self/status"))["VmRSS"], time.perf_counter()
    shared = rustloader.share(items)
    seconds = time.perf_counter() - start
    # The peak excludes the result: it may be mapped, but its pages become resident only when they are read.
    return {
        "seconds": seconds,
        "size": shared.nbytes / MB,
        "peak": (amounts(read("/proc/self/status"))["VmHWM"] - before) / MB,
    }


PARTS = {"memory": memory, "reads": reads, "build": build}
program = Program(__doc__, list(PARTS), rounds=3)


def figures_of(part: str, kind: str, sides: tuple[str, ...]) -> Rounds:
    """Measures each side in separate programs. Returns the measurements."""
    return program.interleave({side: lambda side=side: fresh(PARTS[part], kind, side) for side in sides}, kind)


def measure(part: str) -> None:
    if part == "memory":
        program.head("private memory that a worker gains", *SIDES, "goal", "")
    elif part == "reads":
        program.head("reading an item", "plain", "shared", "longer", "goal", "")
    else:
        program.head("building", "seconds", "shared memory", "other memory at the peak")
    for kind in KINDS:
        {"memory": memory_line, "reads": reads_line, "build": build_lines}[part](kind)


def memory_line(kind: str) -> None:
    rounds = figures_of("memory", kind, SIDES)
    held = rounds.median(SIDES[-1], "gain") <= GAIN
    gains = [spread(rounds.of(side, "gain"), "{:.1f} MB".format) for side in SIDES]
    program.line("memory", kind, *gains, f"<= {GAIN} MB", missed(held), held=held, kind=kind, rounds=rounds)


def reads_line(kind: str) -> None:
    rounds = figures_of("reads", kind, ("both",))
    cells = [spread(rounds.of("both", key), "{:.2f} us".format) for key in ("plain", "shared", "longer")]
    # The goal applies only to lists of str.
    held = rounds.median("both", "longer") <= LONGER if kind == "list of str" else None
    goal = "" if held is None else f"<= {LONGER} us longer"
    program.line("reads", kind, *cells, goal, missed(held), held=held, kind=kind, rounds=rounds)


def build_lines(kind: str) -> None:
    rounds = figures_of("build", kind, ("original", "generator") if kind in STREAMS else ("original",))
    for side in rounds:
        forms = {"seconds": "{:.2f} s", "size": "{:.1f} MB", "peak": "{:.1f} MB"}
        cells = [spread(rounds.of(side, key), form.format) for key, form in forms.items()]
        program.line("build", kind + ", from a generator" * (side == "generator"), *cells, kind=kind, rounds=rounds)


if __name__ == "__main__":
    main(program, measure)
