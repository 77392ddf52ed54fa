"""Compares rustloader's DataLoader with torch's for pinned batches, on a machine with a CUDA device.

For each row of compare.py that has tensors, it shows medians of rounds, with persistent workers and after one epoch to
warm up:

rate     batches per second that arrive in pinned memory while nothing else runs, and GB/s of their tensors. `memcpy`
         is the rate at which one thread copies from pageable to pinned memory: the limit of one pin thread.
GIL      microseconds per batch for which the GIL was not free. A Python thread increments a counter while the loader
         runs. The figure is the time per batch, times the fraction by which the counter advances more slowly than
         without the loader. It includes the work of the calling thread in next().
step     milliseconds per batch of a training loop that copies to the device with non_blocking=True and computes there
         for about as long as the copy takes. `bound` is the longest of the parts (loader, copy, kernel) when each runs
         alone: if `step` is close to it, they overlap.

The last batches of both loaders are compared. `--trace FILE` writes a profile of rustloader's training loop.

It needs a CUDA device. With --device cpu it runs without one, but it pins nothing and its results mean nothing.
"""

import threading
import time
from typing import Any

import torch
import torch.utils.data
from card import Kernel, loader_of, memcpy_rate, program_of, started, tensors, trace
from epochs import KINDS, difference
from harness.program import main
from harness.report import us
from rows import BY_NAME

import rustloader
from rustloader.tools.harness.layout import times
from rustloader.tools.harness.rounds import Failure, spread


def epoch(loader: torch.utils.data.DataLoader) -> tuple[float, int, Any]:
    """Runs an epoch. Returns the seconds that it takes, the number of batches, and the last batch."""
    count, batch, start = 0, None, time.perf_counter()
    for batch in loader:  # noqa: B007 (the last one is returned)
        count += 1
    return time.perf_counter() - start, count, batch


def gil_us(loader: torch.utils.data.DataLoader) -> float:
    """Returns the microseconds per batch for which a counting thread had to wait for the GIL."""
    counted, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            for _ in range(1000):
                counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before, start = counted[0], time.perf_counter()
        time.sleep(1.0)
        alone = (counted[0] - before) / (time.perf_counter() - start)
        before = counted[0]
        seconds, batches, _ = epoch(loader)
        with_loader = (counted[0] - before) / seconds
    finally:
        stop.set()
        thread.join()
    return max(0.0, 1 - with_loader / alone) * seconds / batches * 1e6


def step_ms(loader: torch.utils.data.DataLoader, kernel: Kernel) -> float:
    """Returns the milliseconds per batch of a loop that copies each batch on one stream, then computes on another."""
    if device.is_cuda:
        copying, computing = torch.cuda.Stream(), torch.cuda.current_stream()
    device.synchronize()
    count, start = 0, time.perf_counter()
    for batch in loader:
        if device.is_cuda:
            with torch.cuda.stream(copying):
                moved = [tensor.to(device.kind, non_blocking=True) for tensor in tensors(batch)]
            computing.wait_stream(copying)
            for tensor in moved:
                tensor.record_stream(computing)
        kernel()
        count += 1
    device.synchronize()
    return (time.perf_counter() - start) / count * 1e3


def measure(name: str) -> None:
    options, batches = program.options, BY_NAME[name].count(program.options.quick)
    loaders = {kind: loader_of(name, of, True, options) for kind, of in KINDS.items()}
    last = {kind: epoch(loader)[2] for kind, loader in loaders.items()}
    if problem := difference(last["torch"], last["rustloader"]):
        raise Failure(f"the last batch differs between torch and rustloader: {problem}")
    example = tensors(last["rustloader"])
    if device.is_cuda and not all(tensor.is_pinned() for tensor in example if tensor.numel()):
        raise Failure("a tensor is not pinned")
    nbytes = sum(tensor.nbytes for tensor in example)
    copy_ms = device.ms(lambda: [tensor.to(device.kind, non_blocking=True) for tensor in example])
    kernel = Kernel(device, max(copy_ms, 0.2))
    limit = memcpy_rate(device, max(nbytes, 1 << 20), 1 << (24 if options.quick else 30))

    def timed(kind: str) -> dict[str, float]:
        delivered = rustloader.engine_batches()
        rate = batches / epoch(loaders[kind])[0]
        figures = {"rate": rate, "gil": gil_us(loaders[kind]), "step": step_ms(loaders[kind], kernel)}
        delivered = rustloader.engine_batches() - delivered
        if delivered != (3 * batches if kind == "rustloader" else 0):
            raise Failure(f"{kind}: {delivered} batches came from the Rust engine, which is not the expected number")
        return figures

    rounds = program.interleave({kind: lambda kind=kind: timed(kind) for kind in loaders}, name)
    trace(options, name, lambda: step_ms(loaders["rustloader"], kernel))
    ratio = spread(rounds.ratios("rustloader", "torch", "rate"), times)
    for kind in loaders:
        rate = rounds.median(kind, "rate")
        parts = [rounds.median(kind, "step"), max(1e3 / rate, copy_ms, kernel.ms), copy_ms, kernel.ms]
        cells = [f"{rate:,.0f}", f"{rate * nbytes / 1e9:.2f}", f"{limit:.2f}", us(rounds.median(kind, "gil"))]
        cells += [*(f"{part:.3f}" for part in parts), ratio if kind == "rustloader" else ""]
        program.line(name, name, kind, *cells, side=kind, rounds=rounds[kind], nbytes=nbytes, memcpy=limit, ms=parts)
    for loader in loaders.values():
        loader._iterator._shutdown_workers()


if __name__ == "__main__":
    program = program_of(__doc__, rounds=3)
    device = started(program)
    parts = ("step ms", "bound", "copy", "kernel", "ratio of batches/s")
    main(program, measure, "row", "", "batches/s", "GB/s", "memcpy", "GIL us", *parts)
