"""The states of the global random number generators."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
import threading
from typing import Any

import torch

# Bytes of the state of NumPy's MT19937: 624 words, and the position among them.
_KEY, _WORDS = 624 * 4, 625 * 4


class GeneratorStates:
    """The states of the global generators of torch, Python and NumPy at one moment; of NumPy's if it is imported."""

    def __init__(self) -> None:
        self._torch_state = torch.default_generator.get_state()
        self._python_state = random.getstate()
        numpy_random = sys.modules.get("numpy.random")
        self._numpy_state = None if numpy_random is None else _NumpyState(numpy_random)

    def restore(self) -> None:
        """Sets the generators to these states."""
        torch.default_generator.set_state(self._torch_state)
        random.setstate(self._python_state)
        if self._numpy_state is not None:
            self._numpy_state.restore()


class _NumpyState:
    """The state of NumPy's global generator.

    NumPy takes 30 us to read it and as long to set it. So its usual bit generator is read and set where it lies in
    memory. What is not there is the normal number left over from a pair: a draw of a normal number that leaves the
    words as they are has taken it. With other threads, which may draw meanwhile, NumPy does all this under its lock.
    """

    def __init__(self, numpy_random: Any) -> None:
        self._generator = generator = numpy_random.mtrand._rand
        self._bits = generator._bit_generator
        # As a dict, which holds the state of any bit generator; None if the words are all.
        self._whole: dict[str, Any] | None = None
        self._address = _address_of(self._bits, numpy_random.MT19937)
        self._words = b"" if self._address is None else ctypes.string_at(self._address, _WORDS)
        # Words that are all 0 stay 0, whatever is drawn.
        if self._address is None or threading.active_count() > 1 or not self._words[:_KEY].strip(b"\0"):
            self._whole = generator.get_state(legacy=False)
            return
        left_over = self._take_left_over()
        if left_over is not None:
            self._whole = self._as_dict() | {"has_gauss": 1, "gauss": left_over}
            generator.set_state(self._whole)

    def restore(self) -> None:
        bits = self._generator._bit_generator
        if type(bits) is not type(self._bits):
            # What the program has put in its place has a state of its own.
            return
        if self._whole is None and bits is self._bits and threading.active_count() == 1:
            # Also if the words are as they were: a seed may have led back to them.
            self._take_left_over()
            ctypes.memmove(self._address, self._words, _WORDS)  # type: ignore[arg-type]
        else:
            self._generator.set_state(self._whole or self._as_dict())

    def _as_dict(self) -> dict[str, Any]:
        """Returns the words as NumPy gives them, without a number left over."""
        *key, pos = struct.unpack("=624Ii", self._words)
        return {"bit_generator": "MT19937", "state": {"key": key, "pos": pos}, "has_gauss": 0, "gauss": 0.0}

    def _take_left_over(self) -> float | None:
        """Takes the normal number left over from a pair. If there is none, the words stay as they are."""
        address: Any = self._address
        words = ctypes.string_at(address, _WORDS)
        drawn = float(self._generator.standard_normal())
        if ctypes.string_at(address, _WORDS) == words:
            return drawn
        # The other one of the new pair.
        self._generator.standard_normal()
        ctypes.memmove(address, words, _WORDS)
        return None


# The bit generator whose memory was looked at last, and the address of its state.
_known: tuple[Any, int | None] = None, None


def _address_of(bits: Any, usual: Any) -> int | None:
    """Returns the address of the state of a bit generator; None if it is not the usual one, or lies there otherwise."""
    global _known
    known, address = _known
    if bits is not known:
        address = None
        if type(bits) is usual:
            address = bits.ctypes.state_address
            state = bits.state["state"]
            if ctypes.string_at(address, _WORDS) != state["key"].tobytes() + state["pos"].to_bytes(4, sys.byteorder):
                address = None
        _known = bits, address
    return address
