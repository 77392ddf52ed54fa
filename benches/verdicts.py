"""Measures what the remedies of verdicts gain: `make compare KIND=verdicts`.

Each row is a loop with one bottleneck, and the same loop after the remedy that its verdict names. A row fails if the
verdict of the first loop is of another kind than expected, or if the remedy gains less than 1.05 times, or less than
four fifths of what the verdict predicts. Work is a sleep where the cores do not matter.

With `--agree 60`, each loop runs 60 times instead, and its verdicts must be of one kind in 95 of 100 runs; with `--busy
2`, beside two processes that compute. An idle machine is needed only without `--agree`.
"""

import collections
import contextlib
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.data
from harness.program import Program

import rustloader
from rustloader.tools.harness.rounds import Failure, spread

# The share of runs whose verdicts must agree, the gain below which a remedy does not pay, and the share of the
# predicted gain that a remedy must have.
AGREEING, PAYS, SHARE = 0.95, 1.05, 0.8


def compute(seconds: float) -> None:
    """Uses a core for a time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Work(torch.utils.data.Dataset):
    """A dataset whose samples sleep or compute for a time; `slow` has the times of some samples."""

    def __init__(self, length: int, sleeps: float = 0.0, computes: float = 0.0, slow: dict[int, float] | None = None):
        self.length, self.sleeps, self.computes, self.slow = length, sleeps, computes, slow or {}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if seconds := self.slow.get(index, self.sleeps):
            time.sleep(seconds)
        if self.computes:
            compute(self.computes)
        return torch.zeros(8)


class Sampler(torch.utils.data.Sampler):
    """A sampler that takes a time per index."""

    def __init__(self, length: int, seconds: float):
        self.length, self.seconds = length, seconds

    def __iter__(self) -> Iterator[int]:
        for index in range(self.length):
            time.sleep(self.seconds)
            yield index

    def __len__(self) -> int:
        return self.length


class Stream(torch.utils.data.IterableDataset):
    """A dataset whose samples sleep for a time. Every tenth sample of a worker takes far longer."""

    def __init__(self, length: int, sleeps: float):
        self.length, self.sleeps = length, sleeps

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        for index in range(self.length):
            time.sleep(0.06 if (index + 3 * worker.id) % 10 == 5 else self.sleeps)
            yield torch.zeros(8)


class Packed:
    """A type that takes a time to pickle."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        compute(0.008)
        return Packed, ()


class Pair:
    """A type that has to be pickled."""

    def __init__(self, values: list[float]):
        self.values = values


def collate_by_hand(samples: list[torch.Tensor]) -> torch.Tensor:
    compute(0.008)
    return torch.stack(samples)


def collate_objects(samples: list[torch.Tensor]) -> list[Pair]:
    return [Pair([float(number)] * 40) for number in range(1500)]


def collate_packed(samples: list[torch.Tensor]) -> Packed:
    return Packed()


def collate_arrays(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.zeros(1500, 40)


@dataclass
class Loop:
    """A loop over a loader. `step` is the training step."""

    arguments: dict[str, Any]
    step: Callable[[], object] | None = None
    epochs: int = 1

    def loader(self) -> rustloader.DataLoader:
        return rustloader.DataLoader(**{"batch_size": None, "num_workers": 2} | self.arguments)

    def run(self, loader: Any) -> float:
        """Returns the batches per second of an epoch, or of several with what is between them."""
        count, start, first = 0, time.perf_counter(), 0.0
        for _ in range(self.epochs):
            for _ in loader:
                count += 1
                if count == 1 and self.epochs == 1:
                    first = time.perf_counter() - start
                if self.step is not None:
                    self.step()
        return count / (time.perf_counter() - start - first)


@dataclass
class Row:
    """A loop, the kind of its verdict, and the loop after the remedy; None if there is none to measure."""

    kind: str
    loop: Loop
    remedy: str = ""
    after: Callable[[rustloader.Verdict], Loop] | None = None
    # Processes that compute beside the first loop.
    beside: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


def sleeping(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


def spikes(length: int) -> dict[int, float]:
    return {index: 0.06 for index in range(5, length, 10)}


def same(dataset: Any, step: Callable[[], object] | None = None, **arguments: Any) -> Callable[[object], Loop]:
    return lambda verdict: Loop({"dataset": dataset, **arguments}, step)


QUICK = torch.utils.data.TensorDataset(torch.randn(1000, 3, 32, 32), torch.randint(10, (1000,)))
QUICK_ARGUMENTS = {"dataset": QUICK, "batch_size": 25, "shuffle": True}
# Nearly as many computing samples as a machine with two cores can make.
BUSY = Work(200, computes=0.01)
NAPS = Work(150, sleeps=0.02)
UNEVEN = {"dataset": Work(300, sleeps=0.0045, slow=spikes(300)), "num_workers": 4}

ROWS: dict[str, Row] = {
    "quick": Row("too_few", Loop(QUICK_ARGUMENTS)),
    "quick-epochs": Row(
        "starting",
        Loop(QUICK_ARGUMENTS, epochs=40),
        "persistent_workers=True",
        lambda verdict: Loop(QUICK_ARGUMENTS | {"persistent_workers": True}, epochs=40),
    ),
    "step": Row("step", Loop({"dataset": Work(150, sleeps=0.002)}, sleeping(0.01))),
    "workers": Row(
        "workers",
        Loop({"dataset": Work(150, computes=0.012), "num_workers": 1}, sleeping(0.008)),
        "num_workers as it says",
        lambda verdict: Loop(
            {"dataset": Work(150, computes=0.012), "num_workers": verdict.workers_needed}, sleeping(0.008)
        ),
    ),
    "storage": Row(
        "storage",
        Loop({"dataset": NAPS}, sleeping(0.005)),
        "num_workers as it says",
        lambda verdict: Loop({"dataset": NAPS, "num_workers": verdict.workers_needed}, sleeping(0.005)),
    ),
    "storage-threads": Row(
        "storage",
        Loop({"dataset": Work(800, sleeps=0.005), "batch_size": 8}, sleeping(0.005)),
        "worker_threads=8",
        same(Work(800, sleeps=0.005), sleeping(0.005), batch_size=8, worker_threads=8),
    ),
    "dataset": Row(
        "dataset",
        Loop({"dataset": BUSY}, sleeping(0.001)),
        "rustloader.cache(dataset), second epoch",
        lambda verdict: Loop({"dataset": rustloader.cache(BUSY)}, sleeping(0.001)),
        extra={"warm": True},
    ),
    "cores": Row(
        "cores",
        Loop({"dataset": Work(150, computes=0.005)}, sleeping(0.004)),
        "end the other programs",
        same(Work(150, computes=0.005), sleeping(0.004)),
        beside=3 * (os.cpu_count() or 1),
    ),
    "collate": Row(
        "collate",
        Loop(
            {"dataset": Work(1200), "batch_size": 8, "collate_fn": collate_by_hand, "num_workers": 1}, sleeping(0.004)
        ),
        "default_collate",
        same(Work(1200), sleeping(0.004), batch_size=8, num_workers=1),
    ),
    "head-of-line": Row(
        "head_of_line",
        Loop(UNEVEN, sleeping(0.001)),
        "shared_queue and the window that it says",
        lambda verdict: Loop(
            UNEVEN | {"dispatch": "shared_queue", "reorder_window": window_in(verdict.sentence)}, sleeping(0.001)
        ),
    ),
    "head-of-line-order": Row(
        "head_of_line",
        Loop(UNEVEN, sleeping(0.001)),
        "in_order=False",
        lambda verdict: Loop(UNEVEN | {"in_order": False}, sleeping(0.001)),
    ),
    "head-of-line-prefetch": Row(
        "head_of_line",
        Loop({"dataset": Stream(80, 0.0045), "num_workers": 4}, sleeping(0.001)),
        "prefetch_factor=16",
        same(Stream(80, 0.0045), sleeping(0.001), num_workers=4, prefetch_factor=16),
    ),
    "sampler": Row(
        "main",
        Loop({"dataset": Work(150), "sampler": Sampler(150, 0.005)}, sleeping(0.002)),
        "a sampler that takes no time",
        same(Work(150), sleeping(0.002)),
    ),
    "opening": Row(
        "main",
        Loop({"dataset": Work(150), "collate_fn": collate_objects, "batch_size": 1}),
        "a tensor instead of pickled objects",
        same(Work(150), None, collate_fn=collate_arrays, batch_size=1),
    ),
    "transport": Row(
        "transport",
        # Four workers for what one could make: each batch waits for a message and a wake-up.
        Loop({"dataset": Work(120_000), "num_workers": 4, "prefetch_factor": 1}),
        "batches of 64 samples",
        same(Work(120_000), None, batch_size=64, num_workers=4, prefetch_factor=1),
        extra={"samples": 64},
    ),
    "packing": Row(
        "transport",
        Loop({"dataset": Work(150), "batch_size": 1, "collate_fn": collate_packed, "num_workers": 1}, sleeping(0.003)),
        "default_collate",
        same(Work(150), sleeping(0.003), batch_size=1, num_workers=1),
    ),
}


def window_in(sentence: str) -> int:
    return int(sentence.partition("reorder_window=")[2].partition(" ")[0].rstrip(".,"))


program = Program(__doc__, list(ROWS), rounds=5)
program.option("--agree", type=int, metavar="N", help="run each loop N times, and compare the kinds of its verdicts")
program.option("--busy", type=int, default=0, metavar="N", help="with --agree: processes that compute beside the loops")


@contextlib.contextmanager
def computing(processes: int) -> Iterator[None]:
    """Runs processes that compute."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def judged(row: Row) -> tuple[rustloader.Verdict, float]:
    """Runs a row's loop once. Returns its verdict, and its batches per second."""
    with computing(row.beside):
        loader = row.loop.loader()
        rate = row.loop.run(loader)
    return rustloader.stats(loader).verdict(), rate


def agree(name: str) -> None:
    with computing(program.options.busy):
        kinds = collections.Counter(judged(ROWS[name])[0].kind for _ in range(program.options.agree))
    (_, most), text = kinds.most_common(1)[0], ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
    program.line(name, name, text, held=most >= AGREEING * program.options.agree, kinds=kinds)


def measure(name: str) -> None:
    if program.options.agree:
        return agree(name)
    row, gains, verdict = ROWS[name], [], None
    for _ in range(program.options.rounds):
        verdict, before = judged(row)
        if verdict.kind != row.kind:
            raise Failure(f"the verdict is {verdict.kind} instead of {row.kind}: {verdict}")
        if row.after is not None:
            loop = row.after(verdict)
            loader = loop.loader()
            if row.extra.get("warm"):
                loop.run(loader)
            gains.append(loop.run(loader) * row.extra.get("samples", 1) / before)
    assert verdict is not None
    said = re.search(r"(Predicted|Largest possible) gain: ([\d.]+)", verdict.sentence)
    predicted = "-" if said is None else f"{'at most ' * (said[1] != 'Predicted')}{said[2]}"
    least = max(PAYS, SHARE * (verdict.predicted_gain or 0.0))
    cells = [row.remedy, predicted, spread(gains, "{:.2f}".format) if gains else "-"]
    held = not gains or statistics.median(gains) >= least
    program.line(name, name, verdict.kind, *cells, held=held, gains=gains, predicted=predicted)


if __name__ == "__main__":
    options = program.parse()
    head = ["loop", "verdicts"] if options.agree else ["loop", "verdict", "remedy", "predicted gain", "measured gain"]
    sys.exit(program.run(measure, head))
