"""Prefetches batches to a device for a consumer that delays its stream and drops batches early.

Each epoch has a random depth, random streams and a random consumer. The consumer queues delays (100 ms on a GPU)
before it sums a batch on the device, drops most batches immediately, keeps some, changes streams, and breaks off some
epochs. After each epoch every sum is compared with that of the samples: memory that is reused too early changes it.

It needs a CUDA device: `make stress KIND=gpu ARGS='--minutes 10'`. With --stand-in it runs on the simulated device of
standin.py, whose streams advance in random order, and which detects races itself.
"""

import argparse
import random
import sys
import time
from unittest import mock

import torch
import torch.utils.data

import rustloader

SIZE = 1 << 16


class Stamped(torch.utils.data.Dataset):
    """Samples whose sums are all different."""

    def __init__(self, length, size=SIZE):
        self.length, self.size = length, size

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((self.size,), index, dtype=torch.int32), index


class Wrong(Exception):
    """A sum is not that of its batch."""


class Card:
    """A CUDA device."""

    def __init__(self):
        self.streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1000)
        begin.record()
        torch.cuda._sleep(10_000_000)
        end.record()
        torch.cuda.synchronize()
        # Cycles in 100 ms.
        self.cycles = int(10_000_000 / begin.elapsed_time(end) * 100)

    def using(self, stream):
        return torch.cuda.stream(stream)

    def delay(self):
        torch.cuda._sleep(self.cycles)

    def sum(self, tensor):
        """Queues the sum of a tensor in the current stream. Returns a handle for `values`."""
        return tensor.sum(dtype=torch.int64)

    def values(self, sums):
        torch.cuda.synchronize()
        return [int(it) for it in sums]

    def go_on(self):
        pass

    def check(self):
        pass


class WithoutHardware:
    """The stand-in: queued work runs in random order, some of it after each batch."""

    def __init__(self, rng):
        from standin import StandIn

        self.rng = rng
        self.device = device = StandIn(rng)
        self.streams = [device.default, device.make(), device.make()]
        self.held = 0

    def using(self, stream):
        return self.device.using(stream)

    def delay(self):
        # Sometimes nothing runs during the next batches.
        if self.held < 0:
            self.held = self.rng.choice([0, 3])

    def sum(self, tensor):
        sums = []
        self.device.read(tensor, lambda values: sums.append(sum(values)))
        return sums

    def values(self, sums):
        self.device.run_all()
        return [value for (value,) in sums]

    def go_on(self):
        self.held -= 1
        if self.held < 0:
            self.device.run_some(self.rng.randint(0, 20))

    def check(self):
        if self.device.faults:
            raise Wrong(f"the stand-in has detected: {self.device.faults[0]}")


def epoch(loader, side, rng):
    """Runs an epoch and returns the number of its batches. Raises Wrong."""
    depth, switches = rng.randint(1, 4), rng.random() < 0.3
    ends_at = rng.randint(1, 20) if rng.random() < 0.3 else None
    iterator = iter(rustloader.prefetch_to_device(loader, depth=depth))
    # (batch number, sum), and (batch number, stream, images).
    sums, kept = [], []
    stream, number = side.streams[0], 0
    while number != ends_at:
        stream = rng.choice(side.streams) if switches else stream
        with side.using(stream):
            batch = next(iterator, None)
            if batch is None:
                break
            side.delay()
            # Some batches are dropped unread, while their copies may be in progress.
            if rng.random() < 0.9:
                sums.append((number, side.sum(batch[0])))
            if rng.random() < 0.1:
                kept.append((number, stream, batch[0]))
            del batch
        if kept and rng.random() < 0.2:
            kept_number, kept_stream, images = kept.pop(0)
            with side.using(kept_stream):
                sums.append((kept_number, side.sum(images)))
            del images
        number += 1
        side.go_on()
    del iterator
    for kept_number, kept_stream, images in kept:
        with side.using(kept_stream):
            sums.append((kept_number, side.sum(images)))
    size, batch_size = loader.dataset.size, loader.batch_size
    values = side.values([it for _, it in sums])
    for (at, _), value in zip(sums, values, strict=True):
        expected = size * sum(range(at * batch_size, (at + 1) * batch_size))
        if value != expected:
            raise Wrong(f"batch {at} of {number}, depth {depth}: the sum is {value}, not {expected}")
    side.check()
    return number


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to run (default: %(default)s)")
    parser.add_argument("--epochs", type=int, metavar="N", help="end after N epochs")
    parser.add_argument("--seed", type=int, default=None, help="seed (default: a random one, which is printed)")
    parser.add_argument("--small", action="store_true", help="use few, small batches, for compute-sanitizer")
    parser.add_argument("--stand-in", action="store_true", help="run on a simulated device")
    options = parser.parse_args()
    if not options.stand_in and not torch.cuda.is_available():
        print("no CUDA device: this measurement needs one; --stand-in needs none", file=sys.stderr)
        return 2
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    rng = random.Random(seed)
    end, epochs, batches = time.monotonic() + 60 * options.minutes, 0, 0
    is_small = options.stand_in or options.small
    dataset = Stamped(160, 64) if is_small else Stamped(3200)
    kw = {"batch_size": 4 if is_small else 32, "num_workers": 2, "persistent_workers": True}
    loader = rustloader.DataLoader(dataset, pin_memory=not options.stand_in, **kw)
    try:
        while time.monotonic() < end and epochs != options.epochs:
            if options.stand_in:
                side = WithoutHardware(rng)
                with mock.patch("rustloader.device.prefetch.loader.streams_of", lambda asked, side=side: side.device):
                    batches += epoch(loader, side, rng)
            else:
                batches += epoch(loader, Card(), rng)
            epochs += 1
    except Wrong as wrong:
        print(f"WRONG, epoch {epochs}, --seed {seed}: {wrong}", file=sys.stderr)
        return 1
    where = "a simulated device" if options.stand_in else torch.cuda.get_device_name()
    print(f"{epochs} epochs, {batches} batches on {where}: all sums are right (--seed {seed})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
