"""How the time of a batch grows with workers, prefetching, leaves and bytes: `make compare KIND=growth`.

Workers are persistent. After one epoch to warm up, torch's loader and rustloader's run in turn; the figures are medians
of the rounds.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import floors
import torch
import torch.utils.data
from epochs import Side, cpu_seconds, run_epoch
from rows import MB

import rustloader
from rustloader.tools.probe.leaves import nbytes


class Made(torch.utils.data.Dataset):
    """The same object, created beforehand, `length` times; `fresh` creates a new one each time."""

    def __init__(self, thing: Any, length: int, fresh: Callable[[Any], Any] | None = None):
        self.thing, self.length, self.fresh = thing, length, fresh

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.thing if self.fresh is None else self.fresh(self.thing)


class Whole(Made):
    """Takes whole index batches."""

    def __init__(self, length: int):
        super().__init__(0, length)

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


@dataclass(frozen=True)
class Point:
    """A loader at one place of a curve."""

    name: str
    dataset: Any
    batches: int
    options: dict[str, Any] = field(default_factory=dict)
    # Without torch's loader, where that takes minutes.
    alone: bool = False


def workers() -> Iterator[Point]:
    for count in (1, 2, 4, 8, 16, 32):
        yield Point(f"{count}", Made(torch.tensor(1.0), 8000), 8000, {"num_workers": count, "batch_size": 1})


def prefetch() -> Iterator[Point]:
    for factor in (2, 4, 8, 16, 32, 64):
        yield Point(f"{factor}", Made(torch.tensor(1.0), 8000), 8000, {"prefetch_factor": factor, "batch_size": 1})


def leaves() -> Iterator[Point]:
    for count in (1, 10, 100, 1000, 10_000):
        batches = max(20, min(2000, 20_000 // count))
        tensors = [torch.ones(1) for _ in range(count)]
        yield Point(f"{count:,}", Made(tensors, batches), batches, {"batch_size": None}, alone=count > 1000)


def sizes() -> Iterator[Point]:
    for size in (1 << 10, 1 << 14, 1 << 17, MB, 16 * MB, 128 * MB, 1024 * MB):
        batches = max(8, min(2000, 2048 * MB // size))
        yield Point(
            f"{size / MB:,.3f} MiB",
            Made(torch.ones(8, size // 8, dtype=torch.uint8), batches),
            batches,
            {"batch_size": None, "collate_fn": torch.clone},
        )


def indices() -> Iterator[Point]:
    for count in (1000, 1_000_000):
        yield Point(f"{count:,}", Whole(4 * count), 4, {"batch_size": count, "collate_fn": len}, alone=True)


CURVES = {
    "workers": ("one scalar per batch, by workers", workers),
    "prefetch": ("one scalar per batch, by prefetch_factor", prefetch),
    "leaves": ("small tensors in a batch, by their number", leaves),
    "sizes": ("one tensor per batch, by its size, made by torch.clone", sizes),
    "indices": ("samples in an index batch", indices),
}


def measure(point: Point, rounds: int) -> dict[str, Any]:
    arguments = {"num_workers": 2, "persistent_workers": True} | point.options
    ours = Side("rustloader", rustloader.DataLoader(point.dataset, **arguments))
    sides = [ours]
    if not point.alone:
        sides.append(Side("torch", torch.utils.data.DataLoader(point.dataset, **arguments)))
    for side in sides:
        run_epoch(side, point.batches)
    for number in range(rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            side.timings.append(run_epoch(side, point.batches)[0])
    _, batch = run_epoch(ours, point.batches)
    size = nbytes(batch)
    del batch
    result = {"point": point.name, "bytes": size, "copy_us": floors.copy_of(size) * 1e6 if size else None}
    for side in sides:
        result[f"{side.name}_us"] = side.median("wall")
        result[f"{side.name}_cpu_us"] = side.median("cpu")
    return result


def idle(seconds: float = 3.0) -> float:
    """Processor time per second of main and two workers that wait, in microseconds."""
    loader = rustloader.DataLoader(Made(torch.tensor(1.0), 8), num_workers=2, persistent_workers=True)
    list(loader)
    before = cpu_seconds(loader)
    time.sleep(seconds)
    return (cpu_seconds(loader) - before) / seconds * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CURVES, help="one curve alone")
    parser.add_argument("--rounds", type=int, default=3, help="of each point (default: %(default)s)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the results as JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, (what, points) in CURVES.items():
        if options.only not in (None, name):
            continue
        print(f"{what}\n{'':<16}{'torch us':>12}{'ours us':>12}{'CPU us':>10}{'memcpy us':>12}", flush=True)
        results[name] = []
        for point in points():
            result = measure(point, options.rounds)
            results[name].append(result)
            cells = [result.get("torch_us"), result["rustloader_us"], result["rustloader_cpu_us"], result["copy_us"]]
            words = ["-" if cell is None else f"{cell:,.1f}" for cell in cells]
            print(f"{point.name:<16}{words[0]:>12}{words[1]:>12}{words[2]:>10}{words[3]:>12}", flush=True)
        print()
    if options.only is None:
        results["idle_us_per_s"] = idle()
        print(f"idle: {results['idle_us_per_s']:.0f} us of processor time per second")
    if options.save:
        options.save.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
