"""Several processes fill one cache, and some are killed at random moments: `make stress KIND=caches`.

Required: every sample read equals the dataset's; the cache stays within its limit; a file can be reopened; no
process waits for another.
"""

import os
import random
import signal
import struct
import sys
import tempfile
import time

import numpy as np
import torch
from support import rustloader, same
from torch.utils.data import Dataset

from .trials import arguments, run_all, status_of

# Seconds after which a process counts as hung.
LIMIT = 60
_COUNT = struct.Struct("q")


class Samples(Dataset):
    """Deterministic samples of many sizes and types."""

    def __init__(self, length, large):
        self.length, self.large = length, large

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        size = 1 + index * 37 % self.large
        match index % 5:
            case 0:
                return torch.full((size,), index)
            case 1:
                return {"array": np.full(size, index, np.int16), "text": str(index) * (index % 50)}
            case 2:
                return index, bytes([index % 256]) * size
            case 3:
                return {index, size}
            case _:
                return [torch.arange(3), (index, None), index / 7]


def open_cache(data, memory, path):
    return rustloader.cache(data, memory, path=path, version="1")


def read_until_closed(data, cached, seed, pipe):
    """The body of a child process: reads until the pipe is closed. Reports its reads, and a wrong sample as -1."""
    draws = random.Random(seed)
    while True:
        for _ in range(50):
            index = draws.randrange(len(data))
            if not same(cached[index], data[index]):
                os.write(pipe, _COUNT.pack(-1))
                os._exit(1)
        os.write(pipe, _COUNT.pack(50))


class Trial:
    """Several processes use one cache, and some are killed; then the cache is checked."""

    def __init__(self, seed, folder):
        self.draws = draws = random.Random(seed)
        self.data = Samples(draws.choice([3, 60, 1000]), draws.choice([10, 3000, 40_000]))
        self.memory = draws.choice([64 << 10, 1 << 20, 64 << 20])
        self.path = os.path.join(folder, str(seed)) if draws.random() < 0.5 else None
        # Whether each process opens the file itself. A cache in memory is inherited from the parent.
        self.opens = self.path is not None and draws.random() < 0.7
        self.pids = []

    def __str__(self):
        where = "memory" if self.path is None else "a file that each process opens" if self.opens else "a file"
        return f"{self.data.length} samples up to {self.data.large}, {self.memory} bytes in {where}"

    def run(self):
        """Returns (the number of reads, the problems found)."""
        cached = None if self.opens else open_cache(self.data, self.memory, self.path)
        reader, writer = os.pipe()
        for _ in range(3):
            seed = self.draws.random()
            if (pid := os.fork()) == 0:
                os.close(reader)
                try:
                    own = open_cache(self.data, self.memory, self.path) if cached is None else cached
                    read_until_closed(self.data, own, seed, writer)
                except BrokenPipeError:
                    os._exit(0)
                except BaseException as error:
                    os.write(2, f"{type(error).__name__}: {error}\n".encode())
                    os._exit(1)
            self.pids.append(pid)
        os.close(writer)
        time.sleep(self.draws.choice([0, 0.002, 0.02, 0.1]) * self.draws.random())
        killed = self.draws.sample(self.pids, self.draws.choice([1, 1, 2, 3]))
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        reads, wrong = self.count_reads(reader)
        wrong += self.reap(killed)
        return self.inspect(cached, reads, wrong)

    def count_reads(self, reader):
        os.set_blocking(reader, False)
        reads, wrong = 0, []
        try:
            while data := os.read(reader, _COUNT.size * 512):
                for (count,) in _COUNT.iter_unpack(data):
                    reads += max(count, 0)
                    wrong += ["a process read a wrong sample"] * (count < 0)
        except BlockingIOError:
            pass
        # From here on the survivors get a BrokenPipeError.
        os.close(reader)
        return reads, wrong

    def reap(self, killed):
        wrong = []
        for pid in self.pids:
            status = status_of(pid, LIMIT)
            if status is None:
                wrong.append("a process hangs")
            elif status not in (0, signal.SIGKILL) or (status and pid not in killed):
                wrong.append(f"a process ends with status {status}")
        return wrong

    def inspect(self, cached, reads, wrong):
        if self.path is not None:
            cached = open_cache(self.data, self.memory, self.path)
        before = cached.usage()
        for index in range(len(self.data)):
            if not same(cached[index], self.data[index]):
                wrong.append(f"sample {index} is wrong")
        usage = cached.usage()
        if usage.damaged:
            wrong.append(f"{usage.damaged} samples are damaged")
        if usage.samples_bytes + usage.bytes_unused + usage.bytes_left > usage.limit or usage.limit > self.memory:
            wrong.append(f"the cache exceeds its limit: {usage}")
        if before.lifetime_hits < reads - before.lifetime_misses:
            wrong.append(f"{reads} reads, but the cache counts {before}")
        kept = usage.misses - before.misses
        if self.memory == 64 << 20 and sum(cached.table.takes(row) for row in range(len(self.data))):
            wrong.append(f"{kept} more samples were stored, but some are still missing")
        if self.path is not None:
            os.unlink(self.path)
        return reads + len(self.data), wrong


def main():
    args = arguments("caches", __doc__, trials=(500, "the number of trials"), seed=(0, "seed of the first trial"))
    # A thread pool would not survive the forks.
    torch.set_num_threads(1)
    reads, start = [], time.monotonic()

    def play(trial, _):
        count, wrong = trial.run()
        reads.append(count)
        return wrong

    with tempfile.TemporaryDirectory() as folder:
        trials = (Trial(args.seed + number, folder) for number in range(args.trials))
        named = ((f"seed {args.seed + number}: {trial}", trial) for number, trial in enumerate(trials))
        done, failed = run_all(named, play, sep="\n  ")
    print(f"{done} trials, {failed} wrong, {sum(reads)} reads, {time.monotonic() - start:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
