"""Compare loops whose batches go to the device: torch's loader, pageable and pinned, and prefetch_to_device.

For each row of compare.py that has tensors, with persistent workers and after one epoch to warm up, medians of rounds
in which the loaders take turns:

to the device  batches per second that arrive on the device while nothing else is done there, and GB/s of their tensors.
step           milliseconds per batch of a loop that computes on the device for about 20 ms (--step) per batch, and
               the same as a multiple of the step without loading. The goal for batches of 38 MB is 1.03 or less.
overlap        share of the copies' time for which the loop's stream did not wait, of prefetch_to_device.

The limits stand first in each row: what cudaMemcpyAsync copies from pinned memory, and what one thread copies from
ordinary to pinned memory (memcpy). The sums of the last batches of all loops are compared. `--trace FILE` writes a
profile of the training loop over prefetch_to_device, which overlap.py draws.

It needs a CUDA device. With --device cpu it runs as a whole where there is none, and its figures mean nothing.
"""

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import compare
import torch
import torch.utils.data
from card import Device, Kernel, memcpy_rate, to_device_rate
from epochs import Failure
from gpu import WITH_TENSORS, tensors
from rows import Row, Samples

import rustloader

DEFAULT = ("images_u8", "images_f32", "images_f32_256", "ready_tensor", "tokens")


class Loop:
    """A loader and its way to the device."""

    def __init__(self, name: str, loader: torch.utils.data.DataLoader, batches: Callable[[], Iterable[Any]]):
        self.name, self.loader, self.batches = name, loader, batches
        self.rates: list[float] = []
        self.steps: list[float] = []
        self.last: list[float] = []

    def rate(self, device: Device) -> float:
        """Batches per second on the device, nothing else done."""
        count, batch, start = 0, None, time.perf_counter()
        for batch in self.batches():  # noqa: B007 (the last one is kept)
            count += 1
        device.synchronize()
        seconds = time.perf_counter() - start
        self.last = [float(tensor.double().sum()) for tensor in tensors(batch)]
        return count / seconds

    def step_ms(self, device: Device, kernel: Kernel) -> float:
        """Milliseconds per batch of a loop with a training step."""
        count = 0
        device.synchronize()
        start = time.perf_counter()
        for batch in self.batches():
            for tensor in tensors(batch):
                # As a step does, the work begins with the batch.
                tensor.as_strided((1,), (1,)).clone()
            kernel()
            count += 1
        device.synchronize()
        return (time.perf_counter() - start) / count * 1e3


def moved(loader: Iterable[Any], device: Device, pinned: bool) -> Iterable[Any]:
    """Batches as programs move them by hand."""
    for batch in loader:
        yield [tensor.to(device.kind, non_blocking=pinned) for tensor in tensors(batch)]


def loops_of(row: Row, options: argparse.Namespace, device: Device, batches: int) -> list[Loop]:
    dataset = Samples(row.samples(), batches * (row.batch_size or 1), row.fresh)

    def loader(cls: Any, pinned: bool) -> torch.utils.data.DataLoader:
        kw = {"batch_size": row.batch_size, "collate_fn": row.collate, "num_workers": options.workers}
        return cls(dataset, pin_memory=pinned and device.is_card, persistent_workers=True, **kw)

    def by_hand(name: str, pinned: bool) -> Loop:
        its = loader(torch.utils.data.DataLoader, pinned)
        return Loop(name, its, lambda: moved(its, device, pinned))

    def ours(name: str, pinned: bool) -> Loop:
        its = loader(rustloader.DataLoader, pinned)
        batches = rustloader.prefetch_to_device(its, device.kind, depth=options.depth)
        return Loop(name, its, lambda: batches)

    return [
        by_hand("torch pageable", False),
        by_hand("torch pinned", True),
        ours("ours pageable", False),
        ours("ours", True),
    ]


def measure(row: Row, options: argparse.Namespace, device: Device) -> None:
    batches = max(4, row.batches // (20 if options.quick else 1))
    loops = loops_of(row, options, device, batches)
    for loop in loops:
        loop.rate(device)
    example = tensors(next(iter(loops[1].loader)))
    nbytes = sum(tensor.nbytes for tensor in example)
    kernel = Kernel(device, options.step)
    delivered = rustloader.engine_batches()
    for number in range(options.rounds):
        for loop in loops if number % 2 == 0 else loops[::-1]:
            loop.rates.append(loop.rate(device))
            loop.steps.append(loop.step_ms(device, kernel))
    delivered = rustloader.engine_batches() - delivered
    if delivered != 2 * 2 * options.rounds * batches:
        raise Failure(f"{delivered} batches came from the Rust engine")
    for loop in loops:
        if loop.last != loops[0].last:
            raise Failure(f"the last batch of {loop.name!r} differs from that of {loops[0].name!r}")
    large = max(nbytes, 1 << 20)
    limits = to_device_rate(device, large), memcpy_rate(device, large, 1 << (24 if options.quick else 30))
    print(f"{row.name}: {row.what}; a step of {kernel.ms:.2f} ms")
    print(f"  {'cudaMemcpyAsync':<16}{'':>11}{limits[0]:>8.2f}\n  {'memcpy':<16}{'':>11}{limits[1]:>8.2f}")
    for loop in loops:
        rate, step = statistics.median(loop.rates), statistics.median(loop.steps)
        share = rustloader.stats(loop.loader).transfers.overlapped_share if loop.name.startswith("ours") else None
        overlap = "" if share is None else f"{share:>10.0%}"
        figures = f"{rate:>11,.1f}{rate * nbytes / 1e9:>8.2f} |{step:>9.3f}{step / kernel.ms:>8.3f}"
        print(f"  {loop.name:<16}{figures}{overlap}", flush=True)
    if options.trace:
        with torch.profiler.profile() as profile:
            loops[-1].step_ms(device, kernel)
        profile.export_chrome_trace(f"{options.trace}.{row.name}.json")
    for loop in loops:
        loop.loader._iterator._shutdown_workers()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", metavar="NAME,...", default=",".join(DEFAULT))
    parser.add_argument("--rounds", type=int, default=5, help="rounds a row (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=4, help="worker processes a loader (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=2, help="batches that are copied ahead (default: %(default)s)")
    parser.add_argument("--step", type=float, default=20.0, metavar="MS", help="training step (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few batches: no figures to quote")
    parser.add_argument("--trace", metavar="FILE", help="write FILE.<row>.json, a profile of the training loop")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: without a card, no figures")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: this comparison is for a machine that has one", file=sys.stderr)
        return 2
    names = options.rows.split(",")
    if unknown := set(names) - {row.name for row in WITH_TENSORS}:
        print(f"no such rows: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", "This DataLoader will create")
    torch.set_num_threads(1)
    device, about = Device(options.device), compare.machine()
    print(f"{device.name}; {about['cpu']}, {about['cores']} cores; ", end="")
    print(f"Python {about['python']}, torch {about['torch']}; ", end="")
    print(f"{options.workers} workers, depth {options.depth}, medians of {options.rounds} rounds", end="")
    print(f"{', quick' * options.quick}\n")
    print(f"  {'':<16}{'batches/s':>11}{'GB/s':>8} |{'step ms':>9}{'ratio':>8}{'overlap':>10}")
    failed = False
    for row in WITH_TENSORS:
        if row.name in names:
            try:
                measure(row, options, device)
            except Failure as failure:
                failed = True
                print(f"{row.name}: FAILED: {failure}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
