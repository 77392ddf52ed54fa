"""The global random number generators: saves and restores their states, and frees their locks in forked children."""

from __future__ import annotations

import ctypes
import importlib
import random
import struct
import sys
from typing import Any

import torch

from rustloader.system.forks import at_fork


class GeneratorStates:
    """The states of the global generators of torch, Python and NumPy when this object was created. NumPy's state is
    omitted if the program has not imported ``numpy.random``. A ``with`` statement restores the states at its end."""

    def __init__(self) -> None:
        self._torch_state = torch.default_generator.get_state()
        self._python_state = random.getstate()
        numpy_random = loaded_numpy_random()
        self._numpy_generator: Any = None if numpy_random is None else numpy_random.mtrand._rand
        self._numpy_state = None if numpy_random is None else numpy_random.get_state(legacy=False)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Sets the generators to the saved states. A bit generator of NumPy that is of another type than at that time
        keeps its state."""
        torch.default_generator.set_state(self._torch_state)
        random.setstate(self._python_state)
        state, generator = self._numpy_state, self._numpy_generator
        if state is not None and type(generator._bit_generator).__name__ == state["bit_generator"]:
            generator.set_state(state)


def loaded_numpy_random() -> Any:
    """Returns the module ``numpy.random``; None if the program has not imported it. If another thread is importing it,
    waits until that is done."""
    return importlib.import_module("numpy.random") if sys.modules.get("numpy.random") is not None else None


# The first words of the mutex in torch's `c10::GeneratorImpl`: their offset and size, in bytes. A pointer and the
# reference counts precede them.
_MUTEX, _MUTEX_SIZE = 16, 20


def _mutex_of(generator: Any) -> tuple[int, ...]:
    """Returns the first words of a generator's mutex, in glibc's order: lock, count, owner, number of users, kind."""
    return struct.unpack("=5I", ctypes.string_at(generator._cdata + _MUTEX, _MUTEX_SIZE))


# Modules with a lock that `torch.manual_seed` takes.
_DEVICES = ("torch.cuda", "torch.mtia", "torch.xpu")


def _free(lock: Any) -> bool:
    """Frees a lock in a forked child if another thread of the parent held it. Returns whether that is so."""
    if lock.acquire(blocking=False):
        lock.release()
        return False
    lock._at_fork_reinit()
    return True


def _free_locks() -> None:
    """Frees the locks of torch's default generator and NumPy's global generator in a forked child.

    A thread holds such a lock, but not the GIL, while it draws numbers. If another thread forks at that moment, the
    lock is held in the child by a thread that does not exist there, and the child hangs when it draws or seeds.
    """
    generator: Any = torch.default_generator
    lock, count, _, users, kind = _mutex_of(generator)
    # With another C library, or if torch moves its mutex, nothing is written: the words must be those of a mutex that
    # is held, and the words of a new generator those of a mutex that is free.
    if lock in (1, 2) and users in (0, 1) and count == kind == 0 and not any(_mutex_of(torch.Generator())):
        ctypes.memset(generator._cdata + _MUTEX, 0, _MUTEX_SIZE)
    for name in _DEVICES:
        if (device_lock := getattr(sys.modules.get(name), "_initialization_lock", None)) is not None:
            _free(device_lock)
    # A thread of the parent may have been importing NumPy.
    numpy_generator = getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None)
    if numpy_generator is not None and _free((bits := numpy_generator._bit_generator).lock):
        # NumPy keeps the constants of the last binomial distribution, and seeding does not reset them. The thread may
        # have written only some of them. Drawing from a distribution that no program uses writes them all.
        state = bits.state
        numpy_generator.binomial(1, 0.123456789)
        bits.state = state


at_fork("generators", after_in_child=_free_locks)
