"""Lower bounds for any loader: processes that only start and exit, and copies of a batch's bytes."""

import os
import statistics
import time
from collections.abc import Callable

import numpy as np
from harness.processes import at_once


def seconds(work: Callable[[], object]) -> float:
    """Returns the seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def bare_processes(count: int, trials: int = 5) -> float:
    """Returns the seconds to fork and reap ``count`` children that exit immediately; the median of ``trials``."""

    def run() -> None:
        children = []
        for _ in range(count):
            if (pid := os.fork()) == 0:
                os._exit(0)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)

    return statistics.median(seconds(run) for _ in range(trials))


def copy_of(nbytes: int, trials: int = 15) -> float:
    """Returns the seconds that one thread takes to copy ``nbytes`` between warm pages; the median of ``trials``."""
    source, target = np.ones(max(nbytes, 1), np.uint8), np.ones(max(nbytes, 1), np.uint8)
    return statistics.median(seconds(lambda: np.copyto(target, source)) for _ in range(trials))


def copies_at_once(nbytes: int, processes: int, trials: int = 5) -> float:
    """Returns the seconds per copy when processes copy concurrently, each between warm pages; the median of ``trials``.

    The result is below that of ``copy_of`` if one thread cannot use all of the memory bandwidth.
    """
    each = min(max(5, (256 << 20) // max(nbytes, 1)), 20_000)

    def prepare(_: int) -> Callable[[], object]:
        source, target = np.ones(max(nbytes, 1), np.uint8), np.ones(max(nbytes, 1), np.uint8)
        return lambda: [np.copyto(target, source) for _ in range(each)]

    return statistics.median(at_once(processes, prepare) for _ in range(trials)) / (each * processes)
