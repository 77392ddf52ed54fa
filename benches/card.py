"""Shared parts of the programs for a CUDA device: the device, the options, work on the device, and its limits.

With --device cpu the programs run without a CUDA device, and their results mean nothing.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from harness.program import Program
from rows import BY_NAME, ROWS

# Rows that are left out, because their batches have no tensors, or because they measure starts. images_numpy is not
# among them: default_collate converts its arrays to tensors.
WITHOUT_TENSORS = {"fresh_numpy", "ready_numpy", "texts", "epoch_start", "start_spawn", "start_forkserver"}
WITH_TENSORS = [row.name for row in ROWS if row.name not in WITHOUT_TENSORS]


def program_of(text: str | None, rounds: int, default: tuple[str, ...] = ()) -> Program:
    """Returns a program with rows of `make compare`. ``default`` names the rows that run without ``--rows``."""
    program = Program(text, WITH_TENSORS, rounds)
    program.parser.set_defaults(rows=",".join(default or WITH_TENSORS))
    program.option("--workers", type=int, default=4, help="worker processes per loader (default: %(default)s)")
    program.option("--quick", action="store_true", help="run a tenth of the batches; do not quote the results")
    program.option("--trace", metavar="FILE", help="write FILE.<row>.json, a profile of the training loop")
    return program


def started(program: Program) -> "Device":
    """Parses the command line and returns the device. Exits if there is no CUDA device, unless --device is cpu."""
    program.option(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: run without a GPU; the results mean nothing"
    )
    options = program.parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: this measurement needs one", file=sys.stderr)
        sys.exit(2)
    device = Device(options.device)
    print(f"{device.name}{', quick' * getattr(options, 'quick', False)}")
    return device


def loader_of(name: str, kind: type, pinned: bool, options: argparse.Namespace) -> torch.utils.data.DataLoader:
    """Returns a loader for a row, with persistent workers."""
    row = BY_NAME[name]
    arguments = row.arguments() | {"num_workers": options.workers, "pin_memory": pinned and options.device == "cuda"}
    return kind(row.dataset(options.quick), persistent_workers=True, **arguments)


def tensors(batch: Any) -> list[torch.Tensor]:
    """Returns all tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, dict):
        batch = batch.values()
    return [x for item in batch for x in tensors(item)] if not isinstance(batch, int | float | str | bytes) else []


def trace(options: argparse.Namespace, name: str, work: Callable[[], object]) -> None:
    """Runs ``work`` and writes a profile of it, if --trace is given."""
    if options.trace:
        with torch.profiler.profile() as profile:
            work()
        profile.export_chrome_trace(f"{options.trace}.{name}.json")


class Device:
    """The device on which a program runs. ``kind`` is "cuda", or "cpu" for a run without a CUDA device."""

    def __init__(self, kind: str):
        self.kind = kind
        self.is_cuda = kind == "cuda"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name() if self.is_cuda else "no GPU: this ran on the CPU, do not quote the results"

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.ones(nbytes, dtype=torch.uint8, pin_memory=self.is_cuda)

    def ms(self, work: Callable[[], Any], repeat: int = 5) -> float:
        """Returns the mean milliseconds that the device takes for the operations that a call of `work` queues."""
        work()
        self.synchronize()
        if not self.is_cuda:
            start = time.perf_counter()
            for _ in range(repeat):
                work()
            return (time.perf_counter() - start) / repeat * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeat):
            work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / repeat


class Kernel:
    """Work that keeps the device busy for about ``milliseconds``, with little use of memory bandwidth or the host."""

    def __init__(self, device: Device, milliseconds: float):
        self.matrix = torch.rand((2048, 2048) if device.is_cuda else (64, 64), device=device.kind)
        self.out = torch.empty_like(self.matrix)
        self.times = 1
        once = device.ms(self)
        self.times = max(1, round(milliseconds / once))
        self.ms = device.ms(self)

    def __call__(self) -> None:
        for _ in range(self.times):
            torch.mm(self.matrix, self.matrix, out=self.out)


def memcpy_rate(device: Device, nbytes: int, total: int = 1 << 30) -> float:
    """Returns the GB/s at which one thread copies from pageable to pinned memory, in pieces of ``nbytes``."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), device.pinned(nbytes)
    target.copy_(source)
    rounds = max(3, total // nbytes)
    start = time.perf_counter()
    for _ in range(rounds):
        target.copy_(source)
    return rounds * nbytes / (time.perf_counter() - start) / 1e9


def to_device_rate(device: Device, nbytes: int) -> float:
    """Returns the GB/s of cudaMemcpyAsync from pinned memory to allocated device memory: the limit for any copy."""
    source, target = device.pinned(nbytes), torch.empty(nbytes, dtype=torch.uint8, device=device.kind)
    return nbytes / device.ms(lambda: target.copy_(source, non_blocking=True)) / 1e6
