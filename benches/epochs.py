"""Epochs of a loader, timed and checked."""

import gc
import multiprocessing
import os
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.utils.data

import rustloader
from rustloader.tools.probe import machine


class Failure(Exception):
    """A loader failed the checks of its row."""


@dataclass
class Timing:
    """An epoch, by its batches; in microseconds."""

    # From iter() to the end of the epoch, or to the first batch.
    wall: float
    # Processor time of all processes.
    cpu: float
    # Processor time of the thread that iterates: it holds the GIL for no longer.
    main: float


@dataclass
class Side:
    """A loader of a row, and what was measured with it."""

    name: str
    loader: torch.utils.data.DataLoader
    timings: list[Timing] = field(default_factory=list)
    # How torch's loader shares memory: "file_descriptor" or "file_system".
    sharing: str = torch.multiprocessing.get_sharing_strategy()
    # A variable that is 0 during the epochs of this side alone.
    off: str | None = None

    def median(self, what: str) -> float:
        return statistics.median(getattr(timing, what) for timing in self.timings)


def cpu_seconds(loader: torch.utils.data.DataLoader) -> float:
    """Processor time of this process, of the children it has reaped, and of the loader's workers."""
    return machine.cpu_seconds(worker.pid for worker in living_workers(loader))


def living_workers(loader: Any) -> list[Any]:
    """The live processes of a loader. A peer's loader does not list them: all children that have not ended."""
    if not isinstance(loader, torch.utils.data.DataLoader):
        return multiprocessing.active_children()
    return loader._iterator._workers if loader.persistent_workers and loader._iterator is not None else []


def run_epoch(side: Side, batches: int, epochs: int = 1, to_first: bool = False) -> tuple[Timing, Any]:
    """Times epochs of `batches` batches each. Also returns the last batch."""
    gc.collect()
    torch.multiprocessing.set_sharing_strategy(side.sharing)
    if side.off:
        os.environ[side.off] = "0"
    first: float | None = None
    seen, from_engine = 0, rustloader.engine_batches()
    cpu, main, start = cpu_seconds(side.loader), time.thread_time(), time.perf_counter()
    for _ in range(epochs):
        for batch in side.loader:  # noqa: B007 (the last one is returned)
            seen += 1
            if to_first and first is None:
                first = time.perf_counter() - start
    wall = time.perf_counter() - start if first is None else first
    main, cpu = time.thread_time() - main, cpu_seconds(side.loader) - cpu
    torch.multiprocessing.set_sharing_strategy(Side.sharing)
    if side.off:
        del os.environ[side.off]
    from_engine = rustloader.engine_batches() - from_engine
    batches *= epochs
    if seen != batches:
        raise Failure(f"{side.name} delivered {seen} batches in place of {batches}")
    wanted = batches if side.name == "rustloader" or side.off else 0
    if from_engine != wanted:
        raise Failure(f"{side.name}: {from_engine} batches came from the Rust engine, not {wanted}")
    per_batch = 1e6 / batches
    return Timing(wall * 1e6 if to_first else wall * per_batch, cpu * per_batch, main * per_batch), batch


def difference(a: Any, b: Any, path: str = "batch") -> str | None:
    """Where and how two batches differ; None if they are equal."""
    if type(a) is not type(b):
        return f"{path}: {type(a).__name__} and {type(b).__name__}"
    if isinstance(a, torch.Tensor):
        for name in ("dtype", "shape", "layout", "device"):
            if getattr(a, name) != getattr(b, name):
                return f"{path}.{name}: {getattr(a, name)} and {getattr(b, name)}"
        return None if torch.equal(a, b) else f"{path}: other values"
    if isinstance(a, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{path}: {a.dtype}{a.shape} and {b.dtype}{b.shape}"
        return None if np.array_equal(a, b) else f"{path}: other values"
    if isinstance(a, dict):
        if list(a) != list(b):
            return f"{path}: keys {list(a)} and {list(b)}"
        return next(filter(None, (difference(a[key], b[key], f"{path}[{key!r}]") for key in a)), None)
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return f"{path}: {len(a)} and {len(b)} elements"
        pairs = zip(a, b, strict=True)
        return next(filter(None, (difference(x, y, f"{path}[{i}]") for i, (x, y) in enumerate(pairs))), None)
    return None if a == b else f"{path}: {a!r} and {b!r}"
