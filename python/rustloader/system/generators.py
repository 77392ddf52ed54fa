"""The states of the global random number generators."""

from __future__ import annotations

import random
import sys

import torch


class GeneratorStates:
    """The states of the global generators of torch, Python and NumPy at one moment; of NumPy's if it is imported."""

    def __init__(self) -> None:
        self._torch_state = torch.default_generator.get_state()
        self._python_state = random.getstate()
        numpy_random = sys.modules.get("numpy.random")
        # As a dict, which holds the state of any bit generator.
        self._numpy_state = None
        if numpy_random is not None:
            self._numpy_state = numpy_random.set_state, numpy_random.get_state(legacy=False)

    def restore(self) -> None:
        """Sets the generators to these states."""
        torch.default_generator.set_state(self._torch_state)
        random.setstate(self._python_state)
        if self._numpy_state is not None:
            set_state, state = self._numpy_state
            set_state(state)
