"""`prefetch_to_device` under random programs: no memory is reused too early or kept too long.

The stand-in (`standin.py`) runs the work of its streams in random order, or holds it back, and notes each race.
"""

import gc
import random

import pytest
import torch
from prefetch_support import on, prefetch, tensors
from standin import StandIn

pytestmark = pytest.mark.ours


class Expected(Exception):
    pass


class Source:
    """Yields numbered batches, and sometimes raises an error instead of one. It goes on after an error."""

    def __init__(self, program, length):
        self.program, self.left = program, length
        self.items = []

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        program = self.program
        if program.rng.random() < 0.05:
            self.items.append("error")
            raise Expected
        program.number += 1
        self.items.append(program.number)
        return [torch.full((8,), program.number * 10 + leaf) for leaf in range(program.leaves)]


class Program:
    """A random training program, several epochs long."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.device = StandIn(rng)
        self.depth = rng.randint(1, 4)
        # Leaves of a batch: each is one block on the device.
        self.leaves = rng.randint(1, 3)
        self.number = 0
        # What the program keeps: leaf, its value, and the stream that its batch was delivered to.
        self.kept = []
        self.expected, self.read = [], []
        self.streams = [self.device.default, self.device.make(), self.device.make()]
        self.switches = rng.random() < 0.3
        self.keeps = rng.choice([0, 0, 0.1, 0.5])
        self.drops_at_once = rng.random() < 0.5
        # The most pieces of queued work that run between two steps: 0 holds everything back.
        self.speed = rng.choice([0, 2, 10, 40])
        self.most_ahead = 0

    def use(self, leaf, value, stream):
        """Reads a tensor in a kernel, perhaps through a view, and perhaps on another stream as torch's rules allow."""
        device, rng = self.device, self.rng
        on = rng.choice(self.streams) if rng.random() < 0.2 else stream
        if on is not stream:
            device.join(on, stream)
        expected, read = self.expected, self.read
        expected.append(value)
        place = len(expected) - 1
        device.read(leaf[2:5] if rng.random() < 0.3 else leaf, lambda values: read.append((place, values[0])), on)
        if on is not stream:
            # What was used on another stream is joined before it is dropped.
            device.join(stream, on)

    def use_kept(self):
        self.rng.shuffle(self.kept)
        for entry in self.kept[:2]:
            self.use(*entry)
        if self.rng.random() < 0.5:
            del self.kept[:1]

    def fail_copies(self):
        if self.rng.random() < 0.03:

            def fail():
                self.device.before_copy = lambda: None
                raise torch.OutOfMemoryError("no memory on the device")

            self.device.before_copy = fail

    def check_bound(self, batch):
        """At most 2 * depth + 1 batches are on the device, one of which is the program's current batch."""
        held = {self.device.block(leaf) for leaf, *_ in self.kept} | {self.device.block(leaf) for leaf in batch}
        others = len(set(self.device.blocks.values()) - held)
        assert others <= 2 * self.depth * self.leaves, (others, self.depth, self.leaves)
        self.most_ahead = max(self.most_ahead, others / self.leaves)

    def epoch(self, batches, source):
        device, rng, got = self.device, self.rng, []
        ends_at = rng.randint(1, 12) if rng.random() < 0.3 else None
        iterator, batch, stream = iter(batches), [], device.default
        while ends_at is None or len(got) < ends_at:
            if self.switches:
                stream = rng.choice(self.streams)
            self.fail_copies()
            try:
                with device.using(stream):
                    batch = next(iterator)
            except StopIteration:
                break
            except Expected:
                got.append("error")
                assert source.items[len(got) - 1] == "error"
                if rng.random() < 0.5:
                    break
                continue
            except torch.OutOfMemoryError:
                got.append("no memory")
                continue
            # Checked now: only the next call sees what the program drops from here on.
            self.check_bound(batch)
            number = source.items[len(got)]
            got.append(number)
            for place, leaf in enumerate(batch):
                self.use(leaf, number * 10 + place, stream)
            self.use_kept()
            if rng.random() < self.keeps:
                place = rng.randrange(self.leaves)
                self.kept.append((batch[place], number * 10 + place, stream))
            del leaf
            if self.drops_at_once:
                batch = []
            device.run_some(rng.randint(0, self.speed))
        else:
            if rng.random() < 0.5:
                batches.close()
            return got, False
        return got, "error" not in got[-1:]

    def run(self):
        device, rng = self.device, self.rng
        loader = Epochs(self)
        batches = prefetch(loader, depth=self.depth)
        for _ in range(rng.randint(1, 5)):
            got, is_whole = self.epoch(batches, loader)
            items = loader.items
            assert len(got) == len(items) if is_whole else len(got) <= len(items)
            for one, other in zip(got, items, strict=False):
                assert one in (other, "no memory")
            if rng.random() < 0.3:
                del batches
                batches = prefetch(loader, depth=self.depth)
        del batches
        gc.collect()
        self.use_kept()
        assert set(device.blocks.values()) == {device.block(leaf) for leaf, *_ in self.kept}
        self.kept.clear()
        assert device.live == 0
        # Another prefetcher may copy into this memory on the same stream: those copies must not run too early.
        device.run_all()
        assert sorted(self.read) == list(enumerate(self.expected)), "a kernel has read wrong values"
        assert device.faults == []


class Epochs:
    """A loader: each epoch is a new source."""

    def __init__(self, program):
        self.program = program
        self.items = []

    def __iter__(self):
        source = Source(self.program, self.program.rng.randint(0, 15))
        self.items = source.items
        return source


@pytest.mark.parametrize("block", range(20))
def test_random_programs(block):
    reached = 0
    for seed in range(block * 25, block * 25 + 25):
        program = Program(seed)
        with on(program.device):
            try:
                program.run()
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
        reached = max(reached, program.most_ahead - program.depth)
    # The bound must not hold merely because nothing is copied ahead.
    assert reached > 0


def test_stand_in_sees_memory_that_is_used_again_or_freed_too_early():
    device = StandIn()
    copying = device.make()
    hosts = [torch.ones(8), torch.zeros(8)]
    with device.using(copying):
        first = device.copy(hosts[0])
    device.join(device.default, copying)
    device.read(first, lambda values: None)
    del first
    with device.using(copying):
        second = device.copy(hosts[1])
    assert device.faults == ["memory is written while stream 0 may still use it"]
    device.read(second, lambda values: None)
    assert device.faults[1:] == ["stream 0 reads memory that stream 1 may not have written yet"]
    hosts.pop()
    device.run_all()
    assert device.faults[2:] == ["memory of the host is freed before its copy has run"]


def test_copies_wait_for_no_more_than_they_must(device):
    """While the program's stream is held back, copies go on into other memory, up to the bound."""
    depth = 3
    iterator = iter(prefetch(tensors(30), depth=depth))
    copying, batch = device.streams[1], None
    for _ in range(3):
        batch = next(iterator)
        device.read(batch, lambda values: None)
        device.run(copying)
        # No work of the program's stream has run, and the copies are all done.
        assert not copying.queue
    for _ in range(20):
        batch = next(iterator)
        device.read(batch, lambda values: None)
    device.run(copying)
    assert copying.queue, "more batches were copied than the bound allows"
    assert device.allocated <= 2 * depth + 1
    device.run_all()
    del batch
    assert device.faults == [] and device.handed_over == 0


def test_loop_that_keeps_nothing_needs_no_record_stream(device):
    batches = prefetch(tensors(30))
    for _ in range(3):
        for batch in batches:
            device.read(batch, lambda values: None)
            del batch
    assert device.handed_over == 0 and device.allocated <= 5
    device.run_all()
    assert device.faults == []


def test_labels_that_are_kept_keep_no_images(device):
    labels = []
    for image, label in prefetch([(torch.ones(1000), torch.ones(1)) for _ in range(40)]):
        device.read(image, lambda values: None)
        labels.append(label)
        del image, label
    assert device.live == 40
    assert sum(block.memory.nbytes > 4 for block in device.idle) <= 5
    device.run_all()
    assert device.faults == []
