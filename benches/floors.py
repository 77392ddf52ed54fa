"""What no loader can be faster than: processes that do nothing but start and end, and one copy of a batch's bytes."""

import os
import statistics
import time

import numpy as np


def bare_processes(count: int, trials: int = 5) -> float:
    """Seconds to fork so many children that end at once, and to wait for them; the median of trials."""
    taken = []
    for _ in range(trials):
        start = time.perf_counter()
        children = []
        for _ in range(count):
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def copy_of(nbytes: int, trials: int = 15) -> float:
    """Seconds in which one thread copies so many bytes between warm pages; the median of trials."""
    source, target = np.ones(max(nbytes, 1), np.uint8), np.empty(max(nbytes, 1), np.uint8)
    taken = []
    for _ in range(trials + 1):
        start = time.perf_counter()
        np.copyto(target, source)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])
