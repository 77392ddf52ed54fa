"""Measures how the time per batch grows with workers, prefetching, leaves and bytes: `make compare KIND=growth`.

Workers are persistent. After one epoch to warm up, torch's loader and rustloader's run in turn; the figures are
medians of the rounds, in microseconds per batch.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import floors
import torch
from epochs import Loop, cpu_seconds, loop
from harness.program import Program, main
from harness.report import us
from rows import MIB, Row

import rustloader
from rustloader.tools.harness.rounds import spread
from rustloader.tools.probe.leaves import nbytes


class Whole(torch.utils.data.Dataset):
    """A dataset that receives an index batch in one call, and returns the indices as samples."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


@dataclass(frozen=True)
class Point:
    """A point on a curve: the settings of a loader."""

    name: str
    row: Row
    options: dict[str, Any]
    # Whether to leave out torch's loader, which would take minutes.
    alone: bool = False
    dataset: Any = None


def scalars(options: str, values: tuple[int, ...]) -> Iterator[Point]:
    row = Row("scalar", "", 8000, 1, lambda: [torch.tensor(1.0)])
    return (Point(f"{value}", row, {options: value}) for value in values)


def leaves() -> Iterator[Point]:
    for count in (1, 10, 100, 1000, 10_000):
        tensors = [torch.ones(1) for _ in range(count)]
        row = Row("leaves", "", max(20, min(2000, 20_000 // count)), None, lambda tensors=tensors: [tensors])
        yield Point(f"{count:,}", row, {}, alone=count > 1000)


def sizes() -> Iterator[Point]:
    for size in (1 << 10, 1 << 14, 1 << 17, MIB, 16 * MIB, 128 * MIB, 1024 * MIB):
        tensor, batches = torch.ones(8, size // 8, dtype=torch.uint8), max(8, min(2000, 2048 * MIB // size))
        row = Row("sizes", "", batches, None, lambda tensor=tensor: [tensor], collate=torch.clone)
        yield Point(f"{size / MIB:,.3f} MiB", row, {})


def indices() -> Iterator[Point]:
    for count in (1000, 1_000_000):
        row = Row("indices", "", 4, count, list, collate=len)
        yield Point(f"{count:,}", row, {}, alone=True, dataset=Whole(4 * count))


CURVES: dict[str, tuple[str, Callable[[], Iterator[Point]]]] = {
    "workers": ("one scalar per batch, by workers", lambda: scalars("num_workers", (1, 2, 4, 8, 16, 32))),
    "prefetch": ("one scalar per batch, by prefetch_factor", lambda: scalars("prefetch_factor", (2, 4, 8, 16, 32, 64))),
    "leaves": ("small tensors in a batch, by their number", leaves),
    "sizes": ("one tensor per batch, by its size, made by torch.clone", sizes),
    "indices": ("samples in an index batch", indices),
    "idle": ("CPU time per second of the main process and two idle workers, us", lambda: iter(())),
}
program = Program(__doc__, list(CURVES), rounds=3)


def measure(curve: str) -> None:
    what, points = CURVES[curve]
    program.head(what, "torch us", "rustloader us", "CPU rustloader us", "memcpy us")
    for point in points():
        kinds = ("rustloader",) if point.alone else ("torch", "rustloader")
        arguments = {"dataset": point.dataset, "persistent_workers": True, **point.options}
        sides: dict[str, Loop] = {kind: loop(point.row, kind, **arguments) for kind in kinds}
        for side in sides.values():
            side()
        rounds = program.interleave(sides, f"{curve} {point.name}")
        size = nbytes(sides["rustloader"].last)
        copy = floors.copy_of(size) * 1e6 if size else None
        times = [spread(rounds.of(side, "wall"), us) if side in rounds else "-" for side in ("torch", "rustloader")]
        cpu = us(rounds.median("rustloader", "cpu"))
        program.line(
            curve, point.name, *times, cpu, us(copy), point=point.name, bytes=size, copy_us=copy, rounds=rounds
        )
    if curve == "idle":
        waiting = idle()
        program.line(curve, "", "", "", us(waiting), "", idle_us_per_s=waiting)


def idle(seconds: float = 3.0) -> float:
    """Returns the CPU time of the main process and two idle workers, in microseconds per second."""
    loader = rustloader.DataLoader(range(8), num_workers=2, persistent_workers=True)  # type: ignore[arg-type]
    list(loader)
    before = cpu_seconds(loader)
    time.sleep(seconds)
    return (cpu_seconds(loader) - before) / seconds * 1e6


if __name__ == "__main__":
    main(program, measure)
