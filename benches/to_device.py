"""Compares loops whose batches go to the device: torch's loader, pageable and pinned, and prefetch_to_device.

For each row of compare.py that has tensors, it shows medians of rounds in which the loaders take turns, with persistent
workers and after one epoch to warm up:

to the device  batches per second that arrive on the device while nothing else runs there, and GB/s of their tensors.
step           milliseconds per batch of a loop that computes on the device for about 20 ms (--step) per batch, and
               the same as a multiple of the step without loading. The goal for batches of 38 MB is 1.03 or less.
overlap        for prefetch_to_device: the share of the copies' time for which the loop's stream did not wait.

Each row starts with the limits: the rate of cudaMemcpyAsync from pinned memory, and that of one thread that copies from
pageable to pinned memory (memcpy). The sums of the last batches of all loops are compared. `--trace FILE` writes a
profile of the training loop over prefetch_to_device, which overlap.py draws.

It needs a CUDA device. With --device cpu it runs without one, but its results mean nothing.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from card import Kernel, loader_of, memcpy_rate, program_of, started, tensors, to_device_rate, trace
from epochs import KINDS
from harness.program import main
from rows import BY_NAME

import rustloader
from rustloader.tools.harness.rounds import Failure, spread

DEFAULT = ("images_u8", "images_f32", "images_f32_256", "ready_tensor", "tokens")
# For each name: torch's loader or rustloader's, and whether its batches are pinned.
WAYS = {
    "torch pageable": ("torch", False),
    "torch pinned": ("torch", True),
    "ours pageable": ("rustloader", False),
    "ours": ("rustloader", True),
}


class Loop:
    """A loop over a loader whose batches go to the device."""

    def __init__(self, name: str, kind: str, pinned: bool):
        self.loader, self.pinned = loader_of(name, KINDS[kind], pinned, program.options), pinned
        self.batches: Iterable[Any] | None = None
        if kind == "rustloader":
            self.batches = rustloader.prefetch_to_device(self.loader, device.kind)
        self.last: list[float] = []

    def __iter__(self) -> Iterator[Any]:
        if self.batches is not None:
            yield from self.batches
            return
        for batch in self.loader:  # moves tensors as programs without a prefetcher do
            yield [tensor.to(device.kind, non_blocking=self.pinned) for tensor in tensors(batch)]

    def __call__(self, kernel: Kernel | None) -> float:
        """Returns the seconds per batch. ``kernel`` is the training step of each batch.

        Without a kernel, sets ``last`` to the sums of the tensors of the last batch.
        """
        count, batch = 0, None
        device.synchronize()
        start = time.perf_counter()
        for batch in self:
            if kernel is not None:
                for tensor in tensors(batch):
                    # Like a training step, this work can start only when the batch is on the device.
                    tensor.as_strided((1,), (1,)).clone()
                kernel()
            count += 1
        device.synchronize()
        seconds = time.perf_counter() - start
        if kernel is None:
            self.last = [float(tensor.double().sum()) for tensor in tensors(batch)]
        return seconds / count


def measure(name: str) -> None:
    options, row = program.options, BY_NAME[name]
    loops = {way: Loop(name, *how) for way, how in WAYS.items()}
    for loop in loops.values():
        loop(None)
    nbytes = sum(tensor.nbytes for tensor in tensors(next(iter(loops["torch pinned"].loader))))
    kernel = Kernel(device, options.step)
    delivered = rustloader.engine_batches()
    sides = {way: lambda it=it: {"rate": 1 / it(None), "step": it(kernel) * 1e3} for way, it in loops.items()}
    rounds = program.interleave(sides, name)
    delivered = rustloader.engine_batches() - delivered
    if delivered != 2 * 2 * options.rounds * row.count(options.quick):
        raise Failure(f"{delivered} batches came from the Rust engine")
    for way, loop in loops.items():
        if loop.last != loops["torch pageable"].last:
            raise Failure(f"the last batch of {way!r} differs from that of 'torch pageable'")
    large = max(nbytes, 1 << 20)
    limits = {
        "cudaMemcpyAsync": to_device_rate(device, large),
        "memcpy": memcpy_rate(device, large, 1 << (24 if options.quick else 30)),
    }
    for limit, rate in limits.items():
        program.line(name, name, limit, "", f"{rate:.2f}", "", "", "", limit=limit, gbs=rate)
    for way, loop in loops.items():
        stats = rustloader.stats(loop.loader).transfers if way.startswith("ours") else None
        overlap = "" if stats is None or stats.overlapped_share is None else f"{stats.overlapped_share:.0%}"
        rate, step = rounds.median(way, "rate"), rounds.median(way, "step")
        multiple = spread([it / kernel.ms for it in rounds.of(way, "step")], "{:.3f}".format)
        cells = [f"{rate:,.1f}", f"{rate * nbytes / 1e9:.2f}", f"{step:.3f}", multiple, overlap]
        program.line(name, name, way, *cells, way=way, nbytes=nbytes, kernel_ms=kernel.ms, rounds=rounds[way])
    trace(options, name, lambda: loops["ours"](kernel))
    for loop in loops.values():
        loop.loader._iterator._shutdown_workers()


if __name__ == "__main__":
    program = program_of(__doc__, rounds=5, default=DEFAULT)
    program.option("--step", type=float, default=20.0, metavar="MS", help="training step (default: %(default)s)")
    device = started(program)
    main(program, measure, "row", "", "batches/s", "GB/s", "step ms", "/ step alone", "overlap")
