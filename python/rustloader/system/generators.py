"""The global random number generators: saves and restores their states, and frees their locks in forked children."""

from __future__ import annotations

import ctypes
import importlib
import random
import struct
import sys
import threading
from typing import Any

import torch

from rustloader.system.forks import at_fork

# Sizes, in bytes, of two parts of the state of NumPy's MT19937: its 624 words, and these words together with the
# position that follows them.
_KEY, _STATE = 624 * 4, 625 * 4


class GeneratorStates:
    """The states of the global generators of torch, Python and NumPy when this object was created. NumPy's state is
    omitted if the program has not imported ``numpy.random``."""

    def __init__(self) -> None:
        self._torch_state = torch.default_generator.get_state()
        self._python_state = random.getstate()
        numpy_random = loaded_numpy_random()
        self._numpy_state = None if numpy_random is None else _NumpyState(numpy_random)

    def restore(self) -> None:
        """Sets the generators to the saved states."""
        torch.default_generator.set_state(self._torch_state)
        random.setstate(self._python_state)
        if self._numpy_state is not None:
            self._numpy_state.restore()


def loaded_numpy_random() -> Any:
    """Returns the module ``numpy.random``; None if the program has not imported it. If another thread is importing it,
    waits until that is done."""
    return importlib.import_module("numpy.random") if sys.modules.get("numpy.random") is not None else None


class _NumpyState:
    """The state of NumPy's global generator.

    NumPy takes 30 us to return its state and another 30 us to set it. Therefore the state of the usual bit generator,
    MT19937, is read and written directly in memory, unless there are other threads, which could draw at the same time.
    NumPy draws normal numbers in pairs, and the leftover second number of a pair is not in that memory. The only way to
    read it is to draw a normal number: if this does not change the state in memory, it has returned the leftover.
    """

    def __init__(self, numpy_random: Any) -> None:
        self._generator = generator = numpy_random.mtrand._rand
        self._bits = generator._bit_generator
        # The complete state as NumPy's dict; None if `_memory` contains the complete state.
        self._dict: dict[str, Any] | None = None
        self._address = _address_of(self._bits, numpy_random.MT19937)
        self._memory = b"" if self._address is None else ctypes.string_at(self._address, _STATE)
        # If all words are 0, they stay 0 after any number of draws, and drawing a normal number would never return.
        if self._address is None or threading.active_count() > 1 or not self._memory[:_KEY].strip(b"\0"):
            self._dict = generator.get_state(legacy=False)
            return
        leftover = self._take_leftover()
        if leftover is not None:
            self._dict = self._as_dict() | {"has_gauss": 1, "gauss": leftover}
            generator.set_state(self._dict)

    def restore(self) -> None:
        """Sets the generator to the saved state."""
        bits = self._generator._bit_generator
        if type(bits) is not type(self._bits):
            # The program has replaced the bit generator with one of another type, whose state was not saved.
            return
        if self._dict is None and bits is self._bits and threading.active_count() == 1:
            # This is necessary even if the memory is unchanged: the program may have restored the memory by seeding,
            # and there may still be a leftover number.
            self._take_leftover()
            ctypes.memmove(self._address, self._memory, _STATE)  # type: ignore[arg-type]
        else:
            self._generator.set_state(self._dict or self._as_dict())

    def _as_dict(self) -> dict[str, Any]:
        """Returns the state saved in `_memory` as NumPy's dict, without a leftover number."""
        *key, pos = struct.unpack("=624Ii", self._memory)
        return {"bit_generator": "MT19937", "state": {"key": key, "pos": pos}, "has_gauss": 0, "gauss": 0.0}

    def _take_leftover(self) -> float | None:
        """Removes the leftover second number of a pair from the generator and returns it; returns None if there is
        none. The state in memory is the same afterwards."""
        address: Any = self._address
        before = ctypes.string_at(address, _STATE)
        drawn = float(self._generator.standard_normal())
        if ctypes.string_at(address, _STATE) == before:
            return drawn
        # There was no leftover, so the draw has made a new pair. The second number of this pair must be removed.
        self._generator.standard_normal()
        ctypes.memmove(address, before, _STATE)
        return None


# The bit generator that was checked last, and the address of its state.
_checked: tuple[Any, int | None] = None, None


def _address_of(bits: Any, usual: Any) -> int | None:
    """Returns the address of a bit generator's state in memory; None if the generator's type is not ``usual``, or if
    the state does not have the expected layout."""
    global _checked
    checked, address = _checked
    if bits is not checked:
        address = None
        if type(bits) is usual:
            address = bits.ctypes.state_address
            state = bits.state["state"]
            if ctypes.string_at(address, _STATE) != state["key"].tobytes() + state["pos"].to_bytes(4, sys.byteorder):
                address = None
        _checked = bits, address
    return address


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
