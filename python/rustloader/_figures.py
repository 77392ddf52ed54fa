"""The figures that ``rustloader.stats()`` gives, as a program and a reader see them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rustloader._verdict import Verdict, judge

__all__ = ["Arena", "Copies", "Handover", "Pinning", "SlowTask", "Stats", "Worker"]


@dataclass(frozen=True)
class Worker:
    """One worker; of a loader's iterators so far all workers of this number together.

    Attributes:
        id: its number, from 0.
        pid: process id, of the latest.
        alive: whether that process runs.
        rss_bytes: its resident memory, pages that it shares among it; 0 when it has ended.
        tasks: batches that it sent, and errors in the place of batches.
        starting_seconds: before its first task of an epoch: seeding, ``worker_init_fn``, ``iter(dataset)``.
        idle_seconds: waiting for tasks.
        fetch_seconds: in the dataset.
        collate_seconds: in ``collate_fn``.
        pack_seconds: writing batches into the arena and publishing them.
    """

    id: int
    pid: int = 0
    alive: bool = False
    rss_bytes: int = 0
    tasks: int = 0
    starting_seconds: float = 0.0
    idle_seconds: float = 0.0
    fetch_seconds: float = 0.0
    collate_seconds: float = 0.0
    pack_seconds: float = 0.0

    @property
    def busy_seconds(self) -> float:
        """Seconds of work on batches."""
        return self.fetch_seconds + self.collate_seconds + self.pack_seconds


@dataclass(frozen=True)
class SlowTask:
    """One of the slowest batches.

    Attributes:
        index: its index batch as a text; of a large one the beginning.
        worker: the number of the worker that made it.
        fetch_seconds, collate_seconds, pack_seconds: as for a worker.
    """

    index: str
    worker: int
    fetch_seconds: float
    collate_seconds: float = 0.0
    pack_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds that the worker took for it."""
        return self.fetch_seconds + self.collate_seconds + self.pack_seconds


@dataclass(frozen=True)
class Arena:
    """The shared memory of the iterators that are at work.

    Attributes:
        leased_bytes: in blocks that tensors of the main process lie in.
        warm_bytes: all that have pages.
        high_water_bytes: the most that one iterator's arena has had (the sum of the most that each region had).
        blocks: blocks that have been made.
    """

    leased_bytes: int = 0
    warm_bytes: int = 0
    high_water_bytes: int = 0
    blocks: int = 0


@dataclass(frozen=True)
class Copies:
    """What was copied that need not have been. A batch that ``default_collate`` has written into the arena is not.

    Attributes:
        count: tensors, arrays and bytes objects that a worker copied into the arena, because they were made elsewhere.
        bytes: their bytes.
        pickled: batches that went as a pickle, because they were no plain trees.
    """

    count: int = 0
    bytes: int = 0
    pickled: int = 0


@dataclass(frozen=True)
class Pinning:
    """The pin thread.

    Attributes:
        running: whether there is one now.
        batches: batches that it made ready.
        seconds: in which it did so.
    """

    running: bool = False
    batches: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Handover:
    """Iterators that were torch's own.

    Attributes:
        reason: why.
        count: how many.
    """

    reason: str
    count: int


@dataclass(frozen=True)
class Stats:
    """What a loader or an iterator has done so far. Times are in seconds, of the monotonic clock.

    The time of the training loop is ``next_seconds + step_seconds``; what lies between two epochs is in neither.

    Attributes:
        num_workers: of the loader, or of the iterator.
        cores: processor cores that this process may use.
        iterators: iterators that the Rust engine has served, those that have ended among them. If there are none, all
            times below are 0, whatever torch's own iterators did.
        epochs: epochs begun.
        batches: batches that the engine has delivered; for a live iterator of torch's own, those of its epoch.
        bytes: bytes of the engine's batches.
        next_seconds: in ``next``, all of it.
        first_seconds: of these, waiting for the first batch of an epoch.
        waited_seconds: of these, waiting for any other batch.
        blocked_seconds: of ``waited_seconds``, while later batches were ready (head-of-line blocking).
        sampler_seconds: of ``next_seconds``, in the sampler and sending what it gave; looked at only after a
            ``next`` that worked for 50 us or more.
        step_seconds: between two calls of ``next`` of one epoch: the training step.
        workers: by their number.
        slowest: the slowest batches so far, the slowest first.
        arena: shared memory.
        copies: copies on the way.
        pinning: the pin thread.
        handovers: iterators that were torch's own; what they did is in no other figure.
        note: why there are no figures, or an empty text.
    """

    num_workers: int = 0
    cores: int = 1
    iterators: int = 0
    epochs: int = 0
    batches: int = 0
    bytes: int = 0
    next_seconds: float = 0.0
    first_seconds: float = 0.0
    waited_seconds: float = 0.0
    blocked_seconds: float = 0.0
    sampler_seconds: float = 0.0
    step_seconds: float = 0.0
    workers: tuple[Worker, ...] = ()
    slowest: tuple[SlowTask, ...] = ()
    arena: Arena = Arena()
    copies: Copies = Copies()
    pinning: Pinning = Pinning()
    handovers: tuple[Handover, ...] = ()
    note: str = ""

    @property
    def own_seconds(self) -> float:
        """Seconds in ``next`` without waiting: sampler, sending indices, opening batches."""
        return max(0.0, self.next_seconds - self.first_seconds - self.waited_seconds)

    def verdict(self) -> Verdict:
        """What limits the loader, with the figures that say so."""
        return judge(self)

    def as_dict(self, flat: bool = False) -> dict[str, Any]:
        """The figures as plain values that ``json`` can write.

        Args:
            flat: False gives dicts and lists in each other. True gives the numbers alone, as floats, for TensorBoard
                and Prometheus, under names such as ``waited_seconds`` and ``workers_0_fetch_seconds``.
        """
        nested = dataclasses.asdict(self, dict_factory=_with_lists)
        return dict(_flattened("", nested)) if flat else nested

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _with_lists(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in items}


def _flattened(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from _flattened(f"{name}_{key}" if name else str(key), inner)
    elif isinstance(value, int | float):
        yield name, float(value)


def _size(count: int) -> str:
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= bytes_:
            return f"{count / bytes_:.1f} {unit}"
    return f"{count} B"


def _lines(stats: Stats) -> Iterator[str]:
    def line(name: str, text: str) -> str:
        return f"  {name:12}{text}"

    def s(seconds: float) -> str:
        return f"{seconds:.3f} s"

    if stats.note:
        yield f"no figures: {stats.note}"
        if stats.batches:
            yield line("torch's", f"{stats.batches} batches so far")
        for handover in stats.handovers:
            yield line("torch's", f"{handover.count} iterators: {handover.reason}")
        return
    yield f"{stats.batches} batches ({_size(stats.bytes)}) in {stats.epochs} epochs with {stats.num_workers} workers"
    yield line("steps", s(stats.step_seconds))
    yield line("next()", f"{s(stats.next_seconds)}, of which")
    yield line("  waited", f"{s(stats.waited_seconds)}, while later batches were ready {s(stats.blocked_seconds)}")
    yield line("  first", f"{s(stats.first_seconds)} for the first batches of epochs")
    yield line("  own work", f"{s(stats.own_seconds)}, in the sampler {s(stats.sampler_seconds)}")
    for worker in stats.workers:
        state = f"pid {worker.pid}, {_size(worker.rss_bytes)}" if worker.alive else "ended"
        times = f"fetch {s(worker.fetch_seconds)}, collate {s(worker.collate_seconds)}, pack {s(worker.pack_seconds)}"
        yield line(f"worker {worker.id}", f"{worker.tasks} tasks: {times}, idle {s(worker.idle_seconds)} ({state})")
    for task in stats.slowest[:3]:
        yield line("slow", f"{task.seconds * 1e3:.1f} ms on worker {task.worker}: {task.index}")
    leased, warm, most = (
        _size(count) for count in (stats.arena.leased_bytes, stats.arena.warm_bytes, stats.arena.high_water_bytes)
    )
    yield line("arena", f"{leased} leased, {warm} warm, {most} at most, {stats.arena.blocks} blocks")
    yield line("copies", f"{stats.copies.count} ({_size(stats.copies.bytes)}); {stats.copies.pickled} batches pickled")
    if stats.pinning.batches or stats.pinning.running:
        yield line("pin thread", f"{stats.pinning.batches} batches in {s(stats.pinning.seconds)}")
    for handover in stats.handovers:
        yield line("torch's", f"{handover.count} iterators, not in these figures: {handover.reason}")


def no_loader(source: Any) -> TypeError:
    """The error for what has no statistics."""
    name = type(source).__qualname__
    return TypeError(f"rustloader.stats() takes a DataLoader or its iterator, not an object of type {name}")


def check_interval(every: float) -> None:
    """Raises the error for what is no number of seconds between two reports."""
    if not every > 0:
        raise ValueError(f"rustloader.report(every={every!r}): it has to be a number of seconds greater than 0")
