"""A simulated device, whose streams, events, copies and memory a test controls.

Work is queued and runs when the test lets it: `StandIn.run` runs the work of one stream, `run_some` runs streams in
random order, and `run_all` runs everything. Streams wait for each other as on a device. As in torch's allocator, freed
memory goes to its stream's pool and is reused immediately, the most recently freed first.

It detects races even if they do not happen: each piece of work has a vector clock of the work that must run before it.
`faults` lists memory that is written while earlier work may still use it, or read before it is written, and host memory
that is freed before its copy has run.
"""

import contextlib
import functools
import threading
import weakref

import numpy as np
import torch

from rustloader.device.prefetch.streams import Streams

POISON = 0xEE


class Stream:
    def __init__(self, number):
        self.number = number
        self.queue = []
        # How many pieces of work of each stream must have run before this stream's next piece.
        self.clock = {}
        self.queued = 0

    def __repr__(self):
        return f"stream {self.number}"


class Event:
    def __init__(self, clock):
        self.clock = clock
        self.done = False
        self.time = None


class Block:
    """Device memory. It belongs to the stream on which it was allocated."""

    def __init__(self, nbytes, stream):
        self.memory = np.full(nbytes, POISON, np.uint8)
        self.stream = stream
        # Work that uses it: (stream, count, clock).
        self.uses = []
        self.write = None
        # Streams on which it was recorded: once it is freed, the allocator waits for them.
        self.recorded = []


class StandIn(Streams):
    def __init__(self, rng=None, index=0):
        self.device = torch.device("cuda", index)
        self.rng = rng
        self.default = Stream(0)
        self.streams = [self.default]
        self.thread = threading.local()
        # Work that the program knows to be done: everything queued later runs after it.
        self.seen = {}
        self.idle = []
        self.pending = []
        self.blocks = {}
        self.faults = []
        self.copies = 0
        self.time = 0.0
        self.capturing = False
        self.pinned = True
        # Called before each copy; may raise.
        self.before_copy = lambda: None
        # Called with the name of each method that calls the driver; may raise.
        self.before_call = lambda name: None
        # For each call in progress: the tensors created on the device, and those read on the host.
        self.traces = []
        self.handed_over = 0
        self.allocated = 0

    # The interface of `Streams`.

    def make(self):
        self.streams.append(Stream(len(self.streams)))
        return self.streams[-1]

    def current(self):
        return getattr(self.thread, "stream", self.default)

    @contextlib.contextmanager
    def using(self, stream):
        before = self.current()
        self.thread.stream = stream
        try:
            yield
        finally:
            self.thread.stream = before

    def save(self):
        return self.current()

    def restore(self, saved):
        self.thread.stream = saved

    def record(self, stream, timed=False):
        self.before_call("record")
        return self._event(stream)

    def _event(self, stream):
        event = Event(self._clock_of(stream))

        def run():
            event.done, event.time = True, self.time

        self._queue(stream, run)
        return event

    def wait(self, stream, event):
        self.before_call("wait")
        stream.clock = merge_clocks(stream.clock, event.clock)
        self._queue(stream, lambda: None, event)

    def is_done(self, event):
        self.before_call("is_done")
        if event.done:
            self.seen = merge_clocks(self.seen, event.clock)
        return event.done

    def synchronize(self, event):
        self.before_call("synchronize")
        while not event.done:
            assert any(self._step(stream) for stream in self.streams), "the streams wait for each other in a circle"
        self.seen = merge_clocks(self.seen, event.clock)

    def seconds(self, begin, end):
        assert begin.done and end.done
        return end.time - begin.time

    def is_capturing(self):
        return self.capturing

    def record_stream(self, tensor, stream):
        self.before_call("record_stream")
        self.handed_over += 1
        block = self.block(tensor)
        if stream not in block.recorded:
            block.recorded.append(stream)

    def copy(self, tensor):
        if tensor.data_ptr() in self.blocks:
            return tensor
        self.before_copy()
        stream = self.current()
        moved = self._allocate(tensor, stream)
        # Like a device, it keeps no reference to its source.
        block, host = self.block(moved), weakref.ref(tensor)
        self.copies += 1

        def run():
            source = host()
            if source is None:
                self.faults.append("memory of the host is freed before its copy has run")
            else:
                block.memory[: source.nbytes] = source.contiguous().numpy().reshape(-1).view(np.uint8)
            self.time += 1.0

        count, clock = self._queue(stream, run)
        for by, earlier, _ in block.uses:
            if clock.get(by.number, 0) < earlier:
                self.faults.append(f"memory is written while {by} may still use it")
        block.uses, block.write, block.recorded = [(stream, count, clock)], (stream, count), []
        for made, read in self.traces:
            made.append(moved)
            read.append(tensor)
        return moved

    def traced(self, call, made, read):
        self.traces.append((made, read))
        try:
            return call()
        finally:
            self.traces.pop()

    def is_pinned(self, tensor):
        return self.pinned

    # The memory.

    def _allocate(self, like, stream):
        for block, events in self.pending[:]:
            if all(event.done for event in events):
                self.seen = functools.reduce(merge_clocks, (event.clock for event in events), self.seen)
                self.pending.remove((block, events))
                self.idle.append(block)
        fitting = [it for it in self.idle if it.stream is stream and it.memory.nbytes == like.nbytes]
        if fitting:
            block = fitting[-1]
            self.idle.remove(block)
        else:
            block = Block(like.nbytes, stream)
            self.allocated += 1
        # Each allocation has its own view, which torch keeps until the storage is freed.
        view = block.memory[:]
        weakref.finalize(view, self._free, block, view.ctypes.data).atexit = False
        self.blocks[view.ctypes.data] = block
        return torch.from_numpy(view).view(like.dtype).view(like.shape)

    def _free(self, block, address):
        del self.blocks[address]
        if block.recorded:
            self.pending.append((block, [self._event(stream) for stream in block.recorded]))
        else:
            self.idle.append(block)

    def block(self, tensor):
        return self.blocks[tensor.untyped_storage().data_ptr()]

    @property
    def live(self):
        """Returns the number of blocks that tensors hold."""
        return len(self.blocks)

    # The work of the program.

    def read(self, tensor, then, stream=None):
        """Queues a kernel that reads a tensor and calls `then` with its values. It holds no reference to the tensor."""
        stream = stream or self.current()
        block, dtype, nbytes = self.block(tensor), tensor.dtype, tensor.nbytes

        def run():
            then(torch.from_numpy(block.memory[:nbytes].copy()).view(dtype).tolist())

        count, clock = self._queue(stream, run)
        by, written = block.write
        if clock.get(by.number, 0) < written:
            self.faults.append(f"{stream} reads memory that {by} may not have written yet")
        block.uses.append((stream, count, clock))

    def join(self, stream, other):
        """Makes a stream wait for the queued work of another."""
        self.wait(stream, self.record(other))

    # Execution.

    def _clock_of(self, stream):
        return {**merge_clocks(stream.clock, self.seen), stream.number: stream.queued + 1}

    def _queue(self, stream, run, after=None):
        stream.clock = clock = self._clock_of(stream)
        stream.queued += 1
        stream.queue.append((run, after))
        return stream.queued, clock

    def _step(self, stream):
        """Runs a stream's next piece of work, if it may run. Returns whether it did."""
        if not stream.queue or (stream.queue[0][1] is not None and not stream.queue[0][1].done):
            return False
        run, _ = stream.queue.pop(0)
        run()
        return True

    def run(self, stream):
        """Runs a stream until it has to wait."""
        while self._step(stream):
            pass

    def run_some(self, steps):
        """Runs up to `steps` pieces of work of random streams."""
        for _ in range(steps):
            self._step(self.rng.choice(self.streams))

    def run_all(self):
        while any(self._step(stream) for stream in self.streams):
            pass
        assert not any(stream.queue for stream in self.streams), "the streams wait for each other in a circle"


def merge_clocks(one, other):
    return {key: max(one.get(key, 0), other.get(key, 0)) for key in one.keys() | other.keys()}
