"""Processes fill one cache, and are killed at any moment: `make stress KIND=caches`.

Required: each sample that anybody reads is the one that the dataset makes; what is left takes no more than the limit; a
file is used again; no process waits for another one.
"""

import argparse
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

# Seconds after which a trial counts as one that hangs.
LIMIT = 60
_COUNT = struct.Struct("q")


class Samples(Dataset):
    """Samples of all sizes and kinds, the same each time."""

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


def opened(data, memory, path):
    return rustloader.cache(data, memory, path=path, version="1")


def read_for_ever(data, cached, seed, words):
    """The body of a child process: reads until the pipe is closed. Reports its reads, and a wrong one as -1."""
    draws = random.Random(seed)
    while True:
        for _ in range(50):
            index = draws.randrange(len(data))
            if not same(cached[index], data[index]):
                os.write(words, _COUNT.pack(-1))
                os._exit(1)
        os.write(words, _COUNT.pack(50))


class Trial:
    """Some processes with one cache, of which some are killed; then what is left is looked at."""

    def __init__(self, seed, folder):
        self.draws = draws = random.Random(seed)
        self.data = Samples(draws.choice([3, 60, 1000]), draws.choice([10, 3000, 40_000]))
        self.memory = draws.choice([64 << 10, 1 << 20, 64 << 20])
        self.path = os.path.join(folder, str(seed)) if draws.random() < 0.5 else None
        # Each program opens the file itself; what is in memory is the parent's.
        self.opens = self.path is not None and draws.random() < 0.7
        self.pids = []

    def __str__(self):
        where = "memory" if self.path is None else "a file that each opens" if self.opens else "a file"
        return f"{self.data.length} samples up to {self.data.large}, {self.memory} bytes in {where}"

    def run(self):
        """(reads, what is wrong)."""
        cached = None if self.opens else opened(self.data, self.memory, self.path)
        reader, writer = os.pipe()
        for _ in range(3):
            seed = self.draws.random()
            if (pid := os.fork()) == 0:
                os.close(reader)
                try:
                    own = opened(self.data, self.memory, self.path) if cached is None else cached
                    read_for_ever(self.data, own, seed, writer)
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
        reads, wrong = self.counted(reader)
        wrong += self.ended(killed)
        return self.looked_at(cached, reads, wrong)

    def counted(self, reader):
        os.set_blocking(reader, False)
        reads, wrong = 0, []
        try:
            while told := os.read(reader, _COUNT.size * 512):
                for (count,) in _COUNT.iter_unpack(told):
                    reads += max(count, 0)
                    wrong += ["a process read another sample"] * (count < 0)
        except BlockingIOError:
            pass
        # The survivors get a BrokenPipeError.
        os.close(reader)
        return reads, wrong

    def ended(self, killed):
        wrong, end = [], time.monotonic() + LIMIT
        for pid in self.pids:
            while (status := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
                time.sleep(0.001)
            if status == (0, 0):
                wrong.append("a process hangs")
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            elif status[1] not in (0, signal.SIGKILL) or (status[1] and pid not in killed):
                wrong.append(f"a process ends with status {status[1]}")
        return wrong

    def looked_at(self, cached, reads, wrong):
        if self.path is not None:
            cached = opened(self.data, self.memory, self.path)
        before = cached.usage()
        for index in range(len(self.data)):
            if not same(cached[index], self.data[index]):
                wrong.append(f"sample {index} is another one")
        usage = cached.usage()
        if usage.damaged:
            wrong.append(f"{usage.damaged} samples are damaged")
        if usage.samples_bytes + usage.bytes_unused + usage.bytes_left > usage.limit or usage.limit > self.memory:
            wrong.append(f"it takes more than it may: {usage}")
        if before.hits < reads - before.misses:
            wrong.append(f"{reads} reads, and the cache counts {before}")
        kept = usage.misses - before.misses
        if self.memory == 64 << 20 and sum(cached.table.takes(row) for row in range(len(self.data))):
            wrong.append(f"after {kept} more samples some are still missing")
        if self.path is not None:
            os.unlink(self.path)
        return reads + len(self.data), wrong


def main():
    parser = argparse.ArgumentParser(prog="python -m faults.caches", description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    # A pool of threads would not survive the forks.
    torch.set_num_threads(1)
    failed = reads = 0
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.trials):
            trial = Trial(args.seed + number, folder)
            count, wrong = trial.run()
            reads += count
            failed += bool(wrong)
            if wrong:
                print(f"WRONG seed {args.seed + number}: {trial}", *wrong, sep="\n  ", flush=True)
    print(f"{args.trials} trials, {failed} wrong, {reads} reads, {time.monotonic() - start:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
