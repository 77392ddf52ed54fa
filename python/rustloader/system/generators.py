"""The states of the global random number generators."""

from __future__ import annotations

import random
import sys

import torch


class GeneratorStates:
    """The states of the global generators of torch, Python and NumPy at one moment; of NumPy's if it is imported."""

    def __init__(self) -> None:
        self._torchs = torch.default_generator.get_state()
        self._pythons = random.getstate()
        numpy_random = sys.modules.get("numpy.random")
        # As a dict, which holds the state of any bit generator.
        self._numpys = None if numpy_random is None else (numpy_random.set_state, numpy_random.get_state(legacy=False))

    def restore(self) -> None:
        """Sets the generators to these states."""
        torch.default_generator.set_state(self._torchs)
        random.setstate(self._pythons)
        if self._numpys is not None:
            set_state, state = self._numpys
            set_state(state)
