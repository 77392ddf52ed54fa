"""The device of gpu.py and to_device.py: a CUDA card; or the CPU, where they run without figures to quote."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch


class Device:
    """Args: kind: "cuda" or "cpu"."""

    def __init__(self, kind: str):
        self.kind = kind
        self.is_card = kind == "cuda"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name() if self.is_card else "no card: the CPU, no figures to quote"

    def synchronize(self) -> None:
        if self.is_card:
            torch.cuda.synchronize()

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.ones(nbytes, dtype=torch.uint8, pin_memory=self.is_card)

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """A new stream, for the body of a `with` statement."""
        return torch.cuda.stream(torch.cuda.Stream()) if self.is_card else contextlib.nullcontext()

    def ms(self, work: Callable[[], Any], repeat: int = 5) -> float:
        """Milliseconds on the device of what `work` queues there."""
        work()
        self.synchronize()
        if not self.is_card:
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
    """Work on the device that takes about this many milliseconds, and leaves memory and the host alone."""

    def __init__(self, device: Device, milliseconds: float):
        self.matrix = torch.rand((2048, 2048) if device.is_card else (64, 64), device=device.kind)
        self.out = torch.empty_like(self.matrix)
        self.times = 1
        once = device.ms(self)
        self.times = max(1, round(milliseconds / once))
        self.ms = device.ms(self)

    def __call__(self) -> None:
        for _ in range(self.times):
            torch.mm(self.matrix, self.matrix, out=self.out)


def memcpy_rate(device: Device, nbytes: int, total: int = 1 << 30) -> float:
    """GB/s of one thread from ordinary to pinned memory, in pieces of a batch."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), device.pinned(nbytes)
    target.copy_(source)
    rounds = max(3, total // nbytes)
    start = time.perf_counter()
    for _ in range(rounds):
        target.copy_(source)
    return rounds * nbytes / (time.perf_counter() - start) / 1e9


def to_device_rate(device: Device, nbytes: int) -> float:
    """GB/s of cudaMemcpyAsync from pinned memory to memory that the device has already: the limit of any copy."""
    source, target = device.pinned(nbytes), torch.empty(nbytes, dtype=torch.uint8, device=device.kind)
    return nbytes / device.ms(lambda: target.copy_(source, non_blocking=True)) / 1e6
