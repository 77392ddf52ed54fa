"""Pinning on machines without an accelerator: a fake host allocator, and patches that make torch use it.

Inside ``pinning()`` torch reports an accelerator, and all pinned memory, whether the loader or torch's own
``Tensor.pin_memory`` allocates it, comes from a ``FakeHost``. Like torch's caching host allocator, it reuses freed
blocks, the most recently freed first, but not while a recorded use is in progress.
"""

import contextlib
import threading
import time
import weakref
from unittest import mock

import numpy as np
import torch
from support import TORCH_MODE

if not TORCH_MODE:
    from rustloader.device import pinning as device_pinning

POISON = 0xEE


class Block(np.ndarray):
    """The array under a tensor of the fake allocator. Its deallocation frees the block."""


class Use:
    """A copy to the device that is in progress: until it is done, the block must not change."""

    def __init__(self, host, address, memory):
        self.host, self.address, self.memory = host, address, memory
        self.before = memory.copy()

    def done(self):
        self.host.uses[self.address].remove(self)
        assert np.array_equal(self.before, self.memory), "pinned memory was written to while a copy read it"
        self.host.offer(self.address)


class FakeHost:
    """Blocks are freed on any thread, at any point, so nothing here takes a lock unless a test asks for one. The lock
    is then held as in torch's allocators: without the GIL, and across a fork."""

    def __init__(self, delay=0.0, locked=False):
        self.delay = delay  # seconds that an allocation takes
        self.lock = threading.RLock() if locked else contextlib.nullcontext()
        self.busy = False  # whether a thread holds the lock
        self.fail = {}  # number of bytes: the error that allocating this many raises
        self.allocated = 0
        self.sizes = []
        self.reused = 0
        self.threads = set()  # names of the threads that allocate
        self.live = {}  # address: (weak reference, memory)
        self.waiting = {}  # address: memory freed while a use may be in progress
        self.idle = {}  # size: freed memory, the most recently freed last
        self.uses = {}

    def allocate(self, nbytes):
        self.threads.add(thread_name())
        with self.lock:
            self.busy = True
            time.sleep(self.delay)
            self.busy = False
        if nbytes in self.fail:
            raise self.fail[nbytes]
        idle = self.idle.get(nbytes)
        if idle:
            memory = idle.pop()
            self.reused += 1
        else:
            memory = np.empty(nbytes, np.uint8)
        memory[:] = POISON
        address = memory.ctypes.data
        block = memory.view(Block)
        self.live[address] = (weakref.ref(block, lambda _: self.freed(address)), memory)
        self.allocated += 1
        self.sizes.append(nbytes)
        return torch.from_numpy(block)

    def freed(self, address):
        with self.lock:
            self.waiting[address] = self.live.pop(address)[1]
            self.offer(address)

    def offer(self, address):
        """Makes a block available again if it is neither held nor read."""
        if address in self.waiting and not self.uses.get(address):
            memory = self.waiting.pop(address)
            self.idle.setdefault(memory.size, []).append(memory)

    def use(self, tensor):
        """Begins a copy of a tensor to the device, as with ``non_blocking=True``."""
        address = tensor.untyped_storage().data_ptr()
        use = Use(self, address, self.live[address][1])
        self.uses.setdefault(address, []).append(use)
        return use

    def owns(self, tensor):
        """Whether a tensor lies in pinned memory, at any offset."""
        storage = tensor.untyped_storage()
        found = self.live.get(storage.data_ptr())
        return found is not None and found[1].size == storage.nbytes()

    def pin(self, tensor, device=None):
        """``Tensor.pin_memory``, implemented as in ATen's ``_pin_memory``."""
        if self.owns(tensor):
            return tensor
        extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        nbytes = extent * tensor.element_size() if tensor.numel() else 0
        storage = self.allocate(nbytes).untyped_storage() if nbytes else torch.UntypedStorage(0)
        pinned = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())
        return pinned.copy_(tensor)


class Accelerator:
    """Tracks the current device of each thread, which is device 0 until it sets another."""

    def __init__(self):
        self.current = threading.local()
        self.set_by = []  # (thread's name, index)

    def index(self):
        return getattr(self.current, "index", 0)

    def set_index(self, index):
        self.current.index = index
        self.set_by.append((thread_name(), index))


def thread_name():
    """Returns this thread's name in the kernel."""
    with open(f"/proc/self/task/{threading.get_native_id()}/comm") as f:
        return f.read().strip()


@contextlib.contextmanager
def pinning(**kw):
    """Makes torch find an accelerator in the body. Yields the host allocator."""
    host, accelerator = FakeHost(**kw), Accelerator()
    host.accelerator = accelerator

    def pin_memory(self, device=None):
        return host.pin(self, device)

    with contextlib.ExitStack() as stack:

        def patch(where, name, value):
            stack.enter_context(mock.patch.object(where, name, value))

        patch(torch.accelerator, "is_available", lambda: True)
        patch(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
        patch(torch.accelerator, "current_device_index", accelerator.index)
        patch(torch.accelerator, "set_device_index", accelerator.set_index)
        # Older versions of torch call these.
        patch(torch.cuda, "is_available", lambda: True)
        patch(torch.cuda, "current_device", accelerator.index)
        stack.enter_context(pin_memory_method(pin_memory))
        if not TORCH_MODE:
            patch(device_pinning, "allocate", host.allocate)
            patch(device_pinning, "_tensor_pin_memory", pin_memory)
        yield host


@contextlib.contextmanager
def pin_memory_method(pin_memory):
    """Replaces the method in the body. ``torch.Tensor`` inherits it, so the replacement is deleted afterwards."""
    torch.Tensor.pin_memory = pin_memory
    try:
        yield
    finally:
        del torch.Tensor.pin_memory
