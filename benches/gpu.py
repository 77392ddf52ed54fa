"""Compare pinned batches of rustloader's DataLoader with torch's, on a machine with a CUDA device.

For each row of compare.py that has tensors, with persistent workers and after one epoch to warm up, medians of rounds:

rate     batches per second that arrive in pinned memory while nothing else is done, and GB/s of their tensors. `memcpy`
         is what one thread copies from ordinary to pinned memory: the limit of one pin thread.
GIL      microseconds per batch for which the interpreter was not free. A Python thread counts while the loader runs;
         the share is what it counts less than alone. It includes what the calling thread itself does in next().
step     milliseconds per batch of a training loop that copies to the device with non_blocking=True and computes there
         for about as long as the copy takes. `bound` is the longest of the parts alone (loader, copy, kernel): if
         `step` is near it, they overlap.

The last batches of both loaders are compared. `--trace FILE` writes a profile of rustloader's training loop.

It needs a CUDA device. With --device cpu it runs as a whole where there is none, pins nothing, and its figures mean
nothing.
"""

import argparse
import statistics
import sys
import threading
import time
import warnings
from typing import Any

import compare
import torch
import torch.utils.data
from card import Device, Kernel, memcpy_rate
from epochs import Failure, difference
from rows import ROWS, Row, Samples

import rustloader

# default_collate makes tensors of images_numpy.
WITHOUT_TENSORS = {"fresh_numpy", "ready_numpy", "texts"}
OF_STARTS = {"epoch_start", "start_spawn", "start_forkserver"}
WITH_TENSORS = [row for row in ROWS if row.name not in WITHOUT_TENSORS | OF_STARTS]


def tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, dict):
        batch = batch.values()
    return [x for item in batch for x in tensors(item)] if not isinstance(batch, int | float | str | bytes) else []


def epoch(loader: torch.utils.data.DataLoader) -> tuple[float, int, Any]:
    """Seconds, batches, and the last batch."""
    count, batch, start = 0, None, time.perf_counter()
    for batch in loader:  # noqa: B007 (the last one is returned)
        count += 1
    return time.perf_counter() - start, count, batch


# --- the three measurements -----------------------------------------------------------------------------------------


def gil_us(loader: torch.utils.data.DataLoader) -> float:
    """Microseconds per batch for which a thread that wants to count could not."""
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
        beside = (counted[0] - before) / seconds
    finally:
        stop.set()
        thread.join()
    return max(0.0, 1 - beside / alone) * seconds / batches * 1e6


def step_ms(loader: torch.utils.data.DataLoader, device: Device, kernel: Kernel) -> float:
    """Milliseconds per batch of a loop that copies on one stream and computes on another, one batch behind."""
    if device.is_card:
        copying, computing = torch.cuda.Stream(), torch.cuda.current_stream()
    device.synchronize()
    count, start = 0, time.perf_counter()
    for batch in loader:
        if device.is_card:
            with torch.cuda.stream(copying):
                moved = [tensor.to(device.kind, non_blocking=True) for tensor in tensors(batch)]
            computing.wait_stream(copying)
            for tensor in moved:
                tensor.record_stream(computing)
        kernel()
        count += 1
    device.synchronize()
    return (time.perf_counter() - start) / count * 1e3


# --- a row ----------------------------------------------------------------------------------------------------------


def measure(row: Row, options: argparse.Namespace, device: Device) -> None:
    batches = max(8, row.batches // (10 if options.quick else 1))
    dataset = Samples(row.samples(), batches * (row.batch_size or 1), row.fresh)
    common = {"batch_size": row.batch_size, "collate_fn": row.collate, "num_workers": options.workers}
    loaders = {
        name: cls(dataset, pin_memory=device.is_card, persistent_workers=True, **common)
        for name, cls in (("torch", torch.utils.data.DataLoader), ("rustloader", rustloader.DataLoader))
    }
    last = {name: epoch(loader)[2] for name, loader in loaders.items()}
    found = difference(last["torch"], last["rustloader"])
    if found:
        raise Failure(f"the last batch differs between torch and rustloader: {found}")
    example = tensors(last["rustloader"])
    if device.is_card and not all(tensor.is_pinned() for tensor in example if tensor.numel()):
        raise Failure("a tensor is not pinned")
    nbytes = sum(tensor.nbytes for tensor in example)
    copy_ms = device.ms(lambda: [tensor.to(device.kind, non_blocking=True) for tensor in example])
    kernel = Kernel(device, max(copy_ms, 0.2))
    limit = memcpy_rate(device, max(nbytes, 1 << 20), 1 << (24 if options.quick else 30))
    results: dict[str, dict[str, list[float]]] = {name: {"s": [], "gil": [], "step": []} for name in loaders}
    for number in range(options.rounds):
        names = list(loaders) if number % 2 == 0 else list(loaders)[::-1]
        for name in names:
            delivered = rustloader.engine_batches()
            results[name]["s"].append(epoch(loaders[name])[0] / batches)
            results[name]["gil"].append(gil_us(loaders[name]))
            results[name]["step"].append(step_ms(loaders[name], device, kernel))
            delivered = rustloader.engine_batches() - delivered
            if delivered != (3 * batches if name == "rustloader" else 0):
                raise Failure(f"{name}: {delivered} batches came from the Rust engine")
    if options.trace:
        with torch.profiler.profile() as profile:
            step_ms(loaders["rustloader"], device, kernel)
        profile.export_chrome_trace(f"{options.trace}.{row.name}.json")
    for name, lists in results.items():
        seconds, gil, step = (statistics.median(values) for values in lists.values())
        rate = f"{1 / seconds:>11,.0f}{nbytes / seconds / 1e9:>8.2f}{limit:>8.2f}"
        bound = max(seconds * 1e3, copy_ms, kernel.ms)
        print(
            f"{row.name:<16}{name:<12}{rate} |{gil:>10,.1f} |{step:>9.3f}{bound:>9.3f}{copy_ms:>9.3f}{kernel.ms:>9.3f}"
        )
    ratio = statistics.median(results["torch"]["s"]) / statistics.median(results["rustloader"]["s"])
    print(f"{'':<16}{'ratio':<12}{ratio:>10.1f}x", flush=True)
    for loader in loaders.values():
        loader._iterator._shutdown_workers()


def main() -> int:
    rows = WITH_TENSORS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", metavar="NAME,...", default=",".join(row.name for row in rows))
    parser.add_argument("--rounds", type=int, default=3, help="rounds a row (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=4, help="worker processes a loader (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the batches: no figures to quote")
    parser.add_argument("--trace", metavar="FILE", help="write FILE.<row>.json, a profile of the training loop")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: without a card, no figures")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: this comparison is for a machine that has one", file=sys.stderr)
        return 2
    device = Device(options.device)
    warnings.filterwarnings("ignore", "This DataLoader will create")
    torch.set_num_threads(1)
    about = compare.machine()
    print(f"{device.name}; {about['cpu']}, {about['cores']} cores; ", end="")
    print(f"Python {about['python']}, torch {about['torch']}; {options.workers} workers, ", end="")
    print(f"medians of {options.rounds} rounds{', quick' * options.quick}\n")
    print(f"{'row':<16}{'':<12}{'batches/s':>11}{'GB/s':>8}{'memcpy':>8} |{'GIL us':>10} |", end="")
    print(f"{'step ms':>9}{'bound':>9}{'copy':>9}{'kernel':>9}", flush=True)
    failed = False
    for row in rows:
        if row.name in options.rows.split(","):
            try:
                measure(row, options, device)
            except Failure as failure:
                failed = True
                print(f"{row.name:<16}FAILED: {failure}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
