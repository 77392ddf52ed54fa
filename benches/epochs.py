"""Runs epochs of a loader, times them and checks their batches."""

import gc
import itertools
import multiprocessing
import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils.data
from rows import Row, Samples

import rustloader
from rustloader.system.formatting import type_name
from rustloader.tools.harness import machine
from rustloader.tools.harness.rounds import Failure
from rustloader.tools.probe.leaves import leaves

KINDS: dict[str, type] = {"torch": torch.utils.data.DataLoader, "rustloader": rustloader.DataLoader}
SHARING = torch.multiprocessing.get_sharing_strategy()


def cpu_seconds(loader: Any) -> float:
    """Returns the CPU time of this process, of the children that it has reaped, and of the loader's workers."""
    return machine.cpu_seconds(worker.pid for worker in living_workers(loader))


def living_workers(loader: Any) -> list[Any]:
    """Returns the persistent workers of a loader; for another project's loader, all live children of this process."""
    if not isinstance(loader, torch.utils.data.DataLoader):
        return multiprocessing.active_children()
    return loader._iterator._workers if loader.persistent_workers and loader._iterator is not None else []


@dataclass
class Loop:
    """A loop over a loader. Each call runs the epochs of a round.

    Attributes:
        loader: the loader.
        batches: the number of batches in an epoch. Each epoch must deliver all of them.
        from_engine: whether all batches must come from the Rust engine; otherwise none may come from it.
        epochs: the number of epochs in a round.
        to_first: whether the wall time ends with the first batch.
        sharing: how torch's loader shares memory: "file_descriptor" or "file_system".
        off: an environment variable that is set to 0 during the epochs.
        last: the last batch.
    """

    loader: Any
    batches: int
    from_engine: bool = False
    epochs: int = 1
    to_first: bool = False
    sharing: str = SHARING
    off: str | None = None
    last: Any = None

    def __call__(self) -> dict[str, float]:
        """Runs a round. Raises Failure if batches are missing, or if ``from_engine`` does not hold.

        Returns microseconds per batch: wall time, CPU time of all processes, and CPU time of this thread,
        which is an upper bound on the time for which it holds the GIL. With ``to_first``, the wall time is that to the
        first batch, and is not divided by the number of batches.
        """
        gc.collect()
        torch.multiprocessing.set_sharing_strategy(self.sharing)
        if self.off:
            os.environ[self.off] = "0"
        first: float | None = None
        seen, from_engine = 0, rustloader.engine_batches()
        cpu, main, start = cpu_seconds(self.loader), time.thread_time(), time.perf_counter()
        for _ in range(self.epochs):
            for self.last in self.loader:  # noqa: B020 (kept, to be compared)
                seen += 1
                if self.to_first and first is None:
                    first = time.perf_counter() - start
        wall = time.perf_counter() - start
        main, cpu = time.thread_time() - main, cpu_seconds(self.loader) - cpu
        torch.multiprocessing.set_sharing_strategy(SHARING)
        if self.off:
            del os.environ[self.off]
        batches, from_engine = self.batches * self.epochs, rustloader.engine_batches() - from_engine
        if seen != batches:
            raise Failure(f"{type_name(self.loader)} delivered {seen} batches instead of {batches}")
        if from_engine != (batches if self.from_engine else 0):
            raise Failure(f"{type_name(self.loader)}: {from_engine} of {batches} batches came from the Rust engine")
        us = 1e6 / batches
        return {"wall": wall * us if first is None else first * 1e6, "cpu": cpu * us, "main": main * us}


def loop(row: Row, kind: str, dataset: Samples | None = None, quick: bool = False, **arguments: Any) -> Loop:
    """Returns a loop over a new loader for a row.

    Args:
        row: the row.
        kind: "torch" or "rustloader".
        dataset: the dataset of the row, if several loops share it; None to create it.
        quick: whether to run only a tenth of an epoch's batches.
        arguments: arguments of the loader, which override the row's; ``sharing`` and ``off`` are passed to the loop.
    """
    own = {name: arguments.pop(name) for name in ("sharing", "off") if name in arguments}
    if arguments.get("num_workers") == 0:
        arguments |= {"multiprocessing_context": None, "persistent_workers": False}
    dataset = dataset or row.dataset(quick)
    is_cached = kind == "rustloader" and row.then is not None
    loader = KINDS[kind](dataset.cached() if is_cached else dataset, **row.arguments() | arguments)
    if is_cached:  # the first epoch fills the cache
        for _ in loader:
            pass
    ours = kind == "rustloader" and loader.num_workers > 0
    return Loop(loader, row.count(quick), ours, 1 if quick else row.epochs, row.to_first, **own)


def difference(one: Any, other: Any) -> str | None:
    """Describes the first difference between two batches. Returns None if they are equal."""
    for a, b in itertools.zip_longest(leaves(one), leaves(other)):
        if a is None or b is None or a[:2] != b[:2]:
            return f"{a and a[:2]} and {b and b[:2]}"
        tensors = isinstance(a.value, torch.Tensor)
        equal = torch.equal if tensors else np.array_equal if isinstance(a.value, np.ndarray) else None
        if not (equal(a.value, b.value) if equal else a.value == b.value):
            return f"{a.path}: different values"
    return None


def same_last(loops: dict[str, Loop]) -> None:
    """Raises Failure if the last batch of a loop differs from that of the first loop. Drops the last batches."""
    (first, expected), *others = ((name, it.last) for name, it in loops.items())
    for name, last in others:
        if problem := difference(expected, last):
            raise Failure(f"the last batch differs between {first} and {name}: {problem}")
    for it in loops.values():
        it.last = None


def same_first(loops: dict[str, Loop], count: int = 4) -> None:
    """Raises Failure if the first ``count`` batches of two loops differ."""
    one, other = (it.loader for it in loops.values())
    for number, pair in enumerate(itertools.islice(zip(one, other, strict=True), count)):
        if problem := difference(*pair):
            raise Failure(f"batch {number} differs between {' and '.join(loops)}: {problem}")
