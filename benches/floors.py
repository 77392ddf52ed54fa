"""Lower bounds for any loader: processes that do nothing but start and end, and one copy of a batch's bytes."""

import os
import statistics
import time

import numpy as np


def bare_processes(count: int, trials: int = 5) -> float:
    """Seconds to fork and reap children that end immediately; the median of trials."""
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
    """Seconds for one thread to copy bytes between warm pages; the median of trials."""
    source, target = np.ones(max(nbytes, 1), np.uint8), np.empty(max(nbytes, 1), np.uint8)
    taken = []
    for _ in range(trials + 1):
        start = time.perf_counter()
        np.copyto(target, source)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def copies_at_once(nbytes: int, processes: int, trials: int = 5) -> float:
    """Seconds per copy, with several processes that copy concurrently between warm pages of their own; the median of
    trials. It is below the time of one copy if one thread cannot use the whole memory bandwidth."""
    each = max(5, (256 << 20) // max(nbytes, 1))
    taken = []
    for _ in range(trials):
        (begin_reader, begin), (reader, done) = os.pipe(), os.pipe()
        children = []
        for _ in range(processes):
            pid = os.fork()
            if pid == 0:
                source, target = np.ones(max(nbytes, 1), np.uint8), np.ones(max(nbytes, 1), np.uint8)
                os.write(done, b"r")
                os.read(begin_reader, 1)
                for _ in range(each):
                    np.copyto(target, source)
                os.write(done, b"d")
                os._exit(0)
            children.append(pid)
        _read(reader, processes)
        start = time.perf_counter()
        os.write(begin, b"b" * processes)
        _read(reader, processes)
        taken.append((time.perf_counter() - start) / (each * processes))
        for pid in children:
            os.waitpid(pid, 0)
        for fd in (begin_reader, begin, reader, done):
            os.close(fd)
    return statistics.median(taken)


def _read(fd: int, count: int) -> None:
    while count:
        count -= len(os.read(fd, count))
