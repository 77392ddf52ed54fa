"""Describes this machine, and measures CPU time."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterable
from typing import Any

from rustloader.metrics.cpu_time import seconds_of_threads


def machine() -> dict[str, Any]:
    """Describes the processor, the cores that this process may use, the memory, and the installed versions."""
    import torch

    from rustloader import __version__

    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as file:
        model = next((entry.split(":", 1)[1].strip() for entry in file if entry.startswith("model name")), model)
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rustloader": __version__,
    }


def sentence() -> str:
    """Describes this machine and the installed versions in one line."""
    return (
        "{cpu}, {cores} cores, {memory_gib} GiB; Linux {kernel}, Python {python}, torch {torch}, "
        "rustloader {rustloader}".format(**machine())
    )


def cpu_seconds(workers: Iterable[int]) -> float:
    """Returns the CPU time of this process, of the children that it has reaped, and of running workers.

    ``workers`` are process IDs. A process that no longer exists counts as 0.
    """
    total = sum(seconds for seconds in map(seconds_of_threads, workers) if seconds is not None)
    for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(scope)
        total += usage.ru_utime + usage.ru_stime
    return total
