"""Measures the peak memory of two epochs through torch's loader and through rustloader's: `make compare KIND=memory`.

Each measurement runs in a new process in its own memory cgroup, so everything counts: private memory of all processes,
and shared memory, mapped or not. The memory of the process before the first iter() is subtracted. The program needs
permission to create a cgroup. Without --step the loop drops each batch at once, so a loader that is slower than the
loop never holds all the batches that it may prefetch. The last table shows the memory that remains 12 s after two
epochs, and after two more epochs and the deletion of the loader; --peaks leaves it out. With --off, rustloader is also
measured with that variable at 0.
"""

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
from epochs import KINDS
from harness.processes import forked
from harness.program import Program
from rows import IMAGE, MIB, Samples, images_f32, images_numpy, images_u8, large_arrays

from rustloader.tools.harness.rounds import Rounds, spread

# Seconds after an epoch by which pages that were kept for the next epoch should have been released.
REMAINING_AFTER = 12


class Cgroup:
    """A memory cgroup, of version 1 or 2."""

    def __init__(self) -> None:
        v1 = Path("/sys/fs/cgroup/memory")
        self.is_v1 = v1.is_dir()
        self.path = (v1 if self.is_v1 else Path("/sys/fs/cgroup")) / f"rustloader-bench-{os.getpid()}"
        self.path.mkdir()

    def enter(self) -> None:
        """Moves the calling process into the cgroup; memory that the process touches from then on counts."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def used(self) -> int:
        """Returns the current memory usage in bytes."""
        return int((self.path / ("memory.usage_in_bytes" if self.is_v1 else "memory.current")).read_text())

    def peak(self) -> int:
        """Returns the peak memory usage in bytes."""
        return int((self.path / ("memory.max_usage_in_bytes" if self.is_v1 else "memory.peak")).read_text())

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.rmdir()


class Ragged(torch.utils.data.IterableDataset):
    """A dataset that yields batches of 1 to 64 images. The sequence of sizes is fixed."""

    def __init__(self, batches: int):
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        sizes = torch.randint(1, 65, (self.batches,), generator=torch.Generator().manual_seed(1)).tolist()
        for size in sizes[worker.id :: worker.num_workers]:
            yield torch.ones(size, *IMAGE), torch.arange(size)


@dataclass(frozen=True)
class Case:
    """The settings of a loader, and whether the loop keeps the labels."""

    name: str
    dataset: Callable[[], Any]
    batch_size: int | None
    workers: int
    keeps_labels: bool = False


def cycled(samples: Callable[[], list[Any]], batches: int) -> Callable[[], Any]:
    return lambda: Samples(samples(), batches * 64)


def copied(sample: tuple[Any, int]) -> tuple[Any, int]:
    return sample[0].copy(), sample[1]


def arrays() -> list[Any]:
    return [(array, i) for i, array in enumerate(large_arrays())]


CASES = {
    "u8-2": Case("u8 images, 2 workers", cycled(images_u8, 100), 64, 2),
    "u8-8": Case("u8 images, 8 workers", cycled(images_u8, 100), 64, 8),
    "f32-2": Case("f32 images, 2 workers", cycled(images_f32, 60), 64, 2),
    "f32-8": Case("f32 images, 8 workers", cycled(images_f32, 60), 64, 8),
    "ragged-2": Case("ragged f32 images, 2 workers", lambda: Ragged(100), None, 2),
    "ragged-8": Case("ragged f32 images, 8 workers", lambda: Ragged(100), None, 8),
    "labels-2": Case("f32 images, labels kept, 2 workers", cycled(images_f32, 60), 64, 2, keeps_labels=True),
    "numpy-u8-2": Case("fresh NumPy u8 images, 2 workers", lambda: Samples(images_numpy(), 100 * 64, copied), 64, 2),
    "numpy-2": Case("fresh NumPy arrays of 16 MB, 2 workers", lambda: Samples(arrays(), 150, copied), None, 2),
    "numpy-8": Case("fresh NumPy arrays of 16 MB, 8 workers", lambda: Samples(arrays(), 150, copied), None, 8),
}


def use(case: Case, loader: Any, step: float) -> None:
    kept = []
    for _ in range(2):
        for batch in loader:
            images, labels = batch
            if case.keeps_labels:
                kept.append(labels)
            if step:
                time.sleep(step)
            del batch, images, labels


def peak_of(case: Case, loaders: list[Any], step: float, group: Cgroup) -> dict[str, int]:
    use(case, loaders[0], step)
    return {"peak": group.peak()}


def remaining_of(case: Case, loaders: list[Any], step: float, group: Cgroup) -> dict[str, int]:
    """Returns the bytes in use some seconds after two epochs, and when the loader is deleted after two more epochs."""
    use(case, loaders[0], step)
    time.sleep(REMAINING_AFTER)
    late = group.used()
    use(case, loaders[0], step)
    loaders.clear()
    gc.collect()
    return {"late": late, "gone": group.used()}


Measure = Callable[[Case, list[Any], float, Cgroup], dict[str, int]]


def measure(case: Case, kind: str, off: str | None, what: Measure) -> dict[str, float]:
    """Calls ``what`` in a new process. Returns its results in MiB, relative to the memory in use before the call."""
    group = Cgroup()

    def body() -> dict[str, float]:
        group.enter()
        if off:
            os.environ[off] = "0"
        dataset = case.dataset()
        loaders = [KINDS[kind](dataset, batch_size=case.batch_size, num_workers=case.workers)]
        before = group.used()
        return {key: (after - before) / MIB for key, after in what(case, loaders, program.options.step, group).items()}

    try:
        return forked(body)
    finally:
        group.remove()


def rounds_of(name: str, what: Measure) -> Rounds:
    """Measures the memory of each side in each round."""
    sides = {kind: lambda kind=kind: measure(CASES[name], kind, None, what) for kind in KINDS}
    if off := program.options.off:
        sides["off"] = lambda: measure(CASES[name], "rustloader", off, what)
    return program.interleave(sides, name)


def peaks(name: str) -> None:
    rounds = rounds_of(name, peak_of)
    cells = [spread(rounds.of(side, "peak"), "{:,.0f}".format) for side in rounds]
    ratios = [spread(rounds.ratios(side, "torch", "peak"), "{:.2f}".format) for side in rounds if side != "torch"]
    program.line(name, CASES[name].name, *cells, *ratios, what="peak", rounds=rounds)


def remaining(name: str) -> None:
    rounds = rounds_of(name, remaining_of)
    cells = [spread(rounds.of(side, key), "{:,.1f}".format) for key in ("late", "gone") for side in rounds]
    program.line(name, CASES[name].name, *cells, what="left", rounds=rounds)


def tables() -> int:
    """Prints the table of peaks, then the table of remaining memory."""
    sides = [*KINDS, *([f"{program.options.off}=0"] if program.options.off else [])]
    status = program.run(peaks, ["peak memory in MiB", *sides, *(f"{side} / torch" for side in sides[1:])])
    if not program.options.peaks:
        heads = [f"{side}, {when}" for when in (f"after {REMAINING_AFTER} s", "without the loader") for side in sides]
        status |= program.run(remaining, ["remaining memory in MiB", *heads])
    return status


program = Program(__doc__, list(CASES), rounds=3)
program.option("--step", type=float, default=0.0, metavar="SECONDS", help="time for which the loop keeps each batch")
program.option("--off", metavar="VARIABLE", help="also measure rustloader with this variable at 0")
program.option("--peaks", action="store_true", help="measure only the peaks")

if __name__ == "__main__":
    program.parse()
    try:
        Cgroup().remove()
    except OSError as error:
        print(f"cannot create a memory cgroup, which this program needs: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(tables())
