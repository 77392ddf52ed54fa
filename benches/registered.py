"""Measures what registering shared memory with CUDA would cost and gain. The engine does not register memory.

The memory is like the arena's: a memfd, mapped MAP_SHARED, whose pages are populated. It is registered with
cudaHostRegister in grains of 64 MiB (--grain). src/engine/PINNING.md says which figures would justify it.

register      milliseconds per grain, and GB/s; unregister likewise.
registered    GB/s to the device straight from registered memory, by batch size (--sizes, in MB).
pinned        GB/s of cudaMemcpyAsync from torch's pinned memory: the limit.
pin + copy    GB/s of the current path of batches: one thread copies from shared to pinned memory, while the previous
              batch goes to the device.

It needs a CUDA device. With --device cpu it runs without one, but it registers nothing and its results mean nothing.
"""

import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from card import Device, started

from rustloader.tools.harness.program import Program, main
from rustloader.tools.harness.rounds import spread

MB, MIB = 1_000_000, 1 << 20


class Shared:
    """Memory like the arena's, in grains that are registered one by one."""

    def __init__(self, nbytes: int, grain: int):
        descriptor = os.memfd_create("registered")
        os.ftruncate(descriptor, nbytes)
        self._mapping = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED)
        os.close(descriptor)
        self.tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.tensor.fill_(1)
        self.grains = [(begin, min(grain, nbytes - begin)) for begin in range(0, nbytes, grain)]

    def each(self, call: Callable[[int, int], None]) -> list[float]:
        """Calls ``call`` with the address and the size of each grain. Returns the seconds that each call takes."""
        seconds = []
        for begin, nbytes in self.grains:
            start = time.perf_counter()
            call(self.tensor.data_ptr() + begin, nbytes)
            seconds.append(time.perf_counter() - start)
        return seconds


def register(address: int, nbytes: int) -> None:
    check(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))


def unregister(address: int, nbytes: int) -> None:
    check(torch.cuda.cudart().cudaHostUnregister(address))


def check(status: Any) -> None:
    torch.cuda.check_error(int(status))


def nothing(address: int, nbytes: int) -> None:
    pass


def batches_of(shared: Shared, nbytes: int) -> list[torch.Tensor]:
    """Returns batches, none of which spans two grains: CUDA would copy one that does as if from pageable memory."""
    batches = []
    for begin, size in shared.grains:
        batches += [shared.tensor[at : at + nbytes] for at in range(begin, begin + size - nbytes + 1, nbytes)]
    return batches


def straight_rate(device: Device, batches: list[torch.Tensor]) -> float:
    """Returns the GB/s of copies to the device straight from these batches, one after another."""
    target = torch.empty_like(batches[0], device=device.kind)

    def copies() -> None:
        for batch in batches:
            target.copy_(batch, non_blocking=True)

    return len(batches) * batches[0].nbytes / device.ms(copies, repeat=3) / 1e6


def staged_rate(device: Device, batches: list[torch.Tensor]) -> float:
    """Returns the GB/s of copies to the device through two pinned buffers that one thread fills in turn."""
    buffers = [device.pinned(batches[0].nbytes) for _ in range(2)]
    target = torch.empty_like(batches[0], device=device.kind)
    done = [torch.cuda.Event() for _ in range(2)] if device.is_cuda else []
    for _ in range(2):
        device.synchronize()
        start = time.perf_counter()
        for k, batch in enumerate(batches):
            if device.is_cuda:
                done[k % 2].synchronize()
            buffers[k % 2].copy_(batch)
            target.copy_(buffers[k % 2], non_blocking=True)
            if device.is_cuda:
                done[k % 2].record()
        device.synchronize()
        seconds = time.perf_counter() - start
    return len(batches) * batches[0].nbytes / seconds / 1e9


def measure(row: str) -> None:
    options = program.options
    device.synchronize()  # creates the CUDA context before anything is timed
    shared = Shared(options.mib * MIB, options.grain * MIB)
    register_grain, unregister_grain = (register, unregister) if device.is_cuda else (nothing, nothing)
    register_seconds, unregister_seconds = [], []
    for number in range(options.rounds):
        if number:
            unregister_seconds += shared.each(unregister_grain)
        register_seconds += shared.each(register_grain)
    try:
        for nbytes in sizes:
            batches = batches_of(shared, nbytes)
            pinned = [device.pinned(nbytes)] * len(batches)
            sides = {
                "registered": lambda batches=batches: straight_rate(device, batches),
                "pinned": lambda pinned=pinned: straight_rate(device, pinned),
                "pin + copy": lambda batches=batches: staged_rate(device, batches),
            }
            rates = program.interleave(sides, f"{nbytes / MB:g} MB")
            cells = [spread(rates[side], "{:.2f}".format) for side in sides]
            program.line(row, f"{nbytes / MB:g} MB", *cells, nbytes=nbytes, rounds=rates)
    finally:
        unregister_seconds += shared.each(unregister_grain)
    program.head("", f"ms per {options.grain} MiB", "GB/s")
    for name, seconds in (("register", register_seconds), ("unregister", unregister_seconds)):
        rate = options.grain * MIB / max(statistics.median(seconds), 1e-9) / 1e9
        milliseconds = spread([once * 1e3 for once in seconds], f"{{:.3f}} ms per {options.grain} MiB".format)
        program.line(name, name, milliseconds, f"{rate:.1f}" * device.is_cuda, seconds=seconds)


if __name__ == "__main__":
    program = Program(__doc__, ["copies"])
    program.option("--mib", type=int, default=1024, help="MiB of shared memory (default: %(default)s)")
    program.option("--grain", type=int, default=64, help="MiB per registration (default: %(default)s)")
    program.option("--sizes", default="1,9.6,38.5", metavar="MB,...", help="sizes of batches (default: %(default)s)")
    device = started(program)
    sizes = [round(float(size) * MB) for size in program.options.sizes.split(",")]
    if max(sizes) > min(program.options.grain, program.options.mib) * MIB:
        print("a batch must fit into a grain: give a larger --grain or smaller --sizes", file=sys.stderr)
        sys.exit(2)
    main(program, measure, "batch, GB/s", "registered", "pinned", "pin + copy")
