"""Pinning on machines without an accelerator: a fake host allocator, and the parts of torch that lead to it.

Inside ``pinning()`` torch believes in an accelerator, and all pinned memory, the loader's and that of torch's own
``Tensor.pin_memory``, comes from a ``FakeHost``. It behaves as torch's caching host allocator does: what is freed is
reused, most recently freed first, but not while a recorded use of it is under way.
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
    """What a tensor of the fake holds on to. Its end is the end of the allocation."""


class Use:
    """A copy to the device that is under way: until it is done the block must be what it was at the start."""

    def __init__(self, host, address, memory):
        self.host, self.address, self.memory = host, address, memory
        self.before = memory.copy()

    def done(self):
        self.host.uses[self.address].remove(self)
        assert np.array_equal(self.before, self.memory), "pinned memory was written to while a copy read it"
        self.host.offer(self.address)


class FakeHost:
    """Blocks end on any thread, in the middle of anything, so nothing here takes a lock unless a test asks for one.
    The lock is then held as torch's allocators do, without the GIL and across a fork."""

    def __init__(self, delay=0.0, locked=False):
        self.delay = delay  # seconds that an allocation takes
        self.lock = threading.RLock() if locked else contextlib.nullcontext()
        self.busy = False  # a thread has the lock
        self.fail = {}  # number of bytes: what allocating that many raises
        self.allocated = 0
        self.sizes = []
        self.reused = 0
        self.threads = set()  # names of the threads that allocated
        self.live = {}  # address: (weak reference, memory)
        self.waiting = {}  # freed while a use was under way
        self.idle = {}  # size: memory, the last freed one last
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
        """Makes a block available again, once it is neither held nor read."""
        if address in self.waiting and not self.uses.get(address):
            memory = self.waiting.pop(address)
            self.idle.setdefault(memory.size, []).append(memory)

    def use(self, tensor):
        """A copy of a tensor to the device begins, as with ``non_blocking=True``."""
        address = tensor.untyped_storage().data_ptr()
        use = Use(self, address, self.live[address][1])
        self.uses.setdefault(address, []).append(use)
        return use

    def owns(self, tensor):
        """Whether a tensor lies in pinned memory, at its beginning or further on."""
        storage = tensor.untyped_storage()
        found = self.live.get(storage.data_ptr())
        return found is not None and found[1].size == storage.nbytes()

    def pin(self, tensor, device=None):
        """``Tensor.pin_memory``, as ATen's ``_pin_memory`` does it."""
        if self.owns(tensor):
            return tensor
        extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        nbytes = extent * tensor.element_size() if tensor.numel() else 0
        storage = self.allocate(nbytes).untyped_storage() if nbytes else torch.UntypedStorage(0)
        pinned = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())
        return pinned.copy_(tensor)


class Accelerator:
    """Devices: each thread has a current one, which is the first until it sets another."""

    def __init__(self):
        self.current = threading.local()
        self.set_by = []  # (thread's name, index)

    def index(self):
        return getattr(self.current, "index", 0)

    def set_index(self, index):
        self.current.index = index
        self.set_by.append((thread_name(), index))


def thread_name():
    """The name of this thread in the kernel."""
    with open(f"/proc/self/task/{threading.get_native_id()}/comm") as f:
        return f.read().strip()


@contextlib.contextmanager
def pinning(**kw):
    """Within it torch finds an accelerator; gives the host allocator."""
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
        # What older versions of torch ask.
        patch(torch.cuda, "is_available", lambda: True)
        patch(torch.cuda, "current_device", accelerator.index)
        stack.enter_context(torchs_method(pin_memory))
        if not TORCH_MODE:
            patch(device_pinning, "allocate", host.allocate)
            patch(device_pinning, "_tensor_pin_memory", pin_memory)
        yield host


@contextlib.contextmanager
def torchs_method(pin_memory):
    """``torch.Tensor`` inherits the method, and so has to be left without one of its own."""
    torch.Tensor.pin_memory = pin_memory
    try:
        yield
    finally:
        del torch.Tensor.pin_memory
