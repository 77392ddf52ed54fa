"""Part 1 of the demo: measures torch without workers, torch with workers, and rustloader on each workload."""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils.data

import rustloader
from demo.settings import Settings
from demo.workloads import Workload
from rustloader.tools.harness.progress import Progress
from rustloader.tools.harness.rounds import Failure, interleave
from rustloader.tools.probe.leaves import summary

__all__ = ["NO_WORKERS", "OURS", "STEP", "TORCH", "Failure", "Result", "Timeline", "measure", "record"]

NO_WORKERS, TORCH, OURS = "torch, no workers", "torch", "rustloader"
SEED = 7
CHECKED = 4  # batches that are compared before a workload is measured
SHOWN = 24  # batches in the picture's timeline
STEP = 0.005  # seconds of the training step in this timeline; it sleeps, like a process that waits for a GPU


# The spans of each row of a trace: their names, starts and ends in milliseconds.
Timeline = dict[str, list[tuple[str, float, float]]]


@dataclass
class Side:
    """One loader of a workload.

    Attributes:
        name: NO_WORKERS, TORCH or OURS.
        loader: the loader; its workers persist through all rounds.
    """

    name: str
    loader: torch.utils.data.DataLoader[Any]

    def __post_init__(self) -> None:
        self.batches = _forever(self.loader)
        # Number of batches that the workers prefetch.
        self.in_flight = self.loader.num_workers * (self.loader.prefetch_factor or 0)

    def end(self) -> None:
        """Shuts down the workers explicitly, because an interrupt would be lost if `__del__` did it."""
        iterator: Any = self.loader._iterator  # the iterator, if the workers are persistent
        if iterator is not None:
            iterator._shutdown_workers()


@dataclass(frozen=True)
class Result:
    """The measurements of one workload.

    Attributes:
        workload: what was measured.
        rates: batches/s of each round, by the loader's name.
        own_share: the share of their working time that rustloader's workers spend in the dataset's code, from 0 to 1.
    """

    workload: Workload
    rates: dict[str, list[float]]
    own_share: float

    def median(self, name: str) -> float:
        """Returns the median rate of a loader, in batches/s."""
        return statistics.median(self.rates[name])

    def ratio(self, name: str, other: str) -> float | None:
        """Returns how many times as fast one loader is as another; None if the ranges of their rates overlap."""
        one, two = self.rates[name], self.rates[other]
        overlap = min(one) <= max(two) and min(two) <= max(one)
        return None if overlap else self.median(name) / self.median(other)


def measure(workload: Workload, settings: Settings, progress: Progress) -> Result:
    """Checks that both loaders with workers deliver equal batches, then measures a workload in interleaved rounds.

    Raises:
        Failure: the batches differ, or the Rust engine did not deliver all batches of rustloader.
    """
    dataset = workload.dataset(settings.data)
    our_dataset = dataset if workload.ours is None else workload.ours(settings.data)
    torch_loader, our_loader = torch.utils.data.DataLoader, rustloader.DataLoader
    sides = [
        Side(NO_WORKERS, torch_loader(dataset, workload.batch_size, shuffle=True)),
        Side(TORCH, torch_loader(dataset, workload.batch_size, **_with_workers(settings))),
        Side(OURS, our_loader(our_dataset, workload.batch_size, **_with_workers(settings))),
    ]
    progress.say(f"{workload.name}: comparing batches")

    def measured(side: Side) -> float:
        rate = _pass(side, settings)
        progress.step()
        return rate

    measures = {side.name: partial(measured, side) for side in sides}
    try:
        _check_equal(*sides[1:])
        rates = interleave(measures, settings.rounds, workload.name, show=progress.say)
    finally:
        for side in sides:
            side.end()
    workers = rustloader.stats(sides[2].loader).workers
    busy = sum(worker.busy_seconds for worker in workers)
    own = sum(worker.fetch_seconds for worker in workers)
    return Result(workload, rates, own / busy)


def record(workload: Workload, settings: Settings) -> Timeline:
    """Traces rustloader's loader, and returns the timeline of its main process and its workers, for the picture."""
    options = _with_workers(settings) | {"persistent_workers": False}
    loader = rustloader.DataLoader(workload.dataset(settings.data), workload.batch_size, **options)
    with tempfile.TemporaryDirectory(prefix="rustloader-demo-") as folder:
        path = Path(folder) / "trace.json"
        with rustloader.trace(path):
            for _ in itertools.islice(loader, 2 * SHOWN):
                time.sleep(STEP)
        return timeline_of(json.loads(path.read_text()))


def timeline_of(events: list[dict[str, Any]]) -> Timeline:
    """Returns the spans of the second half of a trace's batches, by the name of their row, in milliseconds.

    The first half contains the start of the workers.
    """
    rows = {it["tid"]: it["args"]["name"].partition(" (")[0] for it in events if it["name"] == "thread_name"}
    spans = [(rows[it["tid"]], it["name"], it["ts"] / 1e3, it["dur"] / 1e3) for it in events if it["ph"] == "X"]
    batches = sorted(start + length for _, name, start, length in spans if name == "next")
    first, last = batches[len(batches) // 2], batches[-1]
    timeline: Timeline = {row: [] for row in sorted(rows.values())}
    for row, name, start, length in spans:
        if start < last and start + length > first:
            end = min(start + length, last)
            timeline[row].append((name, max(start, first) - first, end - first))
    return timeline


def _with_workers(settings: Settings) -> dict[str, Any]:
    return {"shuffle": True, "num_workers": settings.workers, "persistent_workers": True}


def _forever(loader: torch.utils.data.DataLoader[Any]) -> Iterator[Any]:
    """Yields the batches of one epoch after another, endlessly."""
    while True:
        yield from loader


def _check_equal(theirs: Side, ours: Side) -> None:
    first = []
    for side in (theirs, ours):
        torch.manual_seed(SEED)  # seeds the order of the samples and the workers' random numbers
        first.append([summary(batch) for batch in itertools.islice(side.batches, CHECKED)])
    for number, (their_parts, our_parts) in enumerate(zip(*first, strict=True)):
        if their_parts != our_parts:
            raise Failure(f"batch {number} differs between torch and rustloader")


def _pass(side: Side, settings: Settings) -> float:
    """Takes batches for some seconds, with a training step after each, and returns the rate in batches/s."""
    gc.collect()
    engine_before = rustloader.engine_batches()
    for _ in range(side.in_flight):
        next(side.batches)  # not timed, because these batches may be ready already
    taken, elapsed = 0, 0.0
    start = time.perf_counter()
    # Takes whole rounds of batches, because the workers may finish at the same time.
    while elapsed < settings.seconds or taken % max(1, side.loader.num_workers):
        next(side.batches)
        time.sleep(settings.step)
        taken += 1
        elapsed = time.perf_counter() - start
    _check_engine(side, rustloader.engine_batches() - engine_before, side.in_flight + taken)
    # Waits while the workers prefetch again, so that they do not take cores from the next loader.
    time.sleep(min(settings.seconds, 1.5 * side.in_flight * elapsed / taken))
    return taken / elapsed


def _check_engine(side: Side, delivered: int, taken: int) -> None:
    if side.name == OURS and delivered != taken:
        raise Failure(f"the Rust engine delivered only {delivered} of {taken} batches of rustloader")
    if side.name != OURS and delivered:
        raise Failure(f"the Rust engine delivered {delivered} batches of {side.name}")
